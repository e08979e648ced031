"""A Gluon block and its loss, called with Symbols in the place of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mxnet as mx

from memplan.errors import ArgumentError, MemplanError, TraceError
from memplan.mxnet.realise.step_scope import recorded
from memplan.mxnet.train.arrays.nesting import Specs, alike, as_inputs, leaves, variables
from memplan.mxnet.train.blocks.block_changes import losses_in
from memplan.mxnet.train.blocks.cached_graphs import has_graph, outputs_of_graph
from memplan.mxnet.train.blocks.composing_thread import Hooks
from memplan.mxnet.train.blocks.initial_order import Calls, noting_calls
from memplan.mxnet.train.blocks.kept_by_cells import cells_begin_anew
from memplan.mxnet.train.blocks.named_parameters import (
    give_variables,
    refuse_read,
    telling_others_apart,
)
from memplan.mxnet.train.blocks.network_symbol import blocked
from memplan.mxnet.train.blocks.refused_symbols import (
    cannot_take_symbols,
    is_scripts_own,
    warn_of_own_error,
)
from memplan.mxnet.train.blocks.symbols_seen import refusing_rows
from memplan.util.numbers import shown

# Names of the variables that stand for inputs and labels; parameters have others.
INPUT, LABEL = "memplan_input", "memplan_label"

Parameter = Any


@dataclass(frozen=True)
class Composition:
    """Which network is composed, and how: by calls of ``block`` and its ``loss`` with Symbols.

    ``by_graphs`` is around the calls: within, hybridized blocks compute what their graphs do.
    With ``keep_outputs`` the block's outputs are outputs of the network, too.
    ``in_halves`` says that a step runs in halves, between which the caller computes the loss.
    Where the block ``has_been_called``, its ``__call__``, which may be one of the user's, has made
    these inputs of others, and is not to run again.
    ``run`` returns what the block does, where it is not to run. ``call_loss`` returns what the loss
    does, of the parameters, what is noted of calls, the block's outputs and the labels.
    """

    block: mx.gluon.HybridBlock
    loss: Any
    by_graphs: Callable[..., AbstractContextManager[None]]
    keep_outputs: bool
    in_halves: bool
    has_been_called: bool
    run: Callable[..., Any] | None
    call_loss: Callable[..., Any]


@dataclass(frozen=True)
class Composed:
    """What the calls have given: one Symbol of the losses and the kept outputs.

    ``form`` is their nesting, ``outputs`` are those of the block, and ``variables`` stand for
    inputs and labels. ``noted`` is what was called, and ``asked`` where code of the script's has
    asked Symbols for what arrays have.
    """

    symbol: mx.sym.Symbol
    form: Any
    outputs: Any
    variables: list[mx.sym.Symbol]
    noted: Calls
    asked: list[str]

    @property
    def nread(self) -> int:
        """How many of the network's outputs, the first ones, are losses or are read by them."""
        return sum(leaves(self.form[0]))


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
    losses = losses_in(loss)
    if not all(map(callable, losses)) or (isinstance(loss, list | tuple) and not loss):
        raise ArgumentError(f"loss must be a function, a list of them, or None; got {shown(loss)}")
    return [block, *(fn for fn in losses if isinstance(fn, mx.gluon.Block))]


def call_with_symbols(task: Composition, specs: Specs, params: Mapping[str, Parameter]) -> Composed:
    """Call block and loss with Symbols for inputs and labels of these ``specs``."""
    block, loss, asked = task.block, task.loss, list[str]()
    inputs, labels = map(variables, specs.items, (INPUT, LABEL))
    given, blocks = list(leaves((inputs, labels))), trained_blocks(block, loss)
    give_variables(params.values())
    # Blocks may ask which mode they are in, as DropBlock and SSD do: it is that of a training loop.
    # Names that MXNet counts begin anew, for those of equal networks to be equal.
    with (
        mx.name.NameManager(),
        _without_hooks(block),
        cells_begin_anew(block),
        telling_others_apart(blocks, params) as others,
        noting_calls(params) as noted,
        task.by_graphs(blocks, params, noted.of_graph),
    ):
        run = task.run or (_as_called(block, inputs, noted) if task.has_been_called else block)
        call_loss = functools.partial(task.call_loss, params, noted)
        call = functools.partial(_losses_and_outputs, task, run, call_loss, inputs, labels, asked)
        losses, outputs = recorded(lambda: refusing_rows(call, asked))
    if task.has_been_called and not block._active:
        _check_unwritten(block, given, list(leaves((inputs, labels))))
    nested = losses, alike(blocked, outputs) if task.keep_outputs else None
    group = _grouped(block, loss, *nested)
    refuse_read(others, group)
    form = alike(lambda symbol: len(symbol.list_outputs()), nested)
    return Composed(group, form, outputs, given, noted, asked)


