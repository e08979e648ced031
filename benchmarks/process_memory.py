"""Does a process take what a plan promises? Growth and seconds beside the promise.

    python benchmarks/process_memory.py
    python benchmarks/process_memory.py --networks resnext,high_resolution --budgets 0.5

Every row is a plan for a network that nothing in memplan was tuned on, trained for a few steps in a
process of its own, under MXNet's default settings: by how much the process grows beyond arguments,
states and gradients that it is given, by what the plan promises, and the same for the unplanned
step. This is what `memplan check` does.
"""

from __future__ import annotations

import argparse

import mxnet as mx

import memplan
from memplan.errors import MemplanError
from memplan.mxnet.check import check, promised_growth
from memplan.strategies import REALISATIONS
from process_networks import NETWORKS


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--budgets", default="0.8,0.5", help="shares of the unplanned step")
    parser.add_argument("--realisations", default=",".join(REALISATIONS))
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for each plan")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    options = parser.parse_args()
    columns = ("network", "budget", "realisation", "promised, MB", "growth / promise")
    columns += ("promised of unplanned", "measured", "time, promised", "measured", "equal")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name in options.networks.split(","):
        for budget in options.budgets.split(","):
            for realisation in options.realisations.split(","):
                print(row(name, float(budget), realisation, options), flush=True)


def row(name: str, budget: float, realisation: str, options: argparse.Namespace) -> str:
    """The row of a plan."""
    net, shapes = NETWORKS[name]()
    head = f"| {name} | {budget:.0%} | {realisation} |"
    try:
        plan = memplan.plan(
            net,
            budget=budget,
            realisation=realisation,
            ctx=mx.cpu(),
            time_limit=options.time_limit,
            **shapes,
        )
    except MemplanError as error:
        return f"{head} {type(error).__name__} | | | | | | |"
    found = check(plan, ctx=mx.cpu(), steps=options.steps)
    promised, before = promised_growth(plan.footprint), promised_growth(plan.unplanned)
    return (
        f"{head} {promised / 1e6:.0f} | {found.planned.grown_nbytes / promised:.2f} "
        f"| {promised / before:.2f} "
        f"| {found.planned.grown_nbytes / found.unplanned.grown_nbytes:.2f} "
        f"| {plan.overhead:+.1%} | {found.measured_overhead:+.1%} "
        f"| {'yes' if found.is_equal else 'no'} |"
    )


if __name__ == "__main__":
    main()
