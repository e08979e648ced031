"""memplan: activation-memory planning for training on MXNet 1.9.1.

:func:`plan` gives a network that trains within a budget; docs/tutorial.md starts there. MXNet is
imported when it is first needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memplan import errors, strategies
    from memplan.errors import MemplanError
    from memplan.planning.batch_size import max_batch_size
    from memplan.planning.comparison import Comparison as Comparison
    from memplan.planning.frontier import Frontier as Frontier
    from memplan.planning.frontier import frontier
    from memplan.planning.plan import Plan
    from memplan.planning.planner import compare, get_cost, plan, search_plan
    from memplan.planning.sizes_tried import BatchSize as BatchSize
    from memplan.step.costs import CostTable, Roofline
    from memplan.step.graph import TrainingGraph
    from memplan.step.schedule import Schedule
    from memplan.strategies import Status

__all__ = [
    "CostTable",
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


# Where the public names stand, and types of results, for annotations. Each is imported when it is
# first used, so that the command line is there to answer Ctrl-C before the rest is loaded.
_PLACES = {
    "BatchSize": "memplan.planning.sizes_tried",
    "Comparison": "memplan.planning.comparison",
    "CostTable": "memplan.step.costs",
    "Frontier": "memplan.planning.frontier",
    "MemplanError": "memplan.errors",
    "Plan": "memplan.planning.plan",
    "Roofline": "memplan.step.costs",
    "Schedule": "memplan.step.schedule",
    "Status": "memplan.strategies",
    "TrainingGraph": "memplan.step.graph",
    "compare": "memplan.planning.planner",
    "frontier": "memplan.planning.frontier",
    "get_cost": "memplan.planning.planner",
    "max_batch_size": "memplan.planning.batch_size",
    "plan": "memplan.planning.planner",
    "search_plan": "memplan.planning.planner",
}


if not TYPE_CHECKING:  # for which a name that is not here is an error, and no Any

    def __getattr__(name: str) -> Any:
        """The public name, from where it stands; the rooms ``errors`` and ``strategies``, too."""
        if name in ("errors", "strategies"):
            return importlib.import_module(f"memplan.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module 'memplan' has no attribute {name!r}")
        value = getattr(importlib.import_module(_PLACES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def profile(net: Any, **options: Any) -> CostTable:
    """Seconds of every op of a training step of ``net``, measured on a device, as a table.

    ``options`` are ``ctx`` (the current context if left out), ``type_dict``, ``grad_req`` and the
    shapes of inputs, as those of :func:`plan`; ``realisation``, whose own steps are measured, too
    ("explicit" or "packed"; "mirror" if left out); and ``repeats`` (5) behind ``warmup`` (2), the
    steps that are timed. :func:`memplan.mxnet.profile.profile` takes them. Raises CostError if
    MXNet cannot run the step, and all that :func:`plan` raises for a network.
    """
    from memplan.mxnet.profile import profile as measure

    return measure(net, **options)
