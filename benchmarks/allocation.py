"""Explicit plans at the bytes of memonger's own code, and below, by what MXNet allocates.

    python benchmarks/allocation.py [--time-limit SECONDS] [--points N] [NETWORK ...]

Batch 32 at 224 x 224, roofline of a V100. Bytes are MXNet's own total for activations; as
gradients are outputs of an explicit training graph, and lie in that total, whole steps are
compared: the budget is memonger's bytes, and all arguments, gradients and states. Overheads are
on the same costs. The last column is the geometric mean over a frontier of what MXNet allocates
by the peak of live bytes.
"""

from __future__ import annotations

import argparse
import math

import memplan
import networks
from memplan.errors import BudgetError

MIB = 1 << 20
COSTS = "roofline:v100"


def row(name: str, time_limit: float, npoints: int) -> list[str]:
    """The cells of a network."""
    net = networks.network(name)
    options = {"costs": COSTS, "time_limit": time_limit, "data": networks.SHAPE}
    memonger = memplan.plan(net, strategy="memonger", **options)
    own = networks.MEMONGER_MB[name]
    budget = memonger.fixed_nbytes + own * MIB
    explicit = {"realisation": "explicit", "strategy": "auto", **options}
    cells = [name, str(memonger.unplanned.allocated_nbytes // MIB), str(own)]
    cells.append(f"{memonger.overhead:.1%}")
    try:
        plan = memplan.plan(net, budget=budget, **explicit)
        bound = "-" if plan.lower_bound is None else f"{plan.lower_bound:.1%}"
        cells += [str(_activations(plan, memonger)), f"{plan.overhead:.1%}", bound]
        cells.append(f"{plan.overhead / memonger.overhead:.2f}")
    except BudgetError:
        cells += ["-", "-", "-", "-"]
    least = memplan.plan(net, **explicit)
    reached = _activations(least, memonger)
    cells += [str(reached), f"{least.overhead:.1%}", f"{reached / own:.2f}"]
    frontier = memplan.frontier(net, budgets=npoints, **explicit)
    ratios = [math.log(p.allocated_nbytes / p.peak_nbytes) for p in frontier.plans]
    cells.append(f"{math.exp(sum(ratios) / len(ratios)):.2f}")
    return cells


def _activations(plan: memplan.Plan, memonger: memplan.Plan) -> int:
    """MiB of a step beside all arguments, gradients and states."""
    return (plan.total_nbytes - memonger.fixed_nbytes) // MIB


def main() -> None:
    """Print the table, a row per network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--points", type=int, default=6)
    options = parser.parse_args()
    heads = [
        *("network", "unplanned MB", "memonger's own code, MB", "overhead", "`auto` MB"),
        *("overhead", "proved bound", "by memonger's", "least MB", "overhead", "by memonger's"),
        "allocated by peak",
    ]
    print("|", " | ".join(heads), "|")
    print("|", " | ".join("---" for _ in heads), "|")
    for name in options.networks or networks.MEMONGER_MB:
        print("|", " | ".join(row(name, options.time_limit, options.points)), "|", flush=True)


if __name__ == "__main__":
    main()
