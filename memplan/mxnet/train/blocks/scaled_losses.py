"""Losses whose gradients AMP multiplies by the loss scale where MXNet calls them with arrays.

In a graph it does not: the scale changes from step to step, and what is in a graph has one for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.train.blocks.calls import Call, Ops, symbols_in
from memplan.mxnet.train.blocks.composing_thread import called_in_it
from memplan.mxnet.train.blocks.hybridized import call_hybridize

# AMP's LOSS_OUTPUT_FUNCTIONS (contrib/amp/lists, tag 1.9.1). It wraps the functions of these names,
# and not those of other names for the same operators, as Softmax.
_SCALED = (
    "SoftmaxOutput",
    "LinearRegressionOutput",
    "LogisticRegressionOutput",
    "MAERegressionOutput",
)


@contextmanager
def noting_scaled_losses(calls: list[Call]) -> Iterator[None]:
    """Within, what AMP would scale if it got arrays is one more of ``calls``, marked as such."""
    amp = sys.modules.get("mxnet.contrib.amp.amp")  # a script that uses it has imported it
    is_used = getattr(amp, "_amp_initialized", False)
    usual = {name: getattr(mx.sym, name) for name in _SCALED if is_used}
    for name, function in usual.items():
        setattr(mx.sym, name, called_in_it(_noting(function, calls), function))
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(mx.sym, name, function)


def refuse_scaled_losses(block: Any, ops: Ops, params: Mapping[str, Any]) -> None:
    """TraceError where a marked one in the network of ``block`` trains any of ``params``.

    One in a graph of MXNet's is no call by itself, and AMP does not scale it.
    """
    marked = [place for place in ops.scaled if place < ops.nknown]  # the others are not used
    training = ops.carrying(params) if marked else ()
    loss = next((place for place in marked if place in training), None)
    if loss is not None:
        node = ops.nodes[loss]
        raise TraceError(
            f"op {node['name']!r} ({node['op']}) in the step of block {block.name!r} gets "
            f"arrays without a plan, and AMP multiplies its gradient by the loss scale then; a "
            f"planned step is a graph, where AMP does not; {call_hybridize(block)}, with which "
            f"MXNet does not either, or return what the loss is computed of, and take a loss of "
            f"gluon.loss"
        )


def _noting(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def call_and_note(*args: Any, **options: Any) -> Any:
        made = function(*args, **options)
        calls.append(Call(None, symbols_in(made), is_scaled=True))
        return made

    return call_and_note
