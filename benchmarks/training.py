"""Explicit training steps on this machine's CPU, and the curves of overhead against memory.

    python benchmarks/training.py unplanned     # without recomputation: as fast as MXNet's own?
    python benchmarks/training.py planned       # is the promised overhead the measured one?
    python benchmarks/training.py curve         # overhead against allocated MB, by realisation

Steps of two executors run in turn, and the median of the ratios of neighbours counts: what else
runs on the machine slows both. It disturbs all the same; the load average is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx

import memplan
from memplan.errors import DependencyError
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.device import device_name
from memplan.mxnet.train.random_run import bind, random_arrays
from memplan.planning.plan import Attempt, Footprint, Plan
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from networks import MEMONGER_MB, SHAPE, network, network_and_shapes
from process_networks import NETWORKS, SMALL
from profiled_step import step_seconds

Shape = tuple[int, ...]

DEFAULTS = ("resnet50_v1", "densenet121", "mobilenet1_0")
PICTURES = Path(__file__).resolve().parents[1] / "docs" / "images"
ROOFLINE = "roofline:v100"

# Percent of overhead up to which curves are drawn: who pays more wants another batch size.
HIGHEST = 50


# Steps ----------------------------------------------------------------------------------------


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


def load() -> str:
    """The load average of the last minute, of how many cores."""
    return f"{os.getloadavg()[0]:.1f} of {os.cpu_count()}"


# Curves ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One network: what MXNet allocates and what it costs, MB and percent, by several plans."""

    name: str
    unplanned_mb: float
    memonger: tuple[float, float]
    curves: dict[str, list[tuple[float, float]]]


def panel(
    name: str,
    strategies: Mapping[str, Sequence[str]],
    shares: Sequence[float],
    time_limit: float,
) -> Panel:
    """Plans by the ``strategies`` of every realisation, by the roofline of a V100.

    Their activations get ``shares`` of what MXNet allocates unplanned; by mirroring, which cannot
    go so low, also the least.
    """
    net = network(name)
    memonger = memplan.plan(net, strategy="memonger", costs=ROOFLINE, data=SHAPE)
    whole = memonger.unplanned
    budgets: list[int | None] = [total_nbytes(whole, share) for share in shares]
    curves = {}
    for realisation, names in strategies.items():
        plans = memplan.compare(
            net,
            strategies=names,
            budgets=[*budgets, None] if realisation == "mirror" else budgets,
            realisation=realisation,
            costs=ROOFLINE,
            time_limit=time_limit,
            data=SHAPE,
        )
        curves[f"{realisation} ({', '.join(names)})"] = undominated(plans.rows)
    return Panel(
        name,
        whole.allocated_nbytes / 2**20,
        (float(MEMONGER_MB[name]), 100.0 * memonger.overhead),
        curves,
    )


def undominated(rows: Iterable[Attempt]) -> list[tuple[float, float]]:
    """Activation MB and percent of overhead of the plans that no other one beats."""
    plans = [row.plan for row in rows if row.plan is not None]
    best: list[tuple[float, float]] = []
    for nbytes, overhead in sorted((activations(plan), plan.overhead) for plan in plans):
        if not best or 100.0 * overhead < best[-1][1]:
            best.append((nbytes / 2**20, 100.0 * overhead))
    return best


def activations(plan: Plan) -> int:
    """What is allocated beside arguments, gradients and states.

    The gradients of an explicit or packed step are allocated with its activations: they are taken
    off.
    """
    return plan.total_nbytes - beside(plan.unplanned)


def print_panel(panel: Panel) -> None:
    """A line per plan."""
    points = [(label, point) for label, curve in panel.curves.items() for point in curve]
    for label, (mb, overhead) in [("memonger's own code", panel.memonger), *points]:
        print(
            f"| {panel.name} | {label} | {mb:.0f} of {panel.unplanned_mb:.0f} | {overhead:.1f}% |",
            flush=True,
        )


def draw(panels: Sequence[Panel], path: Path) -> None:
    """A picture of the panels, side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(
            "the picture needs matplotlib; pip install 'memplan[plot]'"
        ) from error
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for marker, (label, curve) in zip("so^v", panel.curves.items(), strict=False):
            axes.plot(*zip(*curve, strict=True), marker=marker, markersize=4, label=label)
        axes.plot(*panel.memonger, "kx", label="memonger's own code")
        axes.plot(panel.unplanned_mb, 0.0, "kD", markersize=4, label="unplanned")
        axes.set_title(panel.name)
        axes.set_xlabel("activations as MXNet allocates them, MB")
        axes.set_xlim(left=0)
        axes.set_ylim(0, HIGHEST)
        axes.grid(alpha=0.3)
        if not place:
            axes.set_ylabel("overhead, % of the unplanned step")
            axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


# Command line ---------------------------------------------------------------------------------


def main() -> None:
    options = parse()
    names = options.networks or DEFAULTS
    if options.what == "curve":
        print("| network | plans | allocated MB | overhead |")
        print("|---|---|---|---|", flush=True)
        strategies = {
            "mirror": options.mirror,
            "explicit": options.explicit,
            "packed": options.packed,
        }
        panels = []
        for name in names:
            panels.append(panel(name, strategies, options.shares, options.time_limit))
            print_panel(panels[-1])
        draw(panels, options.picture)
        return
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
    plans = argparse.ArgumentParser(add_help=False)
    plans.add_argument("--time-limit", type=float, default=15.0, help="seconds for each plan")
    unplanned = kinds.add_parser("unplanned", parents=[steps])
    planned = kinds.add_parser("planned", parents=[steps, plans])
    planned.add_argument("--strategy", default="auto")
    planned.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5])
    curve = kinds.add_parser("curve", parents=[plans])
    curve.add_argument("--mirror", nargs="+", default=["checkmate"], help="strategies")
    curve.add_argument("--explicit", nargs="+", default=["auto"], help="strategies")
    curve.add_argument("--packed", nargs="+", default=["auto"], help="strategies")
    curve.add_argument(
        "--shares", type=float, nargs="+", default=[0.9, 0.75, 0.6, 0.5, 0.4, 0.34, 0.29, 0.25]
    )
    curve.add_argument("--picture", type=Path, default=PICTURES / "overhead_and_memory.png")
    for kind in (unplanned, planned, curve):
        kind.add_argument(
            "networks", nargs="*", help=f"of the zoo, or of {', '.join(NETWORKS | SMALL)}"
        )
    return parser.parse_args()


if __name__ == "__main__":
    main()
