"""Waiting for what lets go of arrays by itself: MXNet's engine, and Python's look for garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import mxnet as mx


def is_let_go(is_gone: Callable[[], bool], *, collects: bool = True) -> bool:
    """Is it gone, now or a moment after MXNet has run all that it was asked for?

    ``waitall`` returns before the engine lets go of the arrays of what has run last, and on a busy
    machine it may get no core in the meantime. What is not gone after a minute stays.
    """
    for _ in range(6000):
        mx.nd.waitall()
        if collects:
            gc.collect()
        if is_gone():
            return True
        threading.Event().wait(0.01)
    return False
