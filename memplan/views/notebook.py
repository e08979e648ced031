"""A plan as a notebook shows it: its figures, and bytes over the steps as an SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import accumulate

from memplan.planning.plan import Plan
from memplan.step.liveness import Role, live_by_role
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.nbytes import format_nbytes
from memplan.views import palette

WIDTH, HEIGHT = 640, 200  # of the drawing; text stands above and below


def notebook_html(plan: Plan) -> str:
    """``plan`` in a few lines of HTML, without JavaScript, matplotlib or anything from outside.

    Colours are those of the page around it where they must be read: light or dark.
    """
    first, _, rest = str(plan).partition("\n")
    table = html.escape(rest.strip("\n"))
    return (
        f'<div style="max-width:{WIDTH + 20}px"><b>{html.escape(first)}</b>{_drawing(plan)}'
        f'<details><summary>figures</summary><pre style="background:none">{table}</pre></details>'
        "</div>"
    )


def _drawing(plan: Plan) -> str:
    graph, schedule = plan.schedule.graph, plan.schedule
    base = plan.footprint.beside_nbytes
    before = [base + n for n in simulate(Schedule.unplanned(graph)).live_nbytes]
    top = 1.05 * max(1, plan.total_nbytes, plan.budget_nbytes or 0, *before)
    nsteps = max(1, len(schedule.ops), len(graph.ops))
    scale = WIDTH / nsteps, HEIGHT / top
    parts = [_rectangle(base, scale, palette.FIXED)]
    live = live_by_role(schedule)
    layers = [live[role] for role in palette.ROLES]
    stacked = accumulate(layers, lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
    bands = [
        (role, [base + n for n in upper])
        for upper, role in zip(stacked, palette.ROLES, strict=True)
        if any(live[role])
    ]
    for role, upper in reversed(bands):  # each down to the fixed bytes: the lower ones cover it
        parts.append(
            f'<path fill="{palette.ROLES[role]}" d="{_skyline(upper, base, scale)}">'
            f"<title>{role.value}</title></path>"
        )
    parts.append(
        f'<path fill="none" stroke="{palette.UNPLANNED}" stroke-width="1.5" '
        f'd="{_skyline(before, None, scale)}"/>'
    )
    if plan.budget_nbytes is not None:
        y = HEIGHT - plan.budget_nbytes * scale[1]
        parts.append(
            f'<path stroke="{palette.BUDGET}" stroke-dasharray="5 3" d="M0 {y:.1f}h{WIDTH}"/>'
        )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 2}" style="width:100%;display:block;margin:.4em 0" '
        f'role="img" aria-label="Bytes alive over the steps">'
        f"{''.join(parts)}</svg>{_legend(plan, live)}"
    )


def _rectangle(nbytes: int, scale: tuple[float, float], color: str) -> str:
    height = nbytes * scale[1]
    return f'<rect y="{HEIGHT - height:.1f}" width="{WIDTH}" height="{height:.1f}" fill="{color}"/>'


def _skyline(levels: Sequence[int], ground: int | None, scale: tuple[float, float]) -> str:
    """The path of ``levels`` over the steps, closed along ``ground`` if that is given.

    Of the steps in a pixel the highest is drawn.
    """
    per_pixel = max(1, len(levels) // WIDTH)
    tops = [max(levels[i : i + per_pixel]) for i in range(0, len(levels), per_pixel)]
    points: list[str] = []
    for i, level in enumerate(tops):
        y = HEIGHT - level * scale[1]
        if i == 0 or level != tops[i - 1]:
            points.append(f"{'L' if points else 'M'}{i * per_pixel * scale[0]:.1f} {y:.1f}")
        end = min(len(levels), (i + 1) * per_pixel) * scale[0]
        points.append(f"H{end:.1f}")
    if ground is not None and points:
        points.append(f"V{HEIGHT - ground * scale[1]:.1f}H0Z")
    return "".join(points)


def _legend(plan: Plan, live: dict[Role, list[int]]) -> str:
    entries = [("fixed", palette.FIXED)]
    entries += [(role.value, color) for role, color in palette.ROLES.items() if any(live[role])]
    entries.append(("without a plan", palette.UNPLANNED))
    if plan.budget_nbytes is not None:
        entries.append((f"budget {format_nbytes(plan.budget_nbytes)}", palette.BUDGET))
    items = (
        f'<span style="white-space:nowrap;margin-right:1em"><span style="color:{color}">■</span> '
        f"{html.escape(label)}</span>"
        for label, color in entries
    )
    return f'<div style="font-size:85%">{"".join(items)}</div>'
