"""Arrays of an executor by their names, as MXNet's executors have them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, NDArrayHandle, check_call

from memplan.errors import ArgumentError
from memplan.mxnet.realise.bind import Arrays, NDArray


class BoundArrays:
    """The arrays of an executor for arguments and auxiliary states, as MXNet's executors have them.

    Each in the order of ``list_arguments()`` or ``list_auxiliary_states()``.
    """

    arg_dict: dict[str, NDArray]
    aux_dict: dict[str, NDArray]

    @property
    def arg_arrays(self) -> list[NDArray]:
        """The arguments."""
        return list(self.arg_dict.values())

    @property
    def aux_arrays(self) -> list[NDArray]:
        """The auxiliary states."""
        return list(self.aux_dict.values())

    def copy_params_from(
        self,
        arg_params: Arrays,
        aux_params: Arrays | None = None,
        allow_extra_params: bool = False,
    ) -> None:
        """Copy values into the arguments and states of these names, as MXNet's executor does.

        ArgumentError where there is none of a name, unless ``allow_extra_params``.
        """
        for values, arrays in ((arg_params, self.arg_dict), (aux_params or {}, self.aux_dict)):
            for name, value in values.items():
                if name in arrays:
                    value.astype(arrays[name].dtype).copyto(arrays[name])
                elif not allow_extra_params:
                    raise ArgumentError(f"{name!r} is no argument or state of the network")

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name not in self.arg_dict:
                raise ArgumentError(f"{name!r} is no argument of the network")
            shape, needed = tuple(np.shape(value)), self.arg_dict[name].shape
            if shape != needed:  # or a batch of one would be copied to every place of a larger one
                raise ArgumentError(f"{name!r} has the shape {shape}; it must be {needed}")
            # Arrays of mx.np cannot be copied into others.
            is_array = isinstance(value, mx.nd.NDArray)
            _assign(self.arg_dict[name], value.as_nd_ndarray() if is_array else value, shape)


def _assign(array: NDArray, value: Any, shape: tuple[int, ...]) -> None:
    """``array[:] = value``, both of this ``shape``.

    MXNet looks in Python for what it is to do, which counts in a step of a millisecond. For an
    array of the same kind it makes these two calls.
    """
    is_alike = type(value) is type(array) is mx.nd.NDArray and 0 not in shape and shape != ()
    if value is array or not (is_alike and value.dtype == array.dtype and value.ctx == array.ctx):
        array[:] = value
        return
    view = NDArrayHandle()
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    check_call(_LIB.MXNDArrayReshape64(value.handle, len(shape), sizes, False, ctypes.byref(view)))
    mx.nd.NDArray(view).copyto(array)


class Gradients(dict[str, NDArray]):
    """Those that there are, for a loop; MXNet's executor has None for other arguments."""

    def __missing__(self, name: str) -> None:
        return None
