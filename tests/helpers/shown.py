"""Plans of hand-made graphs, as pictures and reports read them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from helpers.graphs import unit_chain
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Status


@dataclass(frozen=True)
class ShownFigures:
    peak_nbytes: int
    fixed_nbytes: int

    reserve_nbytes = 0

    @property
    def allocated_nbytes(self) -> int:
        return self.peak_nbytes

    @property
    def total_nbytes(self) -> int:
        return self.peak_nbytes + self.fixed_nbytes


@dataclass(frozen=True)
class Shown:
    """All that is shown of a plan, without a network behind it."""

    schedule: Schedule
    strategy: str
    budget_nbytes: int | None

    status = Status.FEASIBLE
    costs = "units"
    realisation = "explicit"
    lower_bound = None
    planning_seconds = 0.0

    @property
    def footprint(self) -> ShownFigures:
        return ShownFigures(simulate(self.schedule).peak_nbytes, self.schedule.graph.fixed_nbytes)

    @property
    def unplanned(self) -> ShownFigures:
        graph = self.schedule.graph
        return ShownFigures(simulate(Schedule.unplanned(graph)).peak_nbytes, graph.fixed_nbytes)

    @property
    def total_nbytes(self) -> int:
        return self.footprint.total_nbytes

    @property
    def overhead(self) -> float:
        return self.schedule.overhead

    def __str__(self) -> str:
        return f"A plan by {self.strategy}\n\nof so many bytes: {self.total_nbytes}"


def plan_of(schedule: Schedule, *, strategy: str = "by hand", budget: int | None = None) -> Shown:
    return Shown(schedule, strategy, budget)


def recomputing_chain(nelements: int = 1) -> Schedule:
    """f0 f1 f2 loss b2 f0 f1 b1 b0: f1 is dropped after f2, f0 after f1; both are recomputed."""
    graph = unit_chain(3, nelements)
    names = [op.name for op in graph.ops]
    order = "f0 f1 f2 loss b2 f0 f1 b1 f0 b0".split()
    return Schedule.sequence(graph, [names.index(name) for name in order])


def renamed(graph: TrainingGraph, name: str) -> TrainingGraph:
    """``graph`` with an op called ``name`` in the place of the second one."""
    text = json.loads(graph.to_json())
    text["ops"][1]["name"] = text["ops"][1]["kind"] = name
    return TrainingGraph.from_json(json.dumps(text))
