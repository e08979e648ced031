"""Arrays in the usual layout for a Custom op, whatever oneDNN has made of them.

Where a single operator is called, MXNet hands a Custom op a copy of what lies in one of oneDNN's
layouts, and frees the copy while the op still reads it, in a thread of its own: the op computes
garbage. MXNet's executors keep the copy.

And arrays in the layouts in which MXNet's executor leaves them, of what autograd has written.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, check_call
from mxnet.ndarray import _internal

from memplan.mxnet.realise.engine import to_default_layout

NDArray = Any


def _has_usual_layout(array: NDArray) -> bool:
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
        kept = [(array, mx.nd.add_n(array)) for array in arrays if not _has_usual_layout(array)]
    to_default_layout([array for array, _ in kept])
    yield
    with autograd.pause():
        for array, copy in kept:
            mx.nd.add_n(copy, out=array)
            array.wait_to_read()


@contextlib.contextmanager
def in_layouts_of(pairs: Sequence[tuple[NDArray, NDArray]]) -> Iterator[None]:
    """Behind this the second array of each pair has the layout that the first one had before.

    It is written within, maybe over the first one. No gradient is recorded.
    """
    copies = [mx.nd.add_n(source) for source, _ in pairs]
    yield
    for copy, (_, array) in zip(copies, pairs, strict=True):
        # What is assigned to a part of an array, or to all of it, leaves the layout as it is.
        _internal._slice_assign(copy, array, begin=(), end=(), out=copy)
        mx.nd.add_n(copy, out=array)
