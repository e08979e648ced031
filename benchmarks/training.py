"""Explicit and packed training steps on this machine's CPU: is what a plan promises measured?

    python benchmarks/training.py unplanned     # without recomputation: as fast as MXNet's own?
    python benchmarks/training.py planned       # is the promised overhead the measured one?

Steps of two executors run in turn, and the median of the ratios of neighbours counts: what else
runs on the machine slows both. It disturbs all the same; the load average is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

import memplan
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.device import device_name
from memplan.mxnet.train.random_run import bind, random_arrays
from memplan.planning.plan import Footprint, Plan
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from networks import network_and_shapes
from process_networks import NETWORKS, SMALL
from profiled_step import step_seconds

Shape = tuple[int, ...]

DEFAULTS = ("resnet50_v1", "densenet121", "mobilenet1_0")


def paired_ratio(first: Callable[[], float], second: Callable[[], float], pairs: int) -> float:
    """The median of seconds of ``second`` over seconds of ``first``, each pair run in turn.

    Who begins alternates: what a step leaves behind in the caches serves both.
    """
    for run in (first, second):
        run()  # MXNet chooses kernels in the first step
    ratios = []
    for pair in range(pairs):
        if pair % 2:
            after, before = second(), first()
        else:
            before, after = first(), second()
        ratios.append(after / before)
    return statistics.median(ratios)


def stock_step(traced: Trace) -> Callable[[], float]:
    """Runs a step of MXNet's own executor and gives its seconds."""
    executor = bind(traced, traced.symbol, mx.cpu())
    return lambda: step_seconds(executor)


def explicit_step(traced: Trace, schedule: Schedule, **of_plan: Any) -> Callable[[], float]:
    """Runs a step by ``schedule`` and gives its seconds; a plan has a match range and a packing."""
    arguments, states = random_arrays(traced, mx.cpu())
    executor = TrainExecutor(
        traced,
        schedule,
        ctx=mx.cpu(),
        args=arguments,
        aux_states=states,
        **of_plan,
    )
    return lambda: step_seconds(executor)


def measure_unplanned(name: str, shape: Shape, pairs: int, realisation: str) -> None:
    """A line: the explicit (or packed) step without recomputation over the stock one."""
    net, shapes = network_and_shapes(name, shape)
    traced = trace(net, shapes=shapes, realisation=realisation)
    stock = stock_step(trace(net, shapes=shapes))
    ratio = paired_ratio(stock, explicit_step(traced, Schedule.unplanned(traced.graph)), pairs)
    milliseconds = 1000.0 * statistics.median(stock() for _ in range(5))
    print(f"| {name} | {milliseconds:.1f} | {ratio:.3f} | {load()} |", flush=True)


def measure_planned(
    name: str,
    shape: Shape,
    pairs: int,
    *,
    strategy: str,
    shares: Sequence[float],
    time_limit: float,
    realisation: str,
) -> None:
    """A line per share of the unplanned activations: predicted and measured overhead of a plan.

    Measured against MXNet's own step, and against one of the same realisation without
    recomputation: that shows what recomputation costs, whatever the realisation itself does.
    """
    net, shapes = network_and_shapes(name, shape)
    costs = memplan.profile(net, ctx=mx.cpu(), realisation=realisation, **shapes)
    stock = stock_step(trace(net, shapes=shapes))
    traced = trace(net, shapes=shapes, realisation=realisation)
    whole = explicit_step(traced, Schedule.unplanned(traced.graph))
    options: dict[str, Any] = {"realisation": realisation, "costs": costs, "time_limit": time_limit}
    unplanned = memplan.plan(net, strategy="store_all", **options, **shapes).unplanned
    for share in shares:
        budget = total_nbytes(unplanned, share)
        plan = memplan.plan(net, strategy=strategy, budget=budget, **options, **shapes)
        of_plan = {"match_range": plan.match_range, "packing": plan.packing}
        planned = explicit_step(plan.trace, plan.schedule, **of_plan)
        measured = [paired_ratio(step, planned, pairs) - 1.0 for step in (stock, whole)]
        cells = [f"{each:.1%} | {100 * (each - plan.overhead):+.1f}" for each in measured]
        print(
            f"| {name} | {share:.0%} "
            f"| {activations(plan) >> 20} of {plan.unplanned.allocated_nbytes >> 20} "
            f"| {plan.overhead:.1%} | {' | '.join(cells)} | {load()} |",
            flush=True,
        )


def total_nbytes(unplanned: Footprint, share: float) -> int:
    """The budget of a step whose activations get ``share`` of what they have unplanned."""
    return beside(unplanned) + int(share * unplanned.allocated_nbytes)


def beside(unplanned: Footprint) -> int:
    """What a step takes beside what is allocated for activations."""
    return unplanned.total_nbytes - unplanned.allocated_nbytes


def activations(plan: Plan) -> int:
    """What is allocated beside arguments, gradients and states.

    The gradients of an explicit or packed step are allocated with its activations: they are taken
    off.
    """
    return plan.total_nbytes - beside(plan.unplanned)


def load() -> str:
    """The load average of the last minute, of how many cores."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()}"


def main() -> None:
    options = parse()
    names = options.networks or DEFAULTS
    shape = (options.batch, 3, options.size, options.size)
    print(f"data {shape}, {options.pairs} pairs of steps, on {device_name(mx.cpu())}\n")
    if options.what == "unplanned":
        print(f"| network | stock step, ms | {options.realisation} / stock step | load |")
        print("|---|---|---|---|", flush=True)
        for name in names:
            measure_unplanned(name, shape, options.pairs, options.realisation)
        return
    print(
        "| network | share | allocated MB | predicted | over MXNet's own step | difference, points "
        "| over the same realisation without recomputation | difference, points | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        measure_planned(
            name,
            shape,
            options.pairs,
            strategy=options.strategy,
            shares=options.shares,
            time_limit=options.time_limit,
            realisation=options.realisation,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="what", required=True)
    steps = argparse.ArgumentParser(add_help=False)
    steps.add_argument("--batch", type=int, default=8)
    steps.add_argument("--size", type=int, default=224, help="height and width of a picture")
    steps.add_argument("--realisation", choices=["explicit", "packed"], default="explicit")
    steps.add_argument("--pairs", type=int, default=25, help="steps of each kind, in turn")
    unplanned = kinds.add_parser("unplanned", parents=[steps])
    planned = kinds.add_parser("planned", parents=[steps])
    planned.add_argument("--strategy", default="auto")
    planned.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5])
    planned.add_argument("--time-limit", type=float, default=15.0, help="seconds for each plan")
    for kind in (unplanned, planned):
        kind.add_argument(
            "networks", nargs="*", help=f"of the zoo, or of {', '.join(NETWORKS | SMALL)}"
        )
    return parser.parse_args()


if __name__ == "__main__":
    main()
