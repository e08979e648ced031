"""What a set of flags costs, compiled: thousands of evaluations a second for searches.

The order is that of :func:`memplan.step.mirroring.mirror`, the replay that of
:mod:`memplan.search.kernels.replay`; the tests hold the costs equal to those of the plain ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import Array, graph_arrays, ragged
from memplan.search.kernels.replay import UNLIMITED, replay, replay_memory
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable
from memplan.util.compiled import compiled_with_arrays
from memplan.util.interrupts import as_it_came
from memplan.util.remember import remembered


@dataclass(frozen=True)
class Cost:
    """Bytes of MXNet's blocks, peak of live bytes, and seconds of the step."""

    allocated_nbytes: int
    peak_nbytes: int
    seconds: float


class OrderArrays(NamedTuple):
    """What decides the order: ``flat[start[op]:start[op + 1]]`` are the ops that op depends on.

    ``differentiates`` is -1 where an op does not; ``producers`` are the ops that write tensors.
    """

    start: Array
    flat: Array
    differentiates: Array
    head_ops: Array
    producers: Array
    seconds: Array


class Evaluator:
    """Evaluates sets of flags of one graph."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.flaggable = remembered(graph, flaggable, lambda: flaggable(graph))
        self.nops = len(graph.ops)
        self.match_range = graph.match_range
        self._arrays = graph_arrays(graph)
        self._order = remembered(graph, OrderArrays, lambda: _order_arrays(graph))
        self._memory = replay_memory(
            self._arrays, 2 * self.nops, 2 * len(graph.tensors), copies=True
        )

    def flags(self, ops: Iterable[int]) -> Array:
        """A set of ops as the array that :meth:`__call__` takes."""
        result = np.zeros(self.nops, dtype=np.bool_)
        result[list(ops)] = True
        return result

    def __call__(self, flags: Array) -> Cost:
        """The cost of flagging the ops where ``flags`` is true."""
        steps, seconds = self.order(flags)
        allocated, peak = self._replay(steps, UNLIMITED)
        return Cost(int(allocated), int(peak), seconds)

    def order(self, flags: Array) -> tuple[Array, float]:
        """The steps with these flags, and their seconds; bytes are those of the latest order."""
        try:
            steps, seconds = run_order(flags, self._order, self._memory.copies)
        except SystemError as error:
            raise as_it_came(error) from None
        return steps, seconds

    def allocated_nbytes(self, steps: Array, enough: float) -> int:
        """Bytes of the blocks of the latest order; where they are more than ``enough``, not all."""
        return int(self._replay(steps, int(min(UNLIMITED, enough)))[0])

    def _replay(self, steps: Array, enough: int) -> tuple[int, int]:
        arrays, memory, nsteps = self._arrays, self._memory, len(steps)
        try:
            allocated, peak = replay(arrays, memory, steps, nsteps, self.match_range, enough)
        except SystemError as error:
            raise as_it_came(error) from None
        return allocated, peak


def _order_arrays(graph: TrainingGraph) -> OrderArrays:
    differentiates = [-1 if o.differentiates is None else o.differentiates for o in graph.ops]
    return OrderArrays(
        *ragged(graph.dependencies),
        np.array(differentiates, dtype=np.int64),
        np.array([graph.producer[t] for t in graph.heads], dtype=np.int64),
        np.array(graph.producer, dtype=np.int64),
        np.array([op.seconds for op in graph.ops], dtype=float),
    )


@compiled_with_arrays
def run_order(flags, arrays, copies):  # type: ignore[no-untyped-def]
    """The steps of the schedule that ``flags`` give, and its seconds; fills in ``copies``."""
    nops, ntensors = len(flags), len(copies)
    for tensor in range(ntensors):
        copies[tensor] = tensor + ntensors * flags[arrays.producers[tensor]]
    has_run = np.zeros(2 * nops, dtype=np.bool_)
    steps = np.empty(2 * nops, dtype=np.int64)
    stack = np.empty(2 * len(arrays.flat) + 2, dtype=np.int64)
    nsteps, seconds = 0, 0.0
    for root in arrays.head_ops:
        stack[0] = root
        top = 1
        while top:
            node = stack[top - 1]
            if has_run[node]:
                top -= 1
                continue
            op = node % nops
            is_copy = node >= nops
            if arrays.differentiates[op] >= 0:
                is_copy |= flags[arrays.differentiates[op]]
            before = top
            for i in range(arrays.start[op + 1] - 1, arrays.start[op] - 1, -1):
                dependency = arrays.flat[i]
                if is_copy and flags[dependency]:
                    dependency += nops
                if not has_run[dependency]:
                    stack[top] = dependency
                    top += 1
            if top == before:
                top -= 1
                has_run[node] = True
                steps[nsteps] = op + nops * is_copy
                seconds += arrays.seconds[op]
                nsteps += 1
    return steps[:nsteps], seconds
