"""What MXNet's own executor says of a network: the oracle of the tests of memplan.mxnet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.memory.blocks import allocate
from memplan.mxnet.realise.measure import executor_description
from memplan.mxnet.trace.build import Trace, trace
from memplan.mxnet.trace.environment import match_range
from memplan.mxnet.trace.probe import allocated_mib
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule


def ops(description: str) -> list[tuple[str, str]]:
    """Operator and name of every call in an executor's description, in the order of execution."""
    return re.findall(r"^Op:(.*), Name=(.*)$", description, re.MULTILINE)


def traced_as_mxnet(
    symbol: mx.sym.Symbol, shapes: Mapping[str, Sequence[int]], **options: Any
) -> Trace:
    """The trace of ``symbol``, after comparing its ops and its allocation with MXNet's executor.

    ``options`` are those of :func:`trace`. The network must be large enough for whole MiB to tell.
    """
    result = trace(symbol, shapes=shapes, **options)
    schedule = Schedule.unplanned(result.graph)
    for width in (1, 2, 16):
        with match_range(width):
            description = executor_description(symbol, result)
        total = allocated_mib(description)
        assert total >= 20, "too small to tell"
        assert allocate(schedule, match_range=width).reported_nbytes >> 20 == total
    assert [(op.kind, op.name) for op in result.graph.ops] == ops(description)
    assert mirror(result.graph, frozenset()) == schedule
    return result
