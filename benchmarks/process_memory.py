"""Does a process take what a plan promises? Its growth beside the promise, by network and budget.

    python benchmarks/process_memory.py
    python benchmarks/process_memory.py --networks resnext,high_resolution --budgets 0.5

The networks are trained for a few steps, each plan in a process of its own, under MXNet's default
settings: by how much the process grows beyond arguments, states and gradients that it is given,
beside what the plan promises, and the same for the unplanned step. Where there is no plan stands
the least share of the unplanned step that memplan reaches. `memplan check` does this for a network
of yours, and compares times, too.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import mxnet as mx

import memplan
from further_networks import FURTHER
from held_out_networks import HELD_OUT
from memplan.errors import BudgetError, TraceError
from memplan.mxnet.check import promised_growth, unlike
from memplan.mxnet.train.trial import run_apart
from memplan.planning.job import Job
from memplan.step.schedule import Schedule
from process_networks import NETWORKS, Shapes, Symbol

OTHERS = HELD_OUT | FURTHER


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    held_out = f"or of {', '.join(OTHERS)}"
    parser.add_argument("--networks", default=",".join(NETWORKS), help=held_out)
    parser.add_argument("--budgets", default="0.75,0.5,0.35", help="shares of the unplanned step")
    parser.add_argument("--realisations", default="packed,explicit,mirror")
    parser.add_argument("--strategy", default="auto", help="such as auto:effort=0.1")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each plan")
    options = parser.parse_args()
    realisations = options.realisations.split(",")
    columns = ["network", "unplanned, MB", "growth / promise", "budget"]
    for realisation in realisations:
        columns += [f"{realisation}, MB", "growth / promise", "of unplanned: promised, real"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for name in options.networks.split(","):
        net, shapes = (NETWORKS | OTHERS)[name]()
        with tempfile.TemporaryDirectory() as folder:
            unplanned = Unplanned(net, shapes, Path(folder))
            for budget in map(float, options.budgets.split(",")):
                cells = [name, *unplanned.cells(), f"{budget:.0%}"]
                for realisation in realisations:
                    search = {"strategy": options.strategy, "time_limit": options.time_limit}
                    cells += unplanned.planned(realisation, budget, search)
                print(f"| {' | '.join(cells)} |", flush=True)


class Unplanned:
    """What the unplanned step of a network takes, and plans beside it."""

    def __init__(self, net: Symbol, shapes: Shapes, folder: Path) -> None:
        self.net, self.shapes, self.folder = net, shapes, folder
        self.trained: dict[tuple[str, int, tuple[int, ...]], tuple[int, str]] = {}
        job = Job.prepare(net, ctx=mx.cpu(), **shapes)
        self.promised = promised_growth(job.unplanned)
        self.total = job.unplanned.total_nbytes
        schedule = Schedule.unplanned(job.graph)
        results = folder / "unplanned.npz"
        self.grown = run_apart(schedule, job.trace, ctx=mx.cpu(), results=results).grown_nbytes

    def cells(self) -> list[str]:
        """Promise, and growth beside it."""
        return [f"{self.promised / 1e6:.0f}", f"{self.grown / self.promised:.2f}"]

    def planned(self, realisation: str, budget: float, search: dict[str, Any]) -> list[str]:
        """The same of a plan, and both beside the unplanned step."""
        try:
            plan = memplan.plan(
                self.net,
                budget=budget,
                realisation=realisation,
                ctx=mx.cpu(),
                **search,
                **self.shapes,
            )
        except BudgetError as error:
            proved = ", proved" if error.proved else ""
            least = (error.lowest_nbytes or math.inf) / self.total
            return [f"no plan{proved}: least {least:.0%}", "", ""]
        except TraceError:
            return ["refused", "", ""]
        grown, differs = self._trained(plan)
        promise = promised_growth(plan.footprint)
        return [
            f"{promise / 1e6:.0f}{differs}",
            f"{grown / promise:.2f}",
            f"{promise / self.promised:.2f}, {grown / self.grown:.2f}",
        ]

    def _trained(self, plan: memplan.Plan) -> tuple[int, str]:
        """By how much a process grows that trains by ``plan``, and whether its results differ."""
        key = plan.realisation, plan.match_range, plan.schedule.ops
        if key not in self.trained:  # what needs no plan at several budgets is trained once
            path = self.folder / "planned.npz"
            run = partial(run_apart, match_range=plan.match_range, packing=plan.packing)
            trial = run(plan.schedule, plan.trace, ctx=mx.cpu(), results=path)
            before = self.folder / "unplanned.npz"
            differences = unlike(path, before, with_gradients=not plan.trace.form.updates)
            differs = ", other bits" if any(differences.values()) else ""
            self.trained[key] = trial.grown_nbytes, differs
        return self.trained[key]


if __name__ == "__main__":
    main()
