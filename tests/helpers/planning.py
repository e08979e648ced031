"""Plans that are made quickly, and the least that a strategy must be."""

from __future__ import annotations

import json
from typing import Any

import mxnet as mx

import memplan
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, mirror
from memplan.strategies.base import Outcome, Problem, Status

ROOFLINE = "roofline:v100"
# For what ends by counts: whoever comes to this limit has failed.
NEVER_SECONDS = 3600.0


def quick(network: Any, **options: Any) -> memplan.Plan:
    net, shapes = network
    options = {
        "strategy": "search:effort=0.05",
        "time_limit": NEVER_SECONDS,
        "costs": ROOFLINE,
    } | options
    return memplan.plan(net, **options, **shapes)


def flagged(symbol: mx.sym.Symbol) -> set[str]:
    nodes = json.loads(symbol.tojson())["nodes"]
    return {n["name"] for n in nodes if n.get("attrs", {}).get("__force_mirroring__") == "True"}


def half_of_the_ops(graph: TrainingGraph) -> frozenset[int]:
    candidates = flaggable(graph)
    return frozenset(candidates[: len(candidates) // 2])


class NoDataclass:
    """The least that a strategy must be."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def solve(self, problem: Problem) -> Any:
        if self.answer is not None:
            return self.answer
        return Outcome(Status.FEASIBLE, mirror(problem.graph, half_of_the_ops(problem.graph)))
