"""Pictures of a plan, drawn by matplotlib (the extra ``plot``) without a display.

Every function gives a ``matplotlib.figure.Figure`` and writes it to ``path`` if that is given: the
ending (.png, .svg, .pdf) says as what.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from memplan.errors import ArgumentError, DependencyError
from memplan.planning.frontier import Plans, plans_of
from memplan.planning.plan import Plan
from memplan.step.liveness import Alive, at_peak, fates, live_by_role, waits
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.files import check_names_a_file, unwritten, write_bytes
from memplan.util.nbytes import format_nbytes
from memplan.util.numbers import shown
from memplan.views import palette
from memplan.views.layout import Layout, forward_layout, largest_outputs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure

Path = str | PathLike[str] | None

KINDS_SHOWN = 7  # of ops, at the peak; the others are one bar
OPS_A_LINE = 52  # in the drawing of a network; twice as many if it is a large one
LANE_INCHES = 0.32
MATRIX_CELLS = 900  # a side
LABELLED_OPS = 120  # beyond, the names of the ops are too small to be read


def memory_over_steps(plan: Plan, path: Path = None) -> Figure:
    """Bytes over the steps of a training iteration, and what is alive at the peak.

    Above, live activations on top of the fixed bytes: by role for the plan, as a line for the step
    without one, with the budget. Below, what is alive at the two peaks by kind of op, and by layer
    in the order of the network.
    """
    figure = _figure(11, 7.5)
    above, below = figure.subfigures(2, 1, height_ratios=(1.4, 1))
    _draw_steps(above.subplots(), plan)
    kinds, layers = below.subplots(1, 2, width_ratios=(1, 1.7))
    unplanned, planned = at_peak(Schedule.unplanned(plan.schedule.graph)), at_peak(plan.schedule)
    _draw_kinds(kinds, unplanned, planned)
    _draw_layers(layers, plan, unplanned, planned)
    return _saved(figure, path)


def _draw_steps(axes: Axes, plan: Plan) -> None:
    schedule = plan.schedule
    base = plan.footprint.beside_nbytes
    before = np.array(simulate(Schedule.unplanned(schedule.graph)).live_nbytes) + base
    unit, size = _unit(max(before.max(initial=1), plan.total_nbytes))
    edges = np.arange(len(schedule.ops) + 1)
    lower = np.full(len(edges), base / size)
    axes.fill_between(edges, lower, color=palette.FIXED, linewidth=0, label="fixed")
    live = live_by_role(schedule)
    for role, color in palette.ROLES.items():
        nbytes = live[role]
        visible = max(nbytes, default=0) > 0.004 * plan.total_nbytes
        upper = lower + np.array([*nbytes, *nbytes[-1:]]) / size
        label = role.value if visible else None
        axes.fill_between(edges, lower, upper, step="post", color=color, linewidth=0, label=label)
        lower = upper
    steps = np.arange(len(before) + 1)
    line = [*before, before[-1]] if len(before) else [base]
    axes.step(steps, np.array(line) / size, where="post", color=palette.UNPLANNED, lw=1.3)
    axes.lines[-1].set_label("without a plan")
    if plan.budget_nbytes is not None:
        label = f"budget: {format_nbytes(plan.budget_nbytes)}"
        axes.axhline(plan.budget_nbytes / size, color=palette.BUDGET, lw=2, alpha=0.7, label=label)
    label = f"MXNet holds {format_nbytes(plan.total_nbytes)}"
    axes.axhline(plan.total_nbytes / size, color="0.2", ls=":", lw=1.3, label=label)
    axes.set(xlim=(0, len(schedule.ops)), ylim=(0, None), xlabel="step", ylabel=unit)
    axes.set_title(_headline(plan), loc="left", fontsize="large")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
    _open_frame(axes)


def _draw_kinds(axes: Axes, unplanned: Sequence[Alive], planned: Sequence[Alive]) -> None:
    before, after = _by_kind(unplanned), _by_kind(planned)
    total = before + after
    kinds = [kind for kind, n in total.most_common(KINDS_SHOWN) if n > 0.005 * total.total()]
    rows = [(kind, before[kind], after[kind]) for kind in kinds]
    if len(total) > len(kinds):
        rest = [sum(n for k, n in sums.items() if k not in kinds) for sums in (before, after)]
        rows.append((f"the other {len(total) - len(kinds)}", rest[0], rest[1]))
    unit, size = _unit(max((n for row in rows for n in row[1:]), default=1))
    places = np.arange(len(rows))
    for shift, column, label, color in (
        (-0.2, 1, "without a plan", palette.UNPLANNED),
        (0.2, 2, "planned", palette.SERIES[0]),
    ):
        widths = [float(row[column]) / size for row in rows]
        axes.barh(places + shift, widths, height=0.38, color=color, label=label)
    axes.set_yticks(places, [_shortened(row[0], 24) for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title("Alive at the peak, by kind of op", loc="left", fontsize="medium")
    axes.legend(fontsize="small", frameon=False, loc="lower right")
    _open_frame(axes)


def _by_kind(alive: Iterable[Alive]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for tensor in alive:
        sums[tensor.kind.removeprefix("_backward_")] += tensor.nbytes
    return sums


def _draw_layers(
    axes: Axes, plan: Plan, unplanned: Sequence[Alive], planned: Sequence[Alive]
) -> None:
    graph = plan.schedule.graph
    place = {op.name: i for i, op in enumerate(graph.ops[: graph.nforward])}
    unit, size = _unit(max((tensor.nbytes for tensor in unplanned), default=1))
    edges = np.arange(graph.nforward + 1)

    def by_layer(alive: Iterable[Alive]) -> Any:
        heights = np.zeros(graph.nforward)
        for tensor in alive:
            if tensor.layer in place:
                heights[place[tensor.layer]] += tensor.nbytes / size
        return heights

    axes.stairs(by_layer(unplanned), edges, fill=True, color=palette.FIXED, alpha=0.55)
    lower = np.zeros(graph.nforward)
    for role, color in palette.ROLES.items():
        upper = lower + by_layer(tensor for tensor in planned if tensor.role is role)
        axes.stairs(upper, edges, baseline=lower, fill=True, color=color, lw=0)
        lower = upper
    axes.set(xlim=(0, max(1, graph.nforward)), ylim=(0, None), ylabel=unit)
    axes.set_xlabel("layer, in the order of the forward pass")
    axes.set_title("… and by layer (grey: without a plan)", loc="left", fontsize="medium")
    _open_frame(axes)


def schedule_matrix(plan: Plan, path: Path = None) -> Figure:
    """The matrices R and S of Checkmate (Jain et al. 2020): a column an op, a row a stage.

    A cell is coloured where the stage computes the op, in another colour where it does so again,
    and lightly where the op's output waits in memory (outputs without bytes left out).
    """
    figure = _figure(8, 7.4)
    from matplotlib.patches import Patch

    cells = _matrix_cells(plan.schedule)
    axes = figure.subplots()
    colors = ["#ffffff", *palette.CELLS.values()]
    rgb = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors])
    axes.imshow(
        rgb.astype(np.uint8)[_coarse(cells)],
        extent=(0, len(cells), len(cells), 0),
        interpolation="nearest",
    )
    for draw in (axes.axvline, axes.axhline):
        draw(plan.schedule.graph.nforward, color=palette.UNPLANNED, lw=0.8, ls=":")
    patches = [Patch(color=color, label=label) for label, color in palette.CELLS.items()]
    axes.legend(handles=patches, loc="upper right", framealpha=0.95)
    axes.set(xlabel="op, forward then backward", ylabel="stage")
    axes.set_title(_headline(plan), loc="left", fontsize="medium")
    return _saved(figure, path)


def _matrix_cells(schedule: Schedule) -> Any:
    """Where an op waits 1, where it runs 2, and 3 where it runs again: in a byte each."""
    cells = 3 * schedule.computed().view(np.int8)
    np.fill_diagonal(cells, cells.diagonal().clip(max=2))
    for op, begin, end in waits(schedule):
        column = cells[begin : end + 1, op]
        np.maximum(column, 1, out=column)
    return cells


def _coarse(cells: Any) -> Any:
    """``cells`` in at most MATRIX_CELLS rows and columns: of those that fall together the largest.

    A single recomputation would be lost if the picture were scaled down.
    """
    step = -(-len(cells) // MATRIX_CELLS)
    if step <= 1:
        return cells
    starts = np.arange(0, len(cells), step)
    return np.maximum.reduceat(np.maximum.reduceat(cells, starts, axis=0), starts, axis=1)


def overhead_against_memory(plans: Plans, path: Path = None) -> Figure:
    """Overhead against the bytes of the whole step, a line for each strategy.

    ``plans`` is a Comparison, or plans of one network such as a frontier.
    """
    entries = plans_of(plans)
    figure = _figure(8, 5)
    axes = figure.subplots()
    unplanned = max(plan.unplanned.total_nbytes for plan in entries)
    unit, size = _unit(unplanned)
    for i, strategy in enumerate(dict.fromkeys(plan.strategy for plan in entries)):
        mine = [plan for plan in entries if plan.strategy == strategy]
        points = sorted((plan.total_nbytes / size, plan.overhead) for plan in mine)
        color = palette.SERIES[i % len(palette.SERIES)]
        marker = "osD^vPX*"[i % 8]
        axes.plot(*zip(*points, strict=True), marker=marker, color=color, lw=1.4, label=strategy)
    axes.plot(unplanned / size, 0, marker="o", color=palette.UNPLANNED, ls="", label="no plan")
    axes.lines[-1].set_clip_on(False)
    axes.set(xlim=(0, None), ylim=(0, None), xlabel=f"whole step on the device, {unit}")
    axes.set_ylabel("overhead, share of the step's time")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    _open_frame(axes)
    return _saved(figure, path)


def network(plan: Plan, path: Path = None) -> Figure:
    """The forward pass, every op coloured by what the plan does with its output.

    The ops run from left to right, line by line; larger squares are larger outputs. The HTML
    report has the same drawing with a name and figures for every op.
    """
    graph = plan.schedule.graph
    layout = forward_layout(graph)
    labelled = graph.nforward <= LABELLED_OPS
    ncolumns = OPS_A_LINE if graph.nforward <= 6 * OPS_A_LINE else 2 * OPS_A_LINE
    height = LANE_INCHES * (layout.nlanes + 0.6) + (0.75 if labelled else 0)
    nlines = max(1, -(-graph.nforward // ncolumns))
    figure = _figure(13, 0.7 + nlines * height)
    from matplotlib.collections import LineCollection

    axes = figure.subplots()
    strokes = [
        [(x, -(line * height + lane * LANE_INCHES)) for line, x, lane in stroke]
        for source, target in layout.edges
        for stroke in _strokes(source, target, layout.lanes, ncolumns)
    ]
    axes.add_collection(LineCollection(strokes, colors="0.72", linewidths=1, zorder=1))
    _draw_ops(axes, plan, layout, ncolumns, height)
    if labelled:
        for op in range(graph.nforward):
            y = -(op // ncolumns * height + (layout.nlanes - 0.4) * LANE_INCHES)
            kind = _shortened(graph.ops[op].kind, 15)
            at: dict[str, Any] = {
                "ha": "right",
                "va": "top",
                "rotation": 60,
                "rotation_mode": "anchor",
            }
            axes.text(op % ncolumns + 0.2, y, kind, fontsize=7, **at)
    axes.set(xlim=(-1.2, ncolumns + 0.2), ylim=(-nlines * height, LANE_INCHES))
    axes.axis("off")
    axes.set_title(_headline(plan), loc="left", fontsize="medium")
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
    for handle in legend.legend_handles:
        handle.set_sizes([50])  # type: ignore[union-attr]
    return _saved(figure, path)


def _draw_ops(axes: Axes, plan: Plan, layout: Layout, ncolumns: int, height: float) -> None:
    graph = plan.schedule.graph
    largest = largest_outputs(graph)
    scale = 110 * OPS_A_LINE / ncolumns / max(1, *largest)
    fate_of = fates(plan.schedule)
    for fate, color in palette.FATES.items():
        ops = [op for op in range(graph.nforward) if fate_of[op] is fate]
        if ops:
            axes.scatter(
                [op % ncolumns for op in ops],
                [-(op // ncolumns * height + layout.lanes[op] * LANE_INCHES) for op in ops],
                s=np.array([12 + scale * largest[op] for op in ops]),
                c=color,
                marker="s",
                label=f"{fate.value} ({len(ops)})",
            )


def _strokes(
    source: int, target: int, lanes: Sequence[int], ncolumns: int
) -> Iterable[list[tuple[int, float, int]]]:
    """An edge as polylines of (line, column, lane), one for each line of ops that it passes.

    It runs in the source's lane, and bends to the target's in the last column.
    """
    (line, x), (last, end) = divmod(source, ncolumns), divmod(target, ncolumns)
    lane = lanes[source]
    begin: float = x
    while line < last:
        yield [(line, begin, lane), (line, ncolumns - 0.5, lane)]
        line, begin = line + 1, -0.9
    yield [(line, begin, lane), (line, max(begin, end - 0.8), lane), (line, end, lanes[target])]


PICTURES: dict[str, Callable[[Plan, Path], Figure]] = {
    "memory": memory_over_steps,
    "matrix": schedule_matrix,
    "network": network,
}
"""The pictures of one plan by the names that ``Plan.plot`` takes."""


def plot(plan: Plan, picture: str = "memory", path: Path = None) -> Figure:
    """One of the :data:`PICTURES` of ``plan``; ArgumentError if there is none of that name."""
    if not isinstance(picture, str) or picture not in PICTURES:
        choices = ", ".join(map(repr, PICTURES))
        raise ArgumentError(f"there is no picture {shown(picture)}; choose from {choices}")
    return PICTURES[picture](plan, path)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError(
            f"pictures need matplotlib, which cannot be imported ({error}); "
            "pip install 'memplan[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _saved(figure: Figure, path: Path) -> Figure:
    if path is not None:
        picture = io.BytesIO()
        try:
            stem, ending = os.path.splitext(path)
            # Before an ending is added, which would make it the name of a file beside or within.
            check_names_a_file(path)
            figure.savefig(picture, format=ending[1:] or "png", dpi=150)
            write_bytes(stem + (ending or ".png"), picture.getvalue())
        except (OSError, TypeError, ValueError) as error:  # TypeError for what is no path
            raise ArgumentError(
                f"path: no picture can be written to {path}: {unwritten(error)}"
            ) from error
    return figure


def _headline(plan: Plan) -> str:
    return (
        f"{format_nbytes(plan.total_nbytes)} instead of "
        f"{format_nbytes(plan.unplanned.total_nbytes)} at {plan.overhead:+.1%} time "
        f"({plan.strategy})"
    )


def _unit(nbytes: float) -> tuple[str, int]:
    """The unit in which ``nbytes`` is a number of one to four digits, and its size."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return unit, size
    return "bytes", 1


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _open_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
