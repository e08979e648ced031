"""A stopwatch for the ops that MXNet runs, and what it costs to look at it.

MXNet runs a monitored executor op by op and calls back after each: the time between two callbacks
is the op's. The calls of a packed step are waited for one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mxnet as mx
from mxnet.base import NDArrayHandle

from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.imperative import Call
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.util.interrupts import deferring

# How many of the smallest ops are measured at once, and how often.
SMALLEST, REPEATS = 100, 9


class Stopwatch:
    """Notes the time of every output that an executor computes, one op after the other."""

    def __init__(self, watch: Callable[[Callable[[bytes, int], None]], None]) -> None:
        self._names: list[str] = []
        self._seconds: list[float] = []
        self._start = 0.0
        self._error: BaseException | None = None
        watch(self._computed)

    def _computed(self, name: bytes, handle: int) -> None:
        try:
            # The handle is ours to free, or the executor's memory is never returned.
            array = mx.nd.NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)
            try:
                if self._error is None:
                    mx.nd.waitall()
                    self._seconds.append(time.perf_counter() - self._start)
                    self._names.append(name.decode())
            finally:
                del array
            self._start = time.perf_counter()
        except BaseException as error:  # ctypes would print it and go on
            self._error = self._error or error

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within this the executor may run; raises what went wrong in it.

        A Ctrl-C waits for the end: Python loses one that comes as a callback begins.
        """
        mx.nd.waitall()
        with deferring():
            self._start = time.perf_counter()
            yield
            mx.nd.waitall()
        if self._error is not None:
            raise self._error

    def take(self) -> tuple[list[str], list[float]]:
        """Names and seconds of the outputs computed since the last call."""
        taken = self._names, self._seconds
        self._names, self._seconds = [], []
        return taken


def callback_seconds(ctx: mx.Context) -> tuple[float, float]:
    """Seconds of the smallest op in a running executor, and what being monitored adds to it."""
    symbol = mx.sym.Variable("data")
    for _ in range(SMALLEST):
        symbol = symbol + 1
    data, gradient = mx.nd.zeros((1,), ctx), mx.nd.zeros((1,), ctx)
    executor = symbol.bind(ctx, {"data": data}, args_grad={"data": gradient})
    alone = _seconds_alone(lambda: executor.forward(is_train=True))
    stopwatch = Stopwatch(executor.set_monitor_callback)
    monitored = []
    for _ in range(REPEATS):
        with stopwatch.running():
            executor.forward(is_train=True)
        monitored += stopwatch.take()[1]
    return alone, max(undisturbed(monitored) - alone, 0.0)


def call_seconds(ctx: mx.Context) -> tuple[float, float]:
    """Seconds of the smallest call of a packed step, and what waiting for it adds to it."""
    memory, array = PackedMemory(8, ctx), mx.nd.zeros((1,), ctx)
    arrays = Handles([array])
    calls = [Call("_plus_scalar", {"scalar": "1"}, arrays, arrays) for _ in range(SMALLEST)]
    alone = _seconds_alone(lambda: memory.in_turn(calls))
    waited = undisturbed(memory.timed(call) for call in calls)
    return alone, max(waited - alone, 0.0)


def _seconds_alone(run: Callable[[], Any]) -> float:
    """Seconds of each of the smallest ops that ``run`` asks for, while nothing else runs."""

    def seconds() -> float:
        mx.nd.waitall()
        start = time.perf_counter()
        run()
        mx.nd.waitall()
        return (time.perf_counter() - start) / SMALLEST

    return undisturbed(seconds() for _ in range(REPEATS))


def undisturbed(seconds: Iterable[float]) -> float:
    """The lower quartile: on a busy machine most waits take until the next turn, 4 milliseconds."""
    ranked = sorted(seconds)
    return ranked[len(ranked) // 4]
