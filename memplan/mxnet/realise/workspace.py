"""The workspace of operators that are called one by one: one, where MXNet would take several."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import mxnet as mx

from memplan.mxnet.realise.engine import Context, hidden_function
from memplan.mxnet.realise.update_calls import AnyCall


class _Request(ctypes.Structure):
    """MXNet's ResourceRequest (include/mxnet/resource.h); 1 is temporary space."""

    _fields_ = (("type", ctypes.c_int),)


class _Resource(ctypes.Structure):
    """MXNet's Resource (the same file); ``number`` says which of the copies it is."""

    _fields_ = (
        ("request", _Request),
        ("variable", ctypes.c_void_p),
        ("number", ctypes.c_int32),
        ("space", ctypes.c_void_p),
    )


_TEMPORARY_SPACE = _Request(1)


# ResourceManager::Get(), which is the calling thread's own, and ResourceManagerImpl::Request().
_MANAGER = hidden_function("_ZN5mxnet15ResourceManager3GetEv", ctypes.c_void_p)
_REQUEST = hidden_function(
    "_ZN5mxnet8resource19ResourceManagerImpl7RequestENS_7ContextERKNS_15ResourceRequestE", _Resource
)


class OneWorkspace:
    """Makes calls such that all of them find the same workspace on ``ctx``.

    MXNet has several on the CPU (MXNET_CPU_TEMP_COPY, 4) and hands them out in turn to the calls
    that ask for one, each of which makes its own as large as it needs (src/resource.cc). Calls that
    run in turn anyhow need one: after each, this asks for the others.
    """

    def __init__(self, ctx: mx.Context) -> None:
        self._last, self._manager = 0, 0
        # Two numbers, which are passed as one of twice the size: ctypes makes no object of it.
        context = Context(ctx.device_typeid, ctx.device_id)
        self._context = ctypes.c_uint64.from_param(ctypes.c_uint64.from_buffer_copy(context).value)
        if _MANAGER is not None and _REQUEST is not None:
            self._be_asked_here()
            first = self._next()
            while (number := self._next()) != first:
                self._last = max(self._last, first, number)

    def begin(self) -> None:
        """Whatever was called before, in this thread or another: the next that asks gets the first
        copy.
        """
        if self._last:
            self._be_asked_here()
            self._skip()

    def _be_asked_here(self) -> None:
        """From now on ask the manager of this thread."""
        manager = _MANAGER()
        if manager != self._manager:
            self._manager = manager
            self._ask: Callable[[], _Resource] = functools.partial(
                _REQUEST,
                ctypes.c_void_p.from_param(manager),
                self._context,
                ctypes.byref(_TEMPORARY_SPACE),
            )

    def call(self, call: AnyCall) -> None:
        """Make the ``call``, and the requests after it; find out how many where that is None."""
        if call.skips is None:
            self.begin()
            call()
            call.skips = self._skip() if self._last else 0
        else:
            call()
            for _ in range(call.skips):
                self._ask()

    def _skip(self) -> int:
        """Ask until the last copy was handed out; how often that was, none where all were."""
        nrequests = 1
        while self._next() != self._last:
            nrequests += 1
        return nrequests % (self._last + 1)

    def _next(self) -> int:
        """Which copy MXNet hands out now."""
        return int(self._ask().number)
