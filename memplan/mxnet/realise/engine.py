"""What MXNet's engine must be told: it orders what it gets by what that reads and writes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, check_call

NDArray = Any


class Context(ctypes.Structure):
    """MXNet's Context (include/mxnet/base.h)."""

    _fields_ = (("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int32))


# The engine calls a function of C in a thread of its own. This one of Python's changes nothing and
# needs no lock, which a function written in Python would wait for.
_NOTHING = ctypes.c_void_p.from_param(
    ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value
)


def hidden_function(name: str, returns: Any = None) -> Any:
    """A function of MXNet's that its C API does not have; None where the library hides it.

    It is called with objects of ctypes, in half the time that it takes to make them of others.
    """
    function = getattr(_LIB, name, None)
    if function is not None:
        function.restype = returns
    return function


# NDArray::Reorder2DefaultAsync() const, which no function of the C API calls without a wait. An
# MXNet without oneDNN has neither it nor other layouts. A handle is a pointer to the NDArray.
_TO_DEFAULT_LAYOUT = hidden_function("_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv")


def to_default_layout(arrays: Sequence[NDArray]) -> None:
    """Ask the engine to put ``arrays`` back from oneDNN's layouts, those that have one by then.

    Inference leaves weights in such layouts. MXNet's training asks for this as well, but only when
    the layer runs: an update may have been asked for by then, and finds the weight as it is. That
    matters to nag_mom_update, which reads the weight again after writing it: it computes something
    else where MXNet gives it a copy to read.
    """
    if _TO_DEFAULT_LAYOUT is not None and arrays and arrays[0].context.device_type != "gpu":
        for array in arrays:  # all of them are on one context
            _TO_DEFAULT_LAYOUT(array.handle)


# Where MXNet writes how many operations it bundled before, which nobody reads.
_BEFORE = ctypes.byref(ctypes.c_int())


def bundle(noperations: int) -> None:
    """Hand to the engine what it has bundled in this thread; it bundles so many operations next.

    0: none. This takes a third of the time of ``mx.engine.bulk``, which also remembers how many it
    was.
    """
    _LIB.MXEngineSetBulkSize(noperations, _BEFORE)


# Engine::Get() and ThreadedEngine::bulk_size() const, which is 0 where the engine bundles nothing.
_ENGINE = hidden_function("_ZN5mxnet6Engine3GetEv", ctypes.c_void_p)
_BULK_SIZE = hidden_function("_ZNK5mxnet6engine14ThreadedEngine9bulk_sizeEv", ctypes.c_int)


@functools.cache
def engine() -> Any:
    """MXNet's engine, as an argument of its methods."""
    return ctypes.c_void_p.from_param(_ENGINE())


def bundles() -> bool:
    """Does the engine bundle what it is asked to? Not while its profiler runs and adds up times.

    Where the library hides what tells so, this asks for the times, by which MXNet writes the file
    of a profiler that runs. Afterwards this thread bundles nothing.
    """
    if _ENGINE is None or _BULK_SIZE is None:
        return not mx.profiler.dumps()
    bundle(2)
    result = bool(_BULK_SIZE(engine()))
    bundle(0)
    return result


class Vector(ctypes.Structure):
    """A std::vector of an array of ctypes."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("room", ctypes.c_void_p))


def as_vector(array: Any) -> Any:
    """An argument that is a std::vector of an array of ctypes."""
    begin = ctypes.addressof(array)
    end = begin + ctypes.sizeof(array)
    vector = Vector(begin, end, end)
    vector.array = array  # which lives as long
    return ctypes.byref(vector)


class Handles:
    """``arrays``, and their handles as functions of the C API take them. Calls may share them.

    They are made such that ctypes need not make an argument of them in every call.
    """

    __slots__ = ("_place", "_vector", "arrays", "handles", "pointer")

    def __init__(self, arrays: Sequence[NDArray]) -> None:
        self.arrays = tuple(arrays)
        self.handles = (NDArrayHandle * len(arrays))(*(array.handle for array in arrays))
        self.pointer = ctypes.byref(self.handles)
        self._place: Any = None
        self._vector: Any = None

    @property
    def vector(self) -> Any:
        """They as a std::vector, for a function that the C API does not have."""
        if self._vector is None:
            self._vector = as_vector(self.handles)
        return self._vector

    @property
    def place(self) -> Any:
        """Where a pointer to them stands, for a function that may set it to others."""
        if self._place is None:
            self._place = ctypes.byref(ctypes.c_void_p(ctypes.addressof(self.handles)))
        return self._place


class Marker:
    """An operation that does nothing, in the engine's order as if it read and wrote arrays.

    It waits for all earlier operations on what it ``writes``, and later ones wait for it. An array
    that it writes must not share memory with another of its arrays. It has no name, so that MXNet's
    profiler does not record it. It runs where ``ctx`` runs what it computes.
    """

    def __init__(
        self, reads: Sequence[NDArray], writes: Sequence[NDArray], ctx: mx.Context
    ) -> None:
        self._held = Handles(reads), Handles(writes)
        self._arguments = (
            _NOTHING,
            None,
            None,
            ctypes.byref(Context(ctx.device_typeid, ctx.device_id)),
            self._held[0].pointer,
            len(reads),
            self._held[1].pointer,
            len(writes),
            None,
            0,
            None,
        )

    def __call__(self) -> None:
        check_call(_LIB.MXEnginePushSyncND(*self._arguments))


class HiddenWrites:
    """The place of a step among all that reads ``states``, which it writes unknown to the engine.

    An executor names to the engine what its ops read, and their outputs (src/executor/
    graph_executor.cc, InitCachedOps). BatchNorm writes its moving statistics beside its outputs.
    An op is in a step only if one of ``outputs``, those of the step, depends on it: so when these
    are written, the states are. All of them are on ``ctx``.
    """

    def __init__(
        self, states: Sequence[NDArray], outputs: Sequence[NDArray], ctx: mx.Context
    ) -> None:
        # A marker for each state, for two of them may share memory.
        self._begin = [Marker([], [state], ctx) for state in states]
        done = mx.nd.zeros((1,), ctx)
        after = [Marker([done], [state], ctx) for state in states]
        self._end = [Marker(outputs, [done], ctx), *after] if states else []

    def begin(self) -> None:
        """Before the step: it waits for all that was asked to read the states before."""
        hand_over(self._begin)

    def end(self) -> None:
        """After the step: whatever reads the states from now on waits for it."""
        hand_over(self._end)


def hand_over(marks: Sequence[Marker]) -> None:
    """Hand ``marks`` to the engine, as one operation where it bundles: not under its profiler."""
    if marks:
        before = mx.engine.set_bulk_size(len(marks) + 1)
        try:
            for mark in marks:
                mark()
        finally:  # Ctrl-C comes between two of them, too
            mx.engine.set_bulk_size(before)
