"""Bundles of calls that are kept, and handed to MXNet's engine again without making the calls.

The engine notes of each call in a bundle a function, which computes it, and the variables of what
it reads and writes; of the whole bundle it makes one operation (BulkAppend and BulkFlush of MXNet's
src/engine/threaded_engine.h). The functions can run again: they hold the arrays, the attributes and
the workspace. MXNet's executors, too, make theirs once. So from some step on a bundle costs what
one operation does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.realise.engine import Context, Vector, as_vector, engine, hidden_function
from memplan.mxnet.realise.update_calls import AnyCall, Operators, UpdateCall

# ThreadLocalStore<BulkStatus>::Get(), the place of what this thread has in a bundle; the function
# of BulkFlush that runs the functions, and what copies and destroys it, both as parts of a
# std::function of libstdc++; and ThreadedEngine::PushAsync(), which BulkFlush calls.
_STATUS = hidden_function(
    "_ZN4dmlc16ThreadLocalStoreIN5mxnet6engine14ThreadedEngine10BulkStatusEE3GetEv", ctypes.c_void_p
)
_RUN = hidden_function(
    "_ZNSt17_Function_handlerIFvN5mxnet10RunContextENS0_6engine18CallbackOnCompleteEEZNS2_14Thread"
    "edEngine9BulkFlushEvEUlS1_S3_E_E9_M_invokeERKSt9_Any_dataS1_S3_"
)
_MANAGE = hidden_function(
    "_ZNSt14_Function_base13_Base_managerIZN5mxnet6engine14ThreadedEngine9BulkFlushEvEUlNS1_10RunCo"
    "ntextENS2_18CallbackOnCompleteEE_E10_M_managerERSt9_Any_dataRKS8_St18_Manager_operation"
)
_PUSH = hidden_function(
    "_ZN5mxnet6engine14ThreadedEngine9PushAsyncESt8functionIFvNS_10RunContextENS0_18CallbackOnComple"
    "teEEENS_7ContextERKSt6vectorIPNS0_3VarESaISA_EESE_NS_10FnPropertyEiPKcb"
)
_ARE_THERE = None not in (_STATUS, _RUN, _MANAGE, _PUSH)
_MANAGER, _INVOKER = (
    ctypes.cast(function, ctypes.c_void_p).value if function is not None else 0
    for function in (_MANAGE, _RUN)
)

_COPY, _DESTROY = ctypes.c_int(2), ctypes.c_int(3)  # _Manager_operation
_NAME = ctypes.c_char_p(b"ImperativeBulk")  # as the profiler shows the bundles of all others
_ZERO = ctypes.c_int(0)
_CPU = (mx.cpu(0).device_typeid, 0)


class _Function(ctypes.Structure):
    """A std::function of libstdc++."""

    _fields_ = (
        ("data", ctypes.c_void_p * 2),
        ("manager", ctypes.c_void_p),
        ("invoker", ctypes.c_void_p),
    )


class _Status(ctypes.Structure):
    """MXNet's BulkStatus; ``functions`` is a std::shared_ptr."""

    _fields_ = (
        ("size", ctypes.c_int),
        ("count", ctypes.c_int),
        ("ctx", Context),
        ("functions", ctypes.c_void_p * 2),
        ("read", Vector),
        ("written", Vector),
    )


def place_of_thread() -> int:
    """Where MXNet notes what this thread has in a bundle: no other thread has it, ever.

    0 where the library hides it.
    """
    return int(_STATUS()) if _ARE_THERE else 0


class Bundle:
    """``calls`` that the engine gets as one operation, and that operation, once there is one."""

    __slots__ = ("_operators", "_updates", "calls", "operation")

    def __init__(self, calls: Sequence[AnyCall]) -> None:
        self.calls = calls
        self.operation: Operation | None = None
        self._updates = [call for call in calls if isinstance(call, UpdateCall)]
        #: By which the updates among them were made last.
        self._operators: Operators | None = None

    def renew(self) -> bool:
        """Make its updates ready, if they are others than those that were made last; are they?

        The operation of those is kept no longer. A learning rate may change in every step, so that
        of one step is not kept.
        """
        if not self._updates or not self._updates[0].updates.by_operators:
            return False
        operators = self._updates[0].updates.operators
        if operators is self._operators:
            return False
        self.operation = None
        for call in self._updates:
            call.prepare()
        self._operators = operators  # at the end, for Ctrl-C may come before
        return True

    def keep(self, place: int, marks: Sequence[Any], size: int) -> None:
        """Keep what this thread has in a bundle, at ``place``: ``marks``, and then all the calls.

        But not calls that would do something else if they were made anew, nor where MXNet has cut
        the bundle, as where an array was freed meanwhile. Where it notes another ``size`` than it
        was told, or another device than the CPU, what is there is not understood.
        """
        counts = [call.noperations for call in self.calls]
        if place and all(counts):
            status = _Status.from_address(place)
            device = (status.ctx.dev_type, status.ctx.dev_id)
            is_understood = status.size == size and device == _CPU
            if is_understood and status.count == len(marks) + sum(counts):
                self.operation = Operation(status, place, marks)


class Operation:
    """A bundle of functions for the engine, which were noted in ``status`` at the ``place``.

    The functions share the workspace, and draw of the random numbers, of the thread that has the
    place. The first of them are those of ``marks``, whose arrays must live as long.
    """

    __slots__ = ("_arguments", "_copy", "_function", "_kept", "marks", "place")

    def __init__(self, status: _Status, place: int, marks: Sequence[Any]) -> None:
        self.place, self.marks = place, marks
        self._function, self._kept = _Function(), ctypes.c_uint64()
        self._copy = ctypes.byref(self._function), ctypes.byref(self._kept), _COPY
        source = ctypes.c_uint64(ctypes.addressof(status) + _Status.functions.offset)
        _MANAGE(self._copy[1], ctypes.byref(source), _COPY)
        written = _variables(status.written)
        read = _variables(status.read) - written
        self._arguments = (
            engine(),
            self._copy[0],
            ctypes.c_uint64.from_buffer_copy(status.ctx),
            _as_vector(read),
            _as_vector(written),
            _ZERO,  # FnProperty::kNormal
            _ZERO,
            _NAME,
            _ZERO,
        )

    def __call__(self) -> None:
        """Hand it to the engine."""
        function = self._function
        if not function.manager:  # else Ctrl-C came before the last copy was handed over
            _MANAGE(*self._copy)
            function.invoker = _INVOKER
            function.manager = _MANAGER
        _PUSH(*self._arguments)

    def __del__(self, manage: Any = _MANAGE, destroy: Any = _DESTROY) -> None:
        function, kept, _ = self._copy
        manage(kept, kept, destroy)
        if self._function.manager:
            manage(function, function, destroy)


def _variables(vector: Vector) -> set[int]:
    """The engine's variables in a std::vector, without those that are there twice."""
    begin, end = vector.begin or 0, vector.end or 0
    count = (end - begin) // 8
    return set((ctypes.c_uint64 * count).from_address(begin)) if count else set()


def _as_vector(variables: set[int]) -> Any:
    return as_vector((ctypes.c_uint64 * len(variables))(*sorted(variables)))
