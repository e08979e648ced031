"""Plans by MXNet's mirroring against memonger's own code, on its six networks.

    python benchmarks/mirror.py                 # all, about two minutes
    python benchmarks/mirror.py resnet50_v1     # one

Batch 32 at 224 x 224, roofline of a V100. "MB" are MXNet's own total for activations, as its
executor prints it after binding on the CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import memplan
from memplan.planning.plan import Plan
from networks import MEMONGER_MB, SHAPE, network

COSTS = "roofline:v100"
# Seconds for `auto` at most.
LIMITS = {"resnet152_v2": 30.0, "memonger-resnet": 30.0}
LIMIT = 5.0
STRATEGY = "auto"


@dataclass(frozen=True)
class Row:
    name: str
    reference_mb: int
    memonger: Plan
    at_reference: Plan
    least: Plan

    def cells(self) -> tuple[str, ...]:
        bound = self.at_reference.lower_bound_overhead or 0.0
        return (
            self.name,
            f"{self.memonger.unplanned.allocated_nbytes >> 20}",
            f"{self.reference_mb}",
            f"{self.memonger.allocated_nbytes >> 20}",
            f"{self.memonger.overhead:.1%}",
            f"{self.memonger.planning_seconds:.1f}",
            f"{self.at_reference.allocated_nbytes >> 20}",
            f"{self.at_reference.overhead:.1%}",
            f"{bound:.1%}",
            self.at_reference.status.value,
            f"{self.at_reference.planning_seconds:.1f}",
            f"{self.least.allocated_nbytes >> 20}",
            f"{self.least.overhead:.1%}",
        )


HEADER = (
    "network",
    "unplanned MB",
    "memonger's own code, MB",
    "`memonger` MB",
    "overhead",
    "planned in s",
    "`auto` MB",
    "overhead",
    "proved bound",
    "status",
    "planned in s",
    "`auto`, least: MB",
    "overhead",
)


def measure(name: str) -> Row:
    """The three plans of one network."""
    net = network(name)
    limit = LIMITS.get(name, LIMIT)
    memonger = memplan.plan(net, strategy="memonger", costs=COSTS, data=SHAPE)
    reference = MEMONGER_MB[name]
    # MXNet prints whole MiB, rounded down: up to the next one is the same figure.
    activations = ((reference + 1) << 20) - 1
    budget = memonger.fixed_nbytes + activations
    options: dict[str, Any] = {"strategy": STRATEGY, "costs": COSTS, "time_limit": limit}
    at_reference = memplan.plan(net, budget=budget, data=SHAPE, **options)
    least = memplan.plan(net, data=SHAPE, **options)
    return Row(name, reference, memonger, at_reference, least)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", help=", ".join(MEMONGER_MB))
    names = parser.parse_args().networks or list(MEMONGER_MB)
    print("| " + " | ".join(HEADER) + " |")
    print("|---" * len(HEADER) + "|", flush=True)
    for name in names:
        print("| " + " | ".join(measure(name).cells()) + " |", flush=True)


if __name__ == "__main__":
    main()
