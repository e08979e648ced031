"""Loads the published rematerialization graphs of ../shared/graphs as training graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "graphs"


def names() -> tuple[str, ...]:
    """The names of the graphs that are there."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load(name: str) -> TrainingGraph:
    """The graph ``name``: one tensor per op, every op may run again, the sinks are heads.

    The ops before the first backward op are the forward pass; without one, all are.
    """
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    ops: list[dict[str, Any]] = data["ops"]
    sources = {source for op in ops for source in op["inputs"]}
    backward = [index for index, op in enumerate(ops) if op.get("backward")]
    graph = TrainingGraph(
        ops=tuple(
            Op(op["name"], "op", tuple(op["inputs"]), (index,), float(op["cost"]))
            for index, op in enumerate(ops)
        ),
        tensors=tuple(Tensor(op["name"], op["nbytes"], op["nbytes"]) for op in ops),
        heads=tuple(index for index in range(len(ops)) if index not in sources),
        nforward=min(backward, default=len(ops)),
    )
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    if (peak, graph.seconds) != (data["peak_nbytes"], data["total_cost"]):
        raise ValueError(f"{name}: {peak} bytes, {graph.seconds} s; the file has {data}")
    return graph
