"""memplan: activation-memory planning for training on MXNet 1.9.1.

:func:`plan` gives a network that trains within a budget; docs/tutorial.md starts there. MXNet is
imported when it is first needed.
"""

from __future__ import annotations

from typing import Any

from memplan import errors, strategies
from memplan.errors import MemplanError
from memplan.planning.batch_size import BatchSize, max_batch_size
from memplan.planning.frontier import Frontier, frontier
from memplan.planning.plan import Comparison, Plan
from memplan.planning.planner import compare, get_cost, plan, search_plan
from memplan.step.costs import CostTable, Roofline
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies import Status

__all__ = [
    "BatchSize",
    "Comparison",
    "CostTable",
    "Frontier",
    "MemplanError",
    "Plan",
    "Roofline",
    "Schedule",
    "Status",
    "TrainingGraph",
    "compare",
    "errors",
    "frontier",
    "get_cost",
    "max_batch_size",
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
