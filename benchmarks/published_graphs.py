"""Loads the published rematerialization graphs of ../shared/graphs as training graphs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from memplan.errors import GraphError
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "graphs"


def in_file(path: Path) -> TrainingGraph:
    """The graph of a file, in this format or as memplan wrote it."""
    text = path.read_text(encoding="utf-8")
    return from_json(text) if is_published(text) else TrainingGraph.from_json(text)


def names() -> tuple[str, ...]:
    """The names of the graphs that are there."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load(name: str) -> TrainingGraph:
    """The graph ``name``, as :func:`from_json` makes it."""
    return from_json((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def is_published(text: str) -> bool:
    """Is ``text`` a graph in the format of ../shared/graphs, rather than one of memplan's?"""
    try:
        data = json.loads(text)
    except ValueError:
        return False
    return isinstance(data, dict) and {"ops", "peak_nbytes", "total_cost"} <= set(data)


def from_json(text: str) -> TrainingGraph:
    """The graph of a file: one tensor per op, every op may run again, the sinks are heads.

    The ops before the first backward op are the forward pass; without one, all are. GraphError says
    what is wrong with another text.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        graph = _graph(data["ops"])
        stated = (data["peak_nbytes"], data["total_cost"])
        peak = simulate(Schedule.unplanned(graph)).peak_nbytes
        if peak != stated[0] or not math.isclose(graph.seconds, stated[1]):
            raise GraphError(f"peak and cost are {(peak, graph.seconds)}; the file says {stated}")
    except GraphError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise GraphError(f"not a published graph: {error!r}") from error
    return graph


def _graph(ops: list[dict[str, Any]]) -> TrainingGraph:
    sources = {source for op in ops for source in op["inputs"]}
    backward = [index for index, op in enumerate(ops) if op.get("backward")]
    return TrainingGraph(
        ops=tuple(
            Op(op["name"], "op", tuple(op["inputs"]), (index,), float(op["cost"]))
            for index, op in enumerate(ops)
        ),
        tensors=tuple(Tensor(op["name"], op["nbytes"], op["nbytes"]) for op in ops),
        heads=tuple(index for index in range(len(ops)) if index not in sources),
        nforward=min(backward, default=len(ops)),
    )
