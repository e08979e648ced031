"""Losses whose gradients AMP multiplies by the loss scale where MXNet calls them with arrays.

In a graph it does not: the scale changes from step to step, and what is in a graph has one for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.train.composing_thread import called_in_it
from memplan.mxnet.train.random_order import Call, symbols_in

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


def refuse_scaled_losses(block: Any, calls: Sequence[Call], symbol: mx.sym.Symbol) -> None:
    """TraceError where ``symbol``, made by ``calls`` of ``block`` and its loss, has a marked one.

    One in a graph of MXNet's is no call by itself, and AMP does not scale it.
    """
    losses = [call.outputs[0] for call in calls if call.is_scaled]
    if not losses:
        return
    graph = symbol_json.parse(mx.sym.Group([symbol, *losses]))
    # The ops of the symbol that comes first are the first ones; the others compute what is unused.
    noutputs, nnodes = len(symbol.list_outputs()), len(symbol_json.parse(symbol)["nodes"])
    loss = next((k for k, *_ in graph["heads"][noutputs:] if k < nnodes), None)
    if loss is not None:
        node = graph["nodes"][loss]
        raise TraceError(
            f"op {node['name']!r} ({node['op']}) in the step of block {block.name!r} gets "
            f"arrays without a plan, and AMP multiplies its gradient by the loss scale then; a "
            f"planned step is a graph, where AMP does not. Call hybridize(), with which MXNet "
            f"does not either, or return what the loss is computed of, and take a loss of "
            f"gluon.loss"
        )


def _noting(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def call_and_note(*args: Any, **options: Any) -> Any:
        made = function(*args, **options)
        calls.append(Call(None, symbols_in(made), is_scaled=True))
        return made

    return call_and_note
