"""The array in which packed steps run, and how the engine is told what it does not see there."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import mxnet as mx

from memplan.memory.packing import SEGMENT_NBYTES
from memplan.mxnet.realise.engine import Marker, bundle, hand_over
from memplan.mxnet.realise.kept_bundles import Bundle, place_of_thread
from memplan.mxnet.realise.placed_arrays import (
    address_of,
    array_at,
    wait_to_read,
    wait_to_write,
)
from memplan.mxnet.realise.update_calls import AnyCall
from memplan.mxnet.realise.workspace import OneWorkspace
from memplan.util.pages import ask_for_huge_pages, give_back_pages

NDArray = Any

# So many bundles of calls are with the engine at most: it holds a kilobyte for each call, and
# several thousand would be handed over before the first hundred have run.
WAITING = 16

# A kept one counts as this part of one, for of it the engine holds the variables alone. A step
# counts as further ones: until the engine has copied a batch into a step's arrays, it holds that.
KEPT, STEP = 1 / 32, WAITING / 4


class PackedMemory:
    """Memory in which packed steps run in turn: one array, or as few as MXNet can hold it in.

    Its engine does not know that arrays share it, and would run calls of which none reads what
    another writes in any order. What is called within ``in_turn`` keeps its order; all of it
    writes ``fence``. What a step has left is read by calls that do not: the next step begins after
    these. The calls find one workspace.
    """

    def __init__(self, nbytes: int, ctx: mx.Context) -> None:
        self.ctx, self.nbytes = ctx, nbytes
        self._segments = [
            mx.nd.empty((-(-min(SEGMENT_NBYTES, nbytes - begin) // 8),), ctx, "int64")
            for begin in range(0, nbytes, SEGMENT_NBYTES)
        ]
        if ctx.device_type == "cpu":
            for segment in self._segments:  # every step reads and writes nearly all of it
                ask_for_huge_pages(address_of(segment), 8 * segment.size)
        self.fence = mx.nd.zeros((1,), ctx)
        # Fences of what the last step has left, and what the next bundle is to begin with.
        self._left: Sequence[Marker] = ()
        self._first: Sequence[Marker] = ()
        # The bytes that the last step has left; None while one runs, and if no others are held.
        self._kept: Sequence[range] | None = None
        self._fence = Marker([], [self.fence], ctx)
        # Every so many bundles one of two arrays is written, in turn, and waited for before it is
        # written again: whoever is woken then makes ready several bundles.
        ends = [mx.nd.zeros((1,), ctx) for _ in range(2)]
        self._ends = deque((array, Marker([], [self.fence, array], ctx)) for array in ends)
        self._nbundles = 0.0  # since then
        self.workspace = OneWorkspace(ctx)
        self._thread = 0

    def array(self, offset: int, shape: tuple[int, ...], dtype: str) -> NDArray:
        """An array of its own at ``offset``; one without elements may be anywhere."""
        segment, offset = divmod(offset, SEGMENT_NBYTES)
        if not math.prod(shape):
            return mx.nd.empty(shape, self.ctx, dtype)
        return array_at(self._segments[segment], offset, shape, dtype)

    def fences(self, arrays: Sequence[NDArray], in_memory: Iterable[NDArray]) -> list[Marker]:
        """Markers that keep what reads or writes ``arrays`` in order with what is called in turn.

        One marker is for all arrays that are ``in_memory``, no two of which are the same to MXNet.
        Each of the others has its own, for two of them may be one array to MXNet.
        """
        ids = {id(array) for array in in_memory}
        unique = {id(array): array for array in arrays}
        together = [array for key, array in unique.items() if key in ids]
        apart = [[array] for key, array in unique.items() if key not in ids]
        return [Marker([], [*part, self.fence], self.ctx) for part in [together, *apart] if part]

    def begin(self, left: Sequence[Marker]) -> None:
        """Begin a step, after all that reads what the last one left; ``left`` are its fences.

        They go to the engine with the first calls: to wake its thread takes long.
        """
        self._first, self._left = (*self._first, *self._left), left
        self._nbundles += STEP
        self._kept = None

    def end(self, kept: Sequence[range]) -> None:
        """End a step, of which the bytes ``kept``, from place to place, stay until the next one."""
        self._kept = kept

    @property
    def can_give_back(self) -> bool:
        """Does it hold more than what a step has left, and does none run?"""
        return self._kept is not None and self.ctx.device_type == "cpu"

    def give_back(self) -> None:
        """Return all but what the last step has left to the system, until the next one begins.

        Nothing that the engine was asked for may be under way in the memory. Arrays and calls stay
        what they are.
        """
        kept, self._kept = self._kept or (), None
        for number, segment in enumerate(self._segments):
            begin, address = number * SEGMENT_NBYTES, address_of(segment)
            place, end = begin, begin + 8 * segment.size
            for part in sorted(kept, key=lambda part: part.start):
                if begin <= part.start < end:
                    give_back_pages(address + place - begin, part.start - place)
                    place = max(place, part.stop)
            give_back_pages(address + place - begin, end - place)

    def prepare(self) -> None:
        """Before calls are made in this thread."""
        self._thread = place_of_thread()
        self.workspace.begin()

    def _taken(self) -> Sequence[Marker]:
        """What the next bundle is to begin with, and no other."""
        marks, self._first = self._first, ()
        return marks

    def bundled(self, calls: Bundle) -> None:
        """Hand a bundle of ``calls`` to the engine, in turn: as it was kept, or the calls.

        It is kept for this thread, and what it is to begin with.
        """
        is_new, kept = calls.renew(), calls.operation
        if is_new:
            self.in_turn(calls.calls)
            return
        if kept is None or kept.place != self._thread or kept.marks != (*self._first, self._fence):
            self.in_turn(calls.calls, calls)
            return
        kept()
        self._first = ()
        end = self._end(KEPT)
        if end is not self._fence:
            end()

    def _end(self, nbundles: float = 1.0) -> Marker:
        """What these ``nbundles`` end with. This waits while :data:`WAITING` have not run."""
        self._nbundles += nbundles
        if self._nbundles < WAITING / 2:
            return self._fence
        self._nbundles = 0.0
        array, end = self._ends[0]
        self._ends.rotate()
        wait_to_read(array)
        return end

    def in_turn(self, calls: Sequence[AnyCall], kept_in: Bundle | None = None) -> None:
        """Hand ``calls`` to the engine as one operation, after all that it got so before.

        The caller's thread bundles nothing else. Where an array is freed meanwhile, MXNet cuts the
        operation in two (src/engine/threaded_engine.cc, PushAsync), and only what writes the fence
        keeps its turn. So the caller sees to it that no garbage is collected, and both parts write
        the fence where an optimizer's code, or autograd, may free an array.
        """
        end = self._end()
        marks = (*self._taken(), self._fence)
        size = 2 * len(calls) + len(marks) + 1
        bundle(size)
        try:
            for mark in marks:
                mark()
            for call in calls:
                self.workspace.call(call)
                if call.frees:
                    self._fence()
            if kept_in is not None:
                kept_in.keep(self._thread, marks, size)
            end()
        finally:
            bundle(0)

    def apart(self, call: AnyCall, fences: Sequence[Marker]) -> None:
        """Make a call of several operations, in turn by :meth:`fences` of all that it touches."""
        hand_over((*self._taken(), *fences))
        self.workspace.call(call)
        hand_over(fences)

    def timed(self, call: AnyCall) -> float:
        """Make a call while nothing else runs; the seconds until it has run."""
        hand_over(self._taken())
        mx.nd.waitall()
        begin = time.perf_counter()
        self.workspace.call(call)
        mx.nd.waitall()
        return time.perf_counter() - begin

    def alone(self, call: AnyCall) -> None:
        """Make a call while nothing else runs in the memory."""
        hand_over(self._taken())
        wait_to_write(self.fence)
        self.workspace.call(call)
        for array in call.written:
            wait_to_write(array)
