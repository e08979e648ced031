"""A plan as one self-contained HTML page, which opens without a network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from memplan.errors import ArgumentError
from memplan.planning.frontier import Plans, plans_of
from memplan.planning.plan import CUT, Plan, figures
from memplan.step.graph import TrainingGraph
from memplan.step.liveness import fates, lives, waits
from memplan.step.schedule import Schedule
from memplan.util.files import unwritten, write_text
from memplan.util.nbytes import format_nbytes
from memplan.util.numbers import shown
from memplan.views import palette
from memplan.views.explain import Reasons
from memplan.views.layout import forward_layout, largest_outputs

ROLES = list(palette.ROLES)
FATES = list(palette.FATES)


def save_report(
    plan: Plan,
    path: str | PathLike[str],
    *,
    others: Plans | None = None,
    title: str | None = None,
) -> Path:
    """Write :func:`report_html` to ``path``, and give that back; ArgumentError if it cannot be."""
    text = report_html(plan, others=others, title=title)
    try:
        target = Path(path)
        write_text(path, text)
    # TypeError for what is no path, ValueError for a name that no file can have.
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"path: no report can be written to {path}: {unwritten(error)}"
        ) from error
    return target


def report_html(plan: Plan, *, others: Plans | None = None, title: str | None = None) -> str:
    """``plan`` as an HTML page: its figures, and pictures that answer to the mouse.

    Bytes over the steps with and without the plan, what is alive at any step, the network with
    the reason for every op, and the schedule's matrices. With ``others`` (a Comparison, or plans
    of the same network such as a frontier) also overhead against memory. ``title`` heads the page.
    ArgumentError for one that is no string.
    """
    if not isinstance(title, str | None):
        raise ArgumentError(f"title must be a string, got {shown(title)}")
    texts = {
        "TITLE": html.escape(title or f"Training step in {format_nbytes(plan.total_nbytes)}"),
        "LEAD": html.escape(_lead(plan)),
        "FIGURES": _figures(plan),
        "FACTS": _facts(plan),
        "FOOTER": html.escape(_footer(plan)),
        "STYLE": _page("report.css"),
        "SCRIPT": _page("report.js"),
        "DATA": _json(_data(plan, [] if others is None else plans_of(others))),
    }
    first, *rest = _page("report.html").split("@")
    # The texts are at odd places, between two of the template's @; none of them is searched again.
    return first + "".join(
        texts[part] if place % 2 == 0 else part for place, part in enumerate(rest)
    )


def _page(name: str) -> str:
    return (files("memplan.views") / "page" / name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """JSON that may stand in a script element: no text in it can end the element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _lead(plan: Plan) -> str:
    return str(plan).partition("\n")[0]


def _figures(plan: Plan) -> str:
    lines = ["<table><tr><th></th><th class=n>without a plan</th><th class=n>planned</th></tr>"]
    rows = figures(plan)
    for label, before, after in rows:
        kind = " class=total" if label == rows[-1][0] else ""
        lines.append(
            f"<tr{kind}><td>{label}</td><td class=n>{format_nbytes(before)}</td>"
            f"<td class=n>{format_nbytes(after)}</td></tr>"
        )
    return "".join([*lines, "</table>"])


def _facts(plan: Plan) -> str:
    graph, schedule = plan.schedule.graph, plan.schedule
    budget = "none" if plan.budget_nbytes is None else format_nbytes(plan.budget_nbytes)
    bound = (
        "nothing proved"
        if plan.lower_bound_overhead is None
        else f"at least {plan.lower_bound_overhead:+.1%}"
    )
    rows = [
        ("budget", budget),
        ("overhead", f"{plan.overhead:+.1%} of the step's time"),
        ("bound on the overhead", bound),
        ("status", plan.status.value + CUT * plan.cut_by_clock),
        ("strategy", plan.strategy),
        ("costs", plan.costs),
        ("workspace of operators", plan.footprint.workspace_source),
        ("recomputed", f"{len(schedule.recomputed)} of {graph.nforward} forward ops"),
        ("steps", f"{len(schedule.ops)} ({len(graph.ops)} without a plan)"),
    ]
    cells = (f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows)
    return f"<table>{''.join(cells)}</table>"


