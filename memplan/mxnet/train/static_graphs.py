"""MXNet's graphs that keep the arrays with which they ran, beside plans that give others.

A graph of ``hybridize(static_alloc=True, static_shape=True)`` writes gradients where its first
``backward`` wrote them: in place of an array that it gets later it takes the one that it has
(``StaticBackward`` in src/imperative/cached_op.cc). A plan gives the parameters other arrays for
their gradients, into which such a graph of theirs would write none. So before it is recorded it is
made anew, without static arrays. Weights and statistics stay where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.realise.wrapped_functions import wrap

Block = Any
Parameter = Any

#: The parameters to which plans were bound: others are left to MXNet.
_PLANNED: WeakKeyDictionary[Parameter, None] = WeakKeyDictionary()

# Neither of the first two is kept: with static_alloc alone some gradients of MXNet's are wrong
# (docs/limits.md, Bits). Without it MXNet would run what has few operators one by one, and backward
# would not go through all of it.
_OTHERS = {"static_alloc": False, "static_shape": False, "inline_limit": 0}


class _Renewed(mx.nd.CachedOp):  # type: ignore[misc]
    """What runs a graph, made here."""

    __slots__ = ()


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
        is_made = block._cached_op is not None and not isinstance(block._cached_op, _Renewed)
        if is_made and autograd.is_recording() and ("static_shape", True) in block._flags:
            _renew_if_planned(block)
        return call(block, *args)

    return renewing


def _renew_if_planned(block: Block) -> None:
    """Make what runs the graph of ``block`` anew, as MXNet's ``_build_cache`` does at its end.

    The graph itself stays, and the list of what it is called with, by which steps know it.
    """
    if not any(not is_input and p in _PLANNED for is_input, p in block._cached_op_args):
        return
    inputs = [is_input for is_input, _ in block._cached_op_args]
    places = {
        "data_indices": [i for i, is_input in enumerate(inputs) if is_input],
        "param_indices": [i for i, is_input in enumerate(inputs) if not is_input],
    }
    flags = dict(block._flags) | _OTHERS
    block._cached_op = _Renewed(block._cached_graph[1], [*places.items(), *flags.items()])
