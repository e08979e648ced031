"""A Gluon block and its loss, called with Symbols in the place of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mxnet as mx

from memplan.errors import ArgumentError, MemplanError, TraceError
from memplan.mxnet.train.arrays.nesting import as_inputs, leaves
from memplan.mxnet.train.blocks.cached_graphs import has_graph, outputs_of_graph
from memplan.mxnet.train.blocks.composing_thread import Hooks
from memplan.mxnet.train.blocks.initial_order import Calls
from memplan.mxnet.train.blocks.loss_calls import losses_by
from memplan.mxnet.train.blocks.refused_symbols import (
    cannot_take_symbols,
    is_scripts_own,
    warn_of_own_error,
)
from memplan.util.numbers import shown

# Names of the variables that stand for inputs and labels; parameters have others.
INPUT, LABEL = "memplan_input", "memplan_label"


def check_block(block: Any) -> None:
    """ArgumentError for what is no HybridBlock."""
    if not isinstance(block, mx.gluon.HybridBlock):
        raise ArgumentError(
            f"block must be a HybridBlock, for memplan needs its Symbol; got "
            f"{type(block).__name__}. Derive it from HybridBlock (HybridSequential for "
            f"Sequential), with hybrid_forward for forward"
        )


def trained_blocks(block: Any, loss: Any) -> list[mx.gluon.Block]:
    """``block`` and the losses that are blocks; ArgumentError for what cannot be trained."""
    check_block(block)
    losses = loss if isinstance(loss, list | tuple) else [] if loss is None else [loss]
    if not all(map(callable, losses)) or (isinstance(loss, list | tuple) and not loss):
        raise ArgumentError(f"loss must be a function, a list of them, or None; got {shown(loss)}")
    return [block, *(fn for fn in losses if isinstance(fn, mx.gluon.Block))]


def losses_and_outputs(
    block: mx.gluon.HybridBlock,
    run: Callable[..., Any],
    loss: Any,
    losses_of: Callable[..., Any] | None,
    inputs: Any,
    labels: Any,
    asked: Collection[str],
) -> tuple[Any, Any]:
    """Losses and outputs of the block as Symbols, which ``run`` and ``losses_of`` compute.

    Errors of the script's own classes are raised as they are, unless code of the script's has
    ``asked`` Symbols for what arrays have.
    """
    culprit: Any = block
    try:
        if loss is None:
            outputs = run(*inputs, *([] if labels is None else as_inputs(labels)))
            return outputs, outputs
        outputs = run(*inputs)
        culprit = loss
        losses_of = losses_of or functools.partial(losses_by, loss)
        return losses_of(outputs, labels), outputs
    except MemplanError:
        raise
    except Exception as error:  # the user's code raises whatever it likes
        if is_scripts_own(error) and not asked:
            warn_of_own_error(block, error)
            raise
        are_arrays = run is block and all(isinstance(each, mx.sym.Symbol) for each in inputs)
        ninputs = len(inputs) if are_arrays else 1
        is_loss = culprit is not block
        raise cannot_take_symbols(culprit, error, is_loss=is_loss, ninputs=ninputs) from error


def grouped(block: Any, loss: Any, losses: Any, outputs: Any) -> mx.sym.Symbol:
    """The Symbol of all ``losses`` and kept ``outputs``; TraceError unless these are some."""
    symbols = list(leaves((losses, outputs)))
    if not symbols or not all(isinstance(symbol, mx.sym.Symbol) for symbol in symbols):
        what = f"what {block.name!r} returns" if loss is None else f"the loss of {block.name!r}"
        raise TraceError(f"{what} must be Symbols, one or a tuple or list, got {losses!r}")
    return mx.sym.Group(symbols)


def check_unwritten(block: Any, given: Sequence[Any], now: Sequence[Any]) -> None:
    """TraceError where the block has written into a list that it got: the caller's stays as it was.

    So it does where MXNet runs a graph of the block.
    """
    if len(given) != len(now) or any(a is not b for a, b in zip(given, now, strict=True)):
        raise TraceError(
            f"block {block.name!r} writes into a list that is one of its inputs, and a planned "
            f"step leaves the caller's list as it was; copy it first, in hybrid_forward "
            f"(states = list(states)), or call hybridize(), after which MXNet leaves it, too"
        )


def as_called(block: mx.gluon.HybridBlock, inputs: Any, noted: Calls) -> Callable[..., Any]:
    """What the ``__call__`` of ``block`` calls: its graph, if MXNet has one, which is ``noted``."""
    if has_graph(block, inputs):
        compute = functools.partial(outputs_of_graph, block)
        return functools.partial(noted.of_graph, block, compute)
    return cast(Callable[..., Any], block.forward)


@contextmanager
def without_hooks(block: mx.gluon.HybridBlock) -> Iterator[None]:
    """Within, this thread calls no hooks of ``block``: they see arrays, as with hybridize()."""
    hooks = block._forward_pre_hooks, block._forward_hooks
    try:
        block._forward_pre_hooks, block._forward_hooks = map(Hooks, hooks)
        yield
    finally:
        block._forward_pre_hooks, block._forward_hooks = hooks
