"""Holding up MXNet's engine, so that the order in which ops become ready is known."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import mxnet as mx
from mxnet.base import _LIB, check_call


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within this nothing runs on ``cpu(0)``; at its end all that was asked for has run.

    The engine has one thread for that device, which takes ops as they become ready.
    """
    opened = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: opened.wait())
    cpu = (ctypes.c_int * 2)(1, 0)  # MXNet's Context (include/mxnet/base.h)
    check_call(_LIB.MXEnginePushSyncND(wait, None, None, cpu, None, 0, None, 0, None, 0, None))
    try:
        yield
    finally:
        opened.set()
        mx.nd.waitall()
