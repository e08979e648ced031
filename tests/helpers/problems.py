"""Problems as strategies get them."""

from __future__ import annotations

from typing import Any

from memplan.memory.memory import Blocks
from memplan.step.graph import TrainingGraph
from memplan.strategies.base import Problem
from memplan.strategies.spaces.flags import Flags


def mirrored(graph: TrainingGraph, budget_nbytes: int | None, **options: Any) -> Problem:
    """What a strategy is asked for a mirror plan: MXNet's blocks, schedules by flags."""
    blocks = Blocks((graph.match_range,))
    return Problem(graph, budget_nbytes, memory=blocks, space=Flags(), **options)
