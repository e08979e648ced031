"""The memory that the executors of a device share: they run in turn, one for each shape."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from memplan.allocator import allocate
from memplan.mxnet.lowering import lower
from memplan.mxnet.trace import Trace
from memplan.result import Plan
from memplan.schedule import Schedule

NDArray = Any


class Pool:
    """Blocks of memory in which executors are bound.

    MXNet gives every block of a further executor, the largest first, the smallest unused block
    that is large enough, and adds one where there is none (src/executor/graph_executor.cc,
    InitDataEntryMemory): what two executors hold is more than what either needs.
    """

    def __init__(self) -> None:
        #: The executor that was bound first, to bind others with; None if there is none.
        self.executor: mx.executor.Executor | None = None
        self._blocks: list[int] = []
        self._room: int | None = 0

    def allow(self, plan: Plan) -> None:
        """All blocks may take what the budget of ``plan`` leaves; of several the largest counts."""
        if self._room is None or plan.budget_nbytes is None:
            self._room = None
        else:
            left = plan.budget_nbytes - (plan.total_nbytes - plan.allocated_nbytes)
            self._room = max(self._room, left)

    @property
    def is_limited(self) -> bool:
        return self._room is not None

    def admits(self, blocks: Sequence[int]) -> bool:
        """Is there room for an executor with these ``blocks``? In an empty pool there is."""
        if not self._blocks or self._room is None:
            return True
        return sum(self._blocks) + sum(self._lacking(blocks)) <= self._room

    def add(self, blocks: Sequence[int], executor: mx.executor.Executor) -> None:
        """``executor``, with these ``blocks``, has been bound here."""
        self._blocks += self._lacking(blocks)
        self.executor = self.executor or executor

    def clear(self) -> None:
        """Let go of all executors; what is allowed stays."""
        self.executor = None
        self._blocks.clear()

    def _lacking(self, blocks: Sequence[int]) -> list[int]:
        free = sorted(self._blocks)
        lacking = []
        for size in sorted(blocks, reverse=True):
            place = bisect_left(free, size)
            if place < len(free):
                free.pop(place)
            else:
                lacking.append(size)
        return lacking


def release(ctx: mx.Context) -> None:
    """Give the memory of arrays that nobody holds any more back to the device, now."""
    mx.nd.waitall()
    ctx.empty_cache()


def training_blocks(plan: Plan) -> tuple[int, ...]:
    """Bytes of each block of an explicit ``plan``."""
    lowered = lower(plan.trace, plan.schedule).schedule
    return allocate(lowered, match_range=plan.match_range).blocks


def inference_blocks(trace: Trace) -> tuple[int, ...]:
    """Bytes of each block of :func:`memplan.mxnet.executor.bind_inference`."""
    graph = trace.graph
    ops = graph.ops[: graph.nforward]
    ntensors = sum(len(op.outputs) for op in ops)
    forward = dataclasses.replace(
        graph,
        ops=ops,
        tensors=graph.tensors[:ntensors],
        heads=graph.heads[: len(trace.symbol.list_outputs())],
    )
    return allocate(Schedule.unplanned(forward)).blocks


def view(array: NDArray, shape: tuple[int, ...], dtype: str) -> NDArray | None:
    """The front of ``array`` as one of ``shape`` and ``dtype``; None where that cannot be."""
    nelements = math.prod(shape)
    if array.stype != "default" or np.dtype(array.dtype) != dtype or array.size < nelements:
        return None
    return array.reshape((-1,))[:nelements].reshape(shape)
