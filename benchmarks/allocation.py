"""Explicit plans at the bytes of memonger's own code, and below, by what MXNet allocates.

    python benchmarks/allocation.py [--realisation packed] [--time-limit SECONDS] [NETWORK ...]

Batch 32 at 224 x 224, roofline of a V100. Bytes are MXNet's own total for activations, with
--realisation packed those of the one array that it allocates for them; as
gradients are outputs of an explicit training graph, and lie in that total, whole steps are
compared: the budget is memonger's bytes, and all arguments, gradients and states. Overheads are
on the same costs, and memonger's is that of memplan's `memonger`, which is like its own code. The
last column is the geometric mean over the plans of a row of what MXNet allocates by the peak of
live bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import memplan
import networks
from memplan.strategies.auto import Auto

MIB = 1 << 20
COSTS = "roofline:v100"
# Besides memonger's bytes and the least, these shares of the unplanned activations are planned for.
SHARES = (0.75, 0.5)


def row(name: str, realisation: str, time_limit: float) -> list[str]:
    """The cells of a network."""
    net = networks.network(name)
    options: dict[str, Any] = {"costs": COSTS, "time_limit": time_limit, "data": networks.SHAPE}
    memonger = memplan.plan(net, strategy="memonger", **options)
    own, unplanned = networks.MEMONGER_MB[name] * MIB, memonger.unplanned.allocated_nbytes
    sizes = [own, *(int(share * unplanned) for share in SHARES)]
    budgets = [memonger.fixed_nbytes + nbytes for nbytes in sizes]
    rows = memplan.compare(
        net,
        strategies=[Auto(effort=math.inf)],
        budgets=[*budgets, None],
        realisation=realisation,
        **options,
    ).rows
    plans = [attempt.plan for attempt in rows]
    cells = [name, str(unplanned // MIB), str(own // MIB), f"{memonger.overhead:.1%}"]
    for plan in plans:
        if plan is None:
            cells += ["-", "-"]
            continue
        activations = plan.total_nbytes - memonger.fixed_nbytes
        bound = (
            "" if plan.lower_bound_overhead is None else f" (bound {plan.lower_bound_overhead:.1%})"
        )
        cells += [str(activations // MIB), f"{plan.overhead:.1%}{bound}"]
    at_own, least = plans[0], plans[-1]
    cells.append("-" if at_own is None else f"{at_own.overhead / memonger.overhead:.2f}")
    if least is None:
        cells.append("-")
    else:
        cells.append(f"{(least.total_nbytes - memonger.fixed_nbytes) / own:.2f}")
    ratios = [p.allocated_nbytes / p.peak_nbytes for p in plans if p is not None]
    cells.append(f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-")
    return cells


def main() -> None:
    """Print the table, a row per network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--realisation", choices=["explicit", "packed"], default="explicit")
    parser.add_argument("--time-limit", type=float, default=60.0)
    options = parser.parse_args()
    heads = [
        *("network", "unplanned MB", "memonger's own code, MB", "overhead"),
        *("`auto` in that, MB", "overhead", *("MB", "overhead") * len(SHARES), "least MB"),
        *("overhead", "overhead by memonger's", "least by memonger's", "allocated by peak"),
    ]
    print("|", " | ".join(heads), "|")
    print("|", " | ".join("---" for _ in heads), "|")
    for name in options.networks or networks.MEMONGER_MB:
        print("|", " | ".join(row(name, options.realisation, options.time_limit)), "|", flush=True)


if __name__ == "__main__":
    main()
