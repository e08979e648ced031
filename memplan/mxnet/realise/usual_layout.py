"""Arrays in the usual layout for a Custom op, whatever oneDNN has made of them.

Where a single operator is called, MXNet hands a Custom op a copy of what lies in one of oneDNN's
layouts, and frees the copy while the op still reads it, in a thread of its own: the op computes
garbage. MXNet's executors keep the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, check_call

from memplan.mxnet.realise.engine import to_default_layout

NDArray = Any


def has_usual_layout(array: NDArray) -> bool:
    """Is ``array``, of which nothing is being computed, in none of oneDNN's layouts?

    MXNet shares the memory of no other by DLPack, in a microsecond; an error takes ten.
    """
    shared = ctypes.c_void_p()
    if _LIB.MXNDArrayToDLPack(array.handle, ctypes.byref(shared)):
        return False
    check_call(_LIB.MXNDArrayCallDLPackDeleter(shared))
    return True


@contextlib.contextmanager
def in_usual_layout(arrays: Sequence[NDArray]) -> Iterator[None]:
    """Within this ``arrays`` have the usual layout, and behind it again the one that they had.

    Whoever reads them later rounds by their layout, and in MXNet's executor they keep it. What is
    called within only reads them. This waits for those that it puts back.
    """
    for array in arrays:
        array.wait_to_read()
    # A sum of one term has the layout of the term; MXNet's copy of an array has the usual one.
    with autograd.pause():
        kept = [(array, mx.nd.add_n(array)) for array in arrays if not has_usual_layout(array)]
    to_default_layout([array for array, _ in kept])
    yield
    with autograd.pause():
        for array, copy in kept:
            mx.nd.add_n(copy, out=array)
            array.wait_to_read()
