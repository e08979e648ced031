"""The array in which packed steps run, and how the engine is told what it does not see there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from memplan.memory.packing import SEGMENT_NBYTES
from memplan.mxnet.realise.imperative import (
    BackwardCall,
    Call,
    UpdateCall,
    array_at,
    wait_to_write,
)
from memplan.mxnet.realise.workspace import OneWorkspace

NDArray = Any
AnyCall = Call | BackwardCall | UpdateCall


class Memory:
    """Memory in which packed steps run in turn: one array, or as few as MXNet has it.

    Its engine does not know that arrays share it, and would run calls of which none reads what
    another writes in any order. What is called within ``in_turn`` keeps its order; all of it
    writes ``fence``. Whatever else reads what a step has ``left`` must be waited for. The calls
    find one workspace.
    """

    def __init__(self, nbytes: int, ctx: mx.Context) -> None:
        self.ctx, self.nbytes = ctx, nbytes
        self._segments = [
            mx.nd.empty((-(-min(SEGMENT_NBYTES, nbytes - begin) // 8),), ctx, "int64")
            for begin in range(0, nbytes, SEGMENT_NBYTES)
        ]
        self.fence = mx.nd.zeros((1,), ctx)
        self.left: Sequence[NDArray] = ()
        self._fence = Call("_plus_scalar", {"scalar": "0"}, [self.fence], [self.fence])
        self.workspace = OneWorkspace(ctx)

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> NDArray:
        """An array of its own at ``offset``; one without elements may be anywhere."""
        segment, offset = divmod(offset, SEGMENT_NBYTES)
        if not math.prod(shape):
            return mx.nd.empty(shape, self.ctx, dtype)
        return array_at(self._segments[segment], offset, shape, dtype)

    def wait(self) -> None:
        """Until nothing reads or writes the memory any more."""
        for array in (*self.left, self.fence):
            wait_to_write(array)

    def in_turn(self, calls: Sequence[AnyCall]) -> None:
        """Hand ``calls`` to the engine as one operation, after all that it got so before."""
        with mx.engine.bulk(len(calls) + 1):
            for call in (self._fence, *calls):
                call.skips = self.workspace.call(call, call.skips)

    def alone(self, call: AnyCall) -> None:
        """Make a call while nothing else runs in the memory."""
        wait_to_write(self.fence)
        call.skips = self.workspace.call(call, call.skips)
        for array in call.written:
            wait_to_write(array)
