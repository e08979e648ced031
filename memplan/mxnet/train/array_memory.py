"""Which memory an array is a part of: MXNet tells where its elements lie only by moving them.

Its ``MXNDArrayGetData`` lays out anew what oneDNN has left in a layout of its own, which changes
how later sums are rounded. So the two numbers are read that MXNet's object itself has: the address
of the memory that it shares with its views, and the bytes before its first element there (``ptr_``
and ``byte_offset_`` of ``NDArray`` in include/mxnet/ndarray.h).
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np

from memplan.mxnet.train.withheld import handle_of

NDArray = Any

# Where the two numbers stand in MXNet's object.
_CHUNK, _OFFSET = 0, 64


@dataclass(frozen=True)
class Part:
    """The bytes from ``begin`` to ``end`` of a memory, which ``chunk`` stands for."""

    chunk: int
    begin: int
    end: int

    def overlaps(self, other: Part) -> bool:
        is_same = self.chunk == other.chunk
        return is_same and self.begin < other.end and other.begin < self.end


def part_of(array: NDArray) -> Part | None:
    """What dense ``array`` is of its memory; None where this MXNet's objects are others."""
    if array.stype != "default" or not _are_objects_known():
        return None
    begin = _number(array, _OFFSET)
    nbytes = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    return Part(_number(array, _CHUNK), begin, begin + nbytes)


def chunk_of(array: NDArray) -> int:
    """The memory of ``array``; 0 where this MXNet's objects are others."""
    return _number(array, _CHUNK) if _are_objects_known() else 0


def _number(array: NDArray, place: int) -> int:
    return ctypes.c_uint64.from_address((handle_of(array).value or 0) + place).value


@functools.cache
def _are_objects_known() -> bool:
    """Are the numbers where they are expected, for arrays whose memory is known?"""
    array, other = mx.nd.zeros((8, 4), mx.cpu()), mx.nd.zeros((8, 4), mx.cpu())
    view = array[3:5].reshape((8,))
    chunks = [_number(one, _CHUNK) for one in (array, view, other)]
    offsets = [_number(one, _OFFSET) for one in (array, view, other)]
    return chunks[0] == chunks[1] != chunks[2] and offsets == [0, 48, 0]
