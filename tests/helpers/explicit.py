"""Traces and schedules for tests of the explicit realisation."""

from __future__ import annotations

from typing import Any

from helpers.networks import (
    Network,
)
from helpers.training_runs import (
    bound,
    differences,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule


def explicit(network: Network, **options: Any) -> Trace:
    symbol, shapes = network
    return trace(symbol, shapes=shapes, realisation="explicit", **options)


def op(traced: Trace, name: str) -> int:
    return next(i for i, call in enumerate(traced.graph.ops) if call.name == name)


def repeated_before(traced: Trace, names: list[str], place: str) -> Schedule:
    """The unplanned order, with ``names`` once more before ``place``."""
    steps = list(range(len(traced.graph.ops)))
    at = steps.index(op(traced, place))
    steps[at:at] = [op(traced, name) for name in names]
    return Schedule.sequence(traced.graph, steps)


def identical(traced: Trace, schedule: Schedule, **integers: int) -> bool:
    values = random_values(traced, integers)
    stock = stock_steps(traced, values)
    return not differences(stock, planned_steps(bound(traced, schedule, values)))