def _footer(plan: Plan) -> str:
    holds = "MXNet holds more, as its blocks neither split nor merge"
    if plan.trace.form.in_one_array:
        holds = "the array that holds them may have gaps"
    return (
        f"memplan, realisation {plan.realisation}; planned in {plan.planning_seconds:.1f} s. Bytes "
        f"alive are those of tensors; {holds}. "
        "“Without a plan” every op of the training graph runs once."
    )


def _data(plan: Plan, others: Sequence[Plan]) -> dict[str, Any]:
    graph = plan.schedule.graph
    kinds = list(dict.fromkeys(op.kind for op in graph.ops))
    return {
        "kinds": kinds,
        "ops": _ops(graph, kinds),
        "tensors": _tensors(graph),
        "nforward": graph.nforward,
        "base": plan.footprint.beside_nbytes,
        "budget": plan.budget_nbytes,
        "total": plan.total_nbytes,
        "unplannedTotal": plan.unplanned.total_nbytes,
        "planned": _schedule(plan.schedule),
        "unplanned": _schedule(Schedule.unplanned(graph)),
        "network": _network(plan.schedule),
        "waits": [number for span in waits(plan.schedule) for number in span],
        "others": [_other(other) for other in others],
        "roles": [(role.value, color) for role, color in palette.ROLES.items()],
        "fates": [(fate.value, color) for fate, color in palette.FATES.items()],
        "cells": list(palette.CELLS.items()),
        "colors": {
            "fixed": palette.FIXED,
            "unplanned": palette.UNPLANNED,
            "budget": palette.BUDGET,
            "series": palette.SERIES,
        },
    }


def _ops(graph: TrainingGraph, kinds: list[str]) -> dict[str, Any]:
    """A list for each field; ``outputs[first[i]:first[i + 1]]`` are the tensors of op i."""
    place = {kind: i for i, kind in enumerate(kinds)}
    first = [0]
    for op in graph.ops:
        first.append(first[-1] + len(op.outputs))
    return {
        "name": [op.name for op in graph.ops],
        "kind": [place[op.kind] for op in graph.ops],
        "seconds": [float(f"{op.seconds:.4g}") for op in graph.ops],
        "layer": [
            i if op.differentiates is None else op.differentiates for i, op in enumerate(graph.ops)
        ],
        "first": first,
        "outputs": [tensor for op in graph.ops for tensor in op.outputs],
    }


def _tensors(graph: TrainingGraph) -> dict[str, Any]:
    """A list for each field; the name is left empty where it is made of the op's and the place."""
    usual = [
        f"{graph.ops[op].name}[{place}]"
        for op, place in zip(graph.producer, graph.position, strict=True)
    ]
    return {
        "name": [
            "" if tensor.name == name else tensor.name
            for tensor, name in zip(graph.tensors, usual, strict=True)
        ],
        "op": graph.producer,
        "place": graph.position,
        "nbytes": [tensor.nbytes for tensor in graph.tensors],
    }


def _schedule(schedule: Schedule) -> dict[str, Any]:
    rows = ((life.step, life.tensor, life.last, ROLES.index(life.role)) for life in lives(schedule))
    return {"steps": schedule.ops, "lives": [number for row in rows for number in row]}


def _network(schedule: Schedule) -> dict[str, Any]:
    graph, layout, reasons = schedule.graph, forward_layout(schedule.graph), Reasons(schedule)
    forward, largest = graph.ops[: graph.nforward], largest_outputs(graph)
    recomputed = (op for op in schedule.recomputed if op < graph.nforward)
    return {
        "lanes": layout.lanes,
        "nlanes": layout.nlanes,
        "edges": [op for edge in layout.edges for op in edge],
        "fates": [FATES.index(fate) for fate in fates(schedule)],
        "why": [[reasons.of(tensor) for tensor in op.outputs] for op in forward],
        "largest": largest,
        "top": max([1, *largest]),
        "chosen": next(recomputed, 0 if forward else -1),
    }


def _other(plan: Plan) -> tuple[Any, ...]:
    budget = "least" if plan.budget_nbytes is None else format_nbytes(plan.budget_nbytes)
    return plan.strategy, plan.total_nbytes, plan.overhead, budget, plan.status.value
