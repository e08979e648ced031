"""Memory for inputs of several shapes, in which each has a whole array."""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
import numpy as np

from memplan.mxnet.realise.bind import PLACED, ArraysToBind, bind_as_it_stands

NDArray = Any


class InputMemory:
    """The inputs of what runs in turn on a device: of each name one memory, for all its shapes.

    With oneDNN MXNet computes otherwise from a view of a larger array. A pooling rounds otherwise,
    and a max pooling leaves out its notes, by which the gradient is computed unless that is a view
    itself; a concatenation leaves its output in another layout (PoolingComputeExCPU of
    src/operator/nn/pooling.cc, SupportMKLDNNConcat of concat.cc). So every array here is a whole
    one, though all of a name begin at one address, and are one array to MXNet's engine: the output
    of an executor that shares the memory of others (InitDataEntryMemory of
    src/executor/graph_executor.cc). None of these executors runs.
    """

    def __init__(self) -> None:
        # The executors of the largest arrays so far, and the bytes of these.
        self._largest: dict[tuple[str, str], tuple[mx.executor.Executor, int]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: str, ctx: mx.Context) -> NDArray:
        """An array for the input ``name``: what is written into it overwrites the others of it.

        Where it is larger than these, they keep the memory that they have.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not nbytes or not shape:
            return mx.nd.zeros(shape, ctx, dtype)  # MXNet may take such a shape for an unknown one
        shared, room = self._largest.get((name, dtype), (None, 0))
        if nbytes > room:
            shared = None
        output = mx.sym.zeros(shape, dtype, name="input", attr=PLACED)
        executor = bind_as_it_stands(output, ArraysToBind(ctx, {}, {}, pool=shared))
        array = executor.outputs[0].as_nd_ndarray()
        if nbytes > room:
            array[:] = 0
            self._largest[name, dtype] = executor, nbytes
        return array

    def clear(self) -> None:
        """Let go of it; arrays keep theirs."""
        self._largest.clear()


def view(array: NDArray, shape: tuple[int, ...], dtype: str) -> NDArray | None:
    """The front of ``array`` as one of ``shape`` and ``dtype``; None where that cannot be."""
    nelements = math.prod(shape)
    if array.stype != "default" or np.dtype(array.dtype) != dtype or array.size < nelements:
        return None
    if array.shape == shape:
        return array  # itself: MXNet may compute otherwise from a view
    return array.reshape((-1,))[:nelements].reshape(shape)
