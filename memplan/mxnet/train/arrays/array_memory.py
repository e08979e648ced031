"""Which memory an array is a part of: MXNet tells where its elements lie only by moving them.

Its ``MXNDArrayGetData`` lays out anew what oneDNN has left in a layout of its own, which changes
how later sums are rounded. So what is read is what MXNet's object itself has: the address of the
memory that it shares with its views, how many objects share it, and the bytes before its first
element there (``ptr_``, a pointer that is counted, and ``byte_offset_`` of ``NDArray`` in
include/mxnet/ndarray.h). So does what autograd knows the array by, which operators that have read
it share (``autograd_entry_.node``). The memory begins with where its elements are, once there is
room for them (``shandle.dptr`` of ``Chunk``).

Here are, too, arrays made of that of another, and those that have none yet.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.ndarray.ndarray import NDArrayBase, _new_alloc_handle

from memplan.mxnet.realise.own_autograd import mark_variables

NDArray = Any

# Where these stand in the object, and the count in what the second address is of (shared_ptr).
_CHUNK, _COUNTER, _OFFSET = 0, 8, 64
_NODE, _COUNTER_OF_NODE = 88, 96
_COUNT = 8


@dataclass(frozen=True)
class Part:
    """The bytes from ``begin`` to ``end`` of a memory, which ``chunk`` stands for."""

    chunk: int
    begin: int
    end: int

    def overlaps(self, other: Part) -> bool:
        is_same = self.chunk == other.chunk
        return is_same and self.begin < other.end and other.begin < self.end


def handle_of(array: NDArray) -> Any:
    """The handle of ``array``, also where that is withheld."""
    return NDArrayBase.handle.__get__(array)


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


def memory_of(array: NDArray) -> Any:
    """What equals that of another array in the same place of the same memory only.

    Where this MXNet's objects are others it is that of the same handle only.
    """
    if not _are_objects_known():
        return handle_of(array)
    return _number(array, _CHUNK), _number(array, _OFFSET)


def is_held_elsewhere(gradient: NDArray, *, is_asked: bool) -> bool:
    """Does anybody else have the memory of ``gradient`` than this object, and autograd?

    It is the object that was marked, or ``is_asked``, what the ``grad`` of an array has given.
    MXNet's engine has it, too, until it has written there.
    """
    return _are_objects_known() and _nholders(gradient) > _nholders_of_gradients()[is_asked]


def memories_in_python(own: Iterable[NDArray]) -> set[int]:
    """The memories of all arrays that anybody has in Python, but for these objects of ``own``.

    Those that a script has frozen (``gc.freeze``), too, of which Python tells only when they are
    not any more.
    """
    gc.unfreeze()
    ids = set(map(id, own))
    objects = (o for o in gc.get_objects() if issubclass(type(o), mx.nd.NDArray))
    return {chunk_of(array) for array in objects if id(array) not in ids and _has_object(array)}


def is_written_by_graphs(gradient: NDArray) -> bool:
    """Is there a graph that would write into ``gradient``, in whose place another was marked?

    This object has the memory, and what autograd knows the gradient itself by.
    """
    return _are_objects_known() and _nholders(gradient) > 2


def is_unused(gradient: NDArray) -> bool:
    """Has nobody written into ``gradient``, in whose place another was marked, nor can?

    It was made without memory. False for a sparse one, and where this MXNet's objects are others.
    """
    if gradient.stype != "default" or not _is_memory_known():
        return False
    # In this order, for the engine has what it is to write into until it has memory.
    return not is_written_by_graphs(gradient) and not _elements(gradient)


def is_recorded_elsewhere(array: NDArray) -> bool:
    """May anything else than this object have what autograd knows ``array`` by?

    An operator that was recorded has it, as long as its graph lives, and so has another object for
    the array. Where this MXNet's objects are others nobody knows, and something may.
    """
    return not _are_nodes_known() or _nholders(array, _COUNTER_OF_NODE) > 1


def is_unknown_to_autograd(array: NDArray) -> bool:
    """Is ``array`` for certain one that autograd knows nothing of?"""
    return _are_nodes_known() and not _number(array, _NODE)


def other_handle(array: NDArray) -> NDArray:
    """The same array, of which autograd knows the same."""
    handle = NDArrayHandle()
    check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
    return type(array)(handle, writable=array.writable)


def without_memory(like: NDArray) -> NDArray:
    """An array of this kind, which gets memory when something is written into it."""
    if like.stype != "default":
        return mx.nd.zeros(like.shape, like.ctx, like.dtype, stype=like.stype)
    return mx.nd.NDArray(_new_alloc_handle(like.shape, like.ctx, True, like.dtype))


def _nholders(array: NDArray, counter: int = _COUNTER) -> int:
    address = _number(array, counter)
    return ctypes.c_int32.from_address(address + _COUNT).value if address else 0


@functools.cache
def _nholders_of_gradients() -> tuple[int, int]:
    """How many objects have the memory of a gradient that was marked, and of one that is asked."""
    array, gradient = _unwritten((2,)), _unwritten((2,))
    mark_variables([array], [gradient])
    marked = _nholders(gradient)
    del gradient
    return marked, _nholders(array.grad)


def _unwritten(shape: tuple[int, ...]) -> NDArray:
    """An array to count those who have its memory: the engine, which has what it has written for a
    while after ``waitall``, is not among them.
    """
    return mx.nd.empty(shape, mx.cpu())


def _has_object(array: NDArray) -> bool:
    """Is it more than one that is being made?"""
    try:
        return bool(handle_of(array))
    except AttributeError:
        return False


def _number(array: NDArray, place: int) -> int:
    return ctypes.c_uint64.from_address((handle_of(array).value or 0) + place).value


@functools.cache
def _are_objects_known() -> bool:
    """Are the numbers where they are expected, for arrays whose memory is known?"""
    array, other = _unwritten((8, 4)), _unwritten((8, 4))
    with autograd.pause():
        view = array[3:5].reshape((8,))
    chunks = [_number(one, _CHUNK) for one in (array, view, other)]
    offsets = [_number(one, _OFFSET) for one in (array, view, other)]
    if not (chunks[0] == chunks[1] != chunks[2] and offsets == [0, 48, 0]):
        return False  # what stands for the address of the count may be none
    return [_nholders(one) for one in (array, other)] == [2, 1]


def _elements(array: NDArray) -> int:
    """Where the elements of ``array`` are; 0 where there is no memory for them yet."""
    return ctypes.c_uint64.from_address(_number(array, _CHUNK)).value


@functools.cache
def _is_memory_known() -> bool:
    """Is it where it is expected whether an array has memory?"""
    if not _are_objects_known():
        return False
    array = mx.nd.NDArray(_new_alloc_handle((2,), mx.cpu(), True, "float32"))
    before = _elements(array)
    with autograd.pause():
        array[:] = 1
    array.wait_to_read()
    after = _elements(array)
    return before == 0 != after and ctypes.c_float.from_address(after).value == 1


@functools.cache
def _are_nodes_known() -> bool:
    """Is what autograd knows an array by where it is expected, and counted?"""
    array, gradient = _unwritten((2,)), _unwritten((2,))
    before = [_number(array, place) for place in (_NODE, _COUNTER_OF_NODE)]
    mark_variables([array], [gradient])
    after = [_number(array, place) for place in (_NODE, _COUNTER_OF_NODE)]
    if any(before) or not all(after):
        return False  # what stands for the address of the count may be none
    nholders = _nholders(array, _COUNTER_OF_NODE)
    with autograd.record():
        result = array + 1
    is_counted = nholders == 1 and _nholders(array, _COUNTER_OF_NODE) > 1
    del result  # which held it until now
    return is_counted
