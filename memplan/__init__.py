"""memplan: activation-memory planning for training on MXNet 1.9.1."""

from __future__ import annotations

from typing import Any

from memplan import errors, strategies
from memplan.cost import CostTable, Roofline
from memplan.errors import MemplanError
from memplan.graph import TrainingGraph
from memplan.planner import compare, plan, search_plan
from memplan.result import Comparison, Plan
from memplan.schedule import Schedule
from memplan.strategies import Status

__all__ = [
    "Comparison",
    "CostTable",
    "MemplanError",
    "Plan",
    "Roofline",
    "Schedule",
    "Status",
    "TrainingGraph",
    "compare",
    "errors",
    "plan",
    "profile",
    "search_plan",
    "strategies",
]

__version__ = "0.1.0"


def profile(net: Any, **options: Any) -> CostTable:
    """Seconds of every op of ``net``, measured; see :func:`memplan.mxnet.profile.profile`."""
    from memplan.mxnet.profile import profile as measure

    return measure(net, **options)
