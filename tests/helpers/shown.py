"""Plans of hand-made graphs, as pictures and reports read them."""

from __future__ import annotations

import json
from types import SimpleNamespace

from helpers.graphs import unit_chain
from memplan.planning.plan import Footprint, Plan
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Status


def plan_of(schedule: Schedule, *, strategy: str = "by hand", budget: int | None = None) -> Plan:
    """A plan without a network behind it: what is shown of one needs none."""

    def footprint(of: Schedule) -> Footprint:
        peak, graph = simulate(of).peak_nbytes, schedule.graph
        return Footprint(peak, peak, graph.fixed_nbytes, 0, of.seconds, graph.match_range)

    form = SimpleNamespace(updates=(), in_one_array=False, spells_out_backward=True)
    return Plan(
        status=Status.FEASIBLE,
        schedule=schedule,
        strategy=strategy,
        costs="units",
        realisation="explicit",
        trace=SimpleNamespace(form=form),
        budget_nbytes=budget,
        footprint=footprint(schedule),
        unplanned=footprint(Schedule.unplanned(schedule.graph)),
        lower_bound_overhead=None,
        planning_seconds=0.0,
    )


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
