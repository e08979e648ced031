"""Shows a monitor what a planned step writes, as MXNet's executors show what theirs do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, NDArrayHandle, check_call

from memplan.errors import UsageError
from memplan.mxnet.realise.bind import READER
from memplan.mxnet.realise.explicit import step_nodes
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.placed_arrays import wait_to_write
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.nnvm import Node, to_symbol
from memplan.step.schedule import Schedule

NDArray = Any

# A node of the step, and the arrays of its outputs; None where autograd leaves out a gradient that
# nobody reads.
Step = tuple[Node, Sequence[NDArray | None]]


# MXNet, which names the outputs of all others, has lost the attributes of this one.
_OF_USER_CODE = "_backward_Custom"


def check_monitor(monitor_all: bool) -> None:
    """UsageError for a monitor that packed steps cannot serve."""
    if monitor_all:
        raise UsageError(
            "a step in packed memory shows the outputs of its ops, not their inputs: leave "
            "monitor_all out, or use realisation='explicit' meanwhile"
        )


class Monitor:
    """Calls ``callback`` with the name and the handle of every output that a step has written."""

    def __init__(self, callback: Callable[..., Any], steps: Sequence[Step]) -> None:
        self._callback = callback
        named = [(node, len(arrays)) for node, arrays in steps if node.op != _OF_USER_CODE]
        entries = [(node, k) for node, noutputs in named for k in range(noutputs)]
        names = iter(to_symbol(entries).list_outputs())
        self._outputs = [
            [
                ((_name(node, k) if node.op == _OF_USER_CODE else next(names)).encode(), array)
                for k, array in enumerate(arrays)
            ]
            for node, arrays in steps
        ]

    def show(self, step: int) -> None:
        """Show what ``step``, which has run, has written."""
        for name, array in self._outputs[step]:
            if array is None:
                continue
            handle = NDArrayHandle()
            # The callback frees the handle that it gets.
            check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
            self._callback(name, handle)
            # What the callback asks for reads the array before anything overwrites its memory,
            # which MXNet's engine would not see to.
            wait_to_write(array)


def _name(node: Node, k: int) -> str:
    """The name that MXNet's executors show for an output of an op that names none itself."""
    return f"{node.name}_output" if node.noutputs == 1 else f"{node.name}_output{k}"


def without_copies(
    callback: Callable[..., Any], trace: Trace, schedule: Schedule
) -> Callable[..., Any]:
    """``callback`` but for the ops that a plan adds: it is called as without a plan."""
    names = {node.name for node in trace.nodes}
    steps = step_nodes(lower(trace, schedule))
    return _without(callback, tuple(f"{node.name}_" for node in steps if node.name not in names))


def without_readers(callback: Callable[..., Any]) -> Callable[..., Any]:
    """``callback`` but for the ops that inference has beside those of the network."""
    return _without(callback, (READER,))


def _without(callback: Callable[..., Any], extra: tuple[str, ...]) -> Callable[..., Any]:
    """``callback`` but for arrays whose names begin with one of ``extra``."""

    def call(name: bytes, handle: Any) -> None:
        if extra and name.decode().startswith(extra):
            mx.nd.NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)
        else:
            callback(name, handle)

    return call
