"""Arrays at given addresses, where arrays lie, and waiting for what MXNet's engine does to them."""

from __future__ import annotations

import ctypes
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.ndarray.ndarray import (
    DLContext,
    DLDataType,
    DLManagedTensor,
    DLTensor,
    dl_managed_tensor_deleter,
)

NDArray = Any

# What DLPack calls the devices.
_DEVICES = {"cpu": 1, "gpu": 2}


def array_at(memory: NDArray, offset: int, shape: tuple[int, ...], dtype: str) -> NDArray:
    """An array of its own in that of ``memory``, an array, from byte ``offset`` on.

    It is no view: MXNet's views cannot hold oneDNN's layouts. So its engine does not know that
    arrays lie in one memory, or overlap. The array keeps ``memory`` alive.
    """
    tensor = DLTensor()
    tensor.data = address_of(memory) + offset
    tensor.ctx = DLContext(_DEVICES[memory.context.device_type], memory.context.device_id)
    tensor.ndim = len(shape)
    tensor.dtype = DLDataType(*_dlpack_type(dtype))
    tensor.shape = (ctypes.c_int64 * len(shape))(*shape)
    tensor.strides = None
    tensor.byte_offset = 0
    owner = ctypes.py_object(memory)
    ctypes.pythonapi.Py_IncRef(owner)
    managed = DLManagedTensor()
    managed.dl_tensor = tensor
    managed.manager_ctx = ctypes.c_void_p.from_buffer(owner)
    managed.deleter = dl_managed_tensor_deleter
    handle = NDArrayHandle()
    check_call(_LIB.MXNDArrayFromDLPackEx(ctypes.byref(managed), True, ctypes.byref(handle)))
    return mx.nd.NDArray(handle)


def address_of(array: NDArray) -> int:
    """Where the bytes of ``array`` begin, in the memory of its device."""
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value or 0


def wait_to_read(array: NDArray) -> None:
    """Wait until ``array`` has been written by all that MXNet's engine was asked for before."""
    check_call(_LIB.MXNDArrayWaitToRead(array.handle))


def wait_to_write(array: NDArray) -> None:
    """Wait until nothing that MXNet's engine was asked for reads or writes ``array`` any more."""
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))


def _dlpack_type(dtype: str) -> tuple[int, int, int]:
    """DLPack's code, bits and lanes."""
    if dtype == "bool":
        return 1, 1, 1
    code = {"i": 0, "u": 1, "f": 2}[np.dtype(dtype).kind]
    return code, 8 * np.dtype(dtype).itemsize, 1
