"""MXNet's graphs that keep the arrays with which they ran, beside plans that give others.

A graph of ``hybridize(static_alloc=True, static_shape=True)`` writes gradients where its first
``backward`` wrote them: in place of an array that it gets later it takes the one that it has
(``StaticBackward`` in src/imperative/cached_op.cc). A plan gives the parameters other arrays for
their gradients, into which such a graph of theirs would write none. So it is made anew before it
is recorded with those. Weights and statistics, which it does look at, stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.array_memory import memory_of

Block = Any
Parameter = Any

#: The parameters to which plans were bound: others are left to MXNet.
_PLANNED: WeakKeyDictionary[Parameter, None] = WeakKeyDictionary()

#: What ran the graph of each block when it was recorded last, and where gradients were then.
_MET: WeakKeyDictionary[Block, list[Any]] = WeakKeyDictionary()


def renew_graphs_of(parameters: Iterable[Parameter]) -> None:
    """From now on static graphs of these ``parameters`` write into the gradients that they have."""
    _PLANNED.update(dict.fromkeys(parameters))
    _wrap()


@functools.cache
def _wrap() -> None:
    wrap(mx.gluon.HybridBlock, "_call_cached_op", _renewing)


def _renewing(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def renewing(block: Block, *args: Any) -> Any:
        if autograd.is_recording() and ("static_shape", True) in block._flags:
            _renew_if_moved(block)
        return call(block, *args)

    return renewing


def _renew_if_moved(block: Block) -> None:
    parameters = [p for is_input, p in block._cached_op_args if not is_input]
    if block._cached_op is None or not any(p in _PLANNED for p in parameters):
        return
    arrays = (a for p in parameters for a in p._grad or (None,))
    # An address is not that of another array later, for the graph has what it has written into.
    now = [None if array is None else memory_of(array) for array in arrays]
    if [block._cached_op.handle, *now] != _MET.get(block):
        _renew(block)
        _MET[block] = [block._cached_op.handle, *now]


def _renew(block: Block) -> None:
    """Make what runs the graph of ``block`` anew, as MXNet's ``_build_cache`` does at its end.

    The graph itself stays, and the list of what it is called with, by which steps know it.
    """
    inputs = [is_input for is_input, _ in block._cached_op_args]
    places = {
        "data_indices": [i for i, is_input in enumerate(inputs) if is_input],
        "param_indices": [i for i, is_input in enumerate(inputs) if not is_input],
    }
    graph = block._cached_graph[1]
    block._cached_op = mx.nd.CachedOp(graph, [*places.items(), *block._flags])