def _losses_and_outputs(
    task: Composition,
    run: Callable[..., Any],
    call_loss: Callable[..., Any],
    inputs: Any,
    labels: Any,
    asked: Collection[str],
) -> tuple[Any, Any]:
    """Losses and outputs of the block as Symbols, which ``run`` and ``call_loss`` compute.

    Errors of the script's own classes are raised as they are, unless code of the script's has
    ``asked`` Symbols for what arrays have.
    """
    block = task.block
    culprit: Any = block
    try:
        if task.loss is None:
            outputs = run(*inputs, *([] if labels is None else as_inputs(labels)))
            return outputs, outputs
        outputs = run(*inputs)
        culprit = task.loss
        return call_loss(outputs, labels), outputs
    except MemplanError:
        raise
    except Exception as error:  # the user's code raises whatever it likes
        if is_scripts_own(error) and not asked:
            warn_of_own_error(block, error)
            raise
        are_arrays = run is block and all(isinstance(each, mx.sym.Symbol) for each in inputs)
        ninputs = len(inputs) if are_arrays else 1
        is_loss = culprit is not block
        are_of_one = isinstance(labels, list | tuple) and not isinstance(task.loss, list | tuple)
        nlabels = len(labels) if are_of_one else int(labels is not None)
        raise cannot_take_symbols(
            culprit,
            error,
            is_loss=is_loss,
            ninputs=ninputs,
            nlabels=nlabels,
            has_loss=task.loss is not None,
        ) from error


def _grouped(block: Any, loss: Any, losses: Any, outputs: Any) -> mx.sym.Symbol:
    """The Symbol of all ``losses`` and kept ``outputs``; TraceError unless these are some."""
    symbols = list(leaves((losses, outputs)))
    if not symbols or not all(isinstance(symbol, mx.sym.Symbol) for symbol in symbols):
        what = f"what {block.name!r} returns" if loss is None else f"the loss of {block.name!r}"
        raise TraceError(f"{what} must be Symbols, one or a tuple or list, got {losses!r}")
    return mx.sym.Group(symbols)


def _check_unwritten(block: Any, given: Sequence[Any], now: Sequence[Any]) -> None:
    """TraceError where the block has written into a list that it got: the caller's stays as it was.

    So it does where MXNet runs a graph of the block.
    """
    if len(given) != len(now) or any(a is not b for a, b in zip(given, now, strict=True)):
        raise TraceError(
            f"block {block.name!r} writes into a list that is one of its inputs, and a planned "
            f"step leaves the caller's list as it was; copy it first, in hybrid_forward "
            f"(states = list(states)), or call hybridize(), after which MXNet leaves it, too"
        )


def _as_called(block: mx.gluon.HybridBlock, inputs: Any, noted: Calls) -> Callable[..., Any]:
    """What the ``__call__`` of ``block`` calls: its graph, if MXNet has one, which is ``noted``."""
    if has_graph(block, inputs):
        compute = functools.partial(outputs_of_graph, block)
        return functools.partial(noted.of_graph, block, compute)
    return cast(Callable[..., Any], block.forward)


@contextmanager
def _without_hooks(block: mx.gluon.HybridBlock) -> Iterator[None]:
    """Within, this thread calls no hooks of ``block``: they see arrays, as with hybridize()."""
    hooks = block._forward_pre_hooks, block._forward_hooks
    try:
        block._forward_pre_hooks, block._forward_hooks = map(Hooks, hooks)
        yield
    finally:
        block._forward_pre_hooks, block._forward_hooks = hooks
