"""A Gluon block and its loss as one Symbol."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError, TraceError
from memplan.mxnet.realise.step_scope import recorded
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import from_json, shape_is_known
from memplan.mxnet.trace.probe import keeps_state_of_library
from memplan.mxnet.train.arrays.nesting import Specs, alike, leaves, variables
from memplan.mxnet.train.blocks.called_apart import called_apart, marked_apart
from memplan.mxnet.train.blocks.called_with_symbols import (
    INPUT,
    LABEL,
    as_called,
    check_unwritten,
    grouped,
    losses_and_outputs,
    trained_blocks,
    without_hooks,
)
from memplan.mxnet.train.blocks.calls import Ops, inputs_of
from memplan.mxnet.train.blocks.initial_order import (
    Calls,
    as_initialised,
    noting_calls,
    warn_of_loops,
    warn_of_order,
    warn_of_pause,
)
from memplan.mxnet.train.blocks.kept_by_cells import cells_begin_anew
from memplan.mxnet.train.blocks.moving_statistics import MovingStatistics, moving_statistics
from memplan.mxnet.train.blocks.named_parameters import refuse_read, telling_others_apart
from memplan.mxnet.train.blocks.network_symbol import as_run, blocked, declared
from memplan.mxnet.train.blocks.other_modes import refuse_other_modes
from memplan.mxnet.train.blocks.returned_parameters import refuse_returned_parameters
from memplan.mxnet.train.blocks.scaled_losses import refuse_scaled_losses
from memplan.mxnet.train.blocks.structure import structure_of
from memplan.mxnet.train.blocks.symbols_seen import kept_by, refusing_rows, warn_of_symbols
from memplan.mxnet.train.blocks.unread_losses import (
    LossOperator,
    losses_by_output,
    refuse_unread_losses,
)

Parameter = Any


@dataclass(frozen=True)
class BlockNetwork:
    """A block with its loss as a Symbol.

    ``shapes`` are those of the variables that stand for inputs and labels.
    ``form`` is the nesting of its outputs (the losses, then the kept outputs of the block), with
    the classes of named tuples, which may be others in equal networks.
    ``structure`` is the same for every network of these ops and variables, whatever the ops are
    named. ``inputs`` are the names of its variables, in the order in which MXNet initialises
    parameters: first those of the block. Those that are ``unread``, with their shapes, are among
    them: parameters of which the block computes what nothing uses. ``losses`` are, for every output
    of a step in halves, the loss operators by which MXNet trains where a loss reads the output.
    ``user_code`` are the graphs that have Custom ops (:meth:`Ops.user_code`), ``drawing`` the
    blocks whose graphs draw random numbers; equal networks of other blocks have others.
    ``statistics`` says what moves where that depends on the loss.
    """

    symbol: mx.sym.Symbol
    shapes: Mapping[str, tuple[int, ...]]
    form: Any
    structure: str
    inputs: tuple[str, ...]
    unread: Mapping[str, tuple[int, ...]]
    losses: tuple[frozenset[LossOperator], ...]
    user_code: list[tuple[mx.gluon.Block, list[int]]]
    drawing: list[mx.gluon.Block]
    statistics: MovingStatistics | None


def compose(
    block: mx.gluon.HybridBlock,
    loss: Any,
    specs: Specs,
    params: Mapping[str, Parameter],
    *,
    keep_outputs: bool,
    by_graphs: Callable[..., AbstractContextManager[None]],
    in_halves: bool = False,
    has_been_called: bool = False,
    run: Callable[..., Any] | None = None,
    call_loss: Callable[..., Any] | None = None,
    known: BlockNetwork | None = None,
) -> BlockNetwork:
    """The network of ``block`` and its ``loss``, for inputs and labels of these ``specs``.

    ``params`` are theirs, by name. Where the block ``has_been_called``, its ``__call__``, which may
    be one of the user's, has made these inputs of others, and is not to run again.
    ``by_graphs`` is around the run: within, hybridized blocks compute what their graphs do.
    With ``keep_outputs`` the block's outputs are outputs, too.
    ``in_halves`` says that a step runs in halves, between which the caller computes the loss.
    ``run`` returns what the block does, where it is not to run. ``call_loss`` returns what the loss
    does, of ``params``, what is noted of calls, the block's outputs and the labels.
    If it is the network that is ``known``, of equal ``params``, that is returned.
    Raises TraceError for blocks that take no Symbols, ArgumentError for variables of no ``params``.
    """
    inputs, labels = map(variables, specs.items, (INPUT, LABEL))
    given, blocks, asked = list(leaves((inputs, labels))), trained_blocks(block, loss), list[str]()
    # Blocks may ask which mode they are in, as DropBlock and SSD do: it is that of a training loop.
    # Names that MXNet counts begin anew, for those of equal networks to be equal.
    with (
        mx.name.NameManager(),
        without_hooks(block),
        cells_begin_anew(block),
        telling_others_apart(blocks, params) as others,
        noting_calls(params) as noted,
        by_graphs(blocks, params, noted.of_graph),
    ):
        run = run or (as_called(block, inputs, noted) if has_been_called else block)
        losses_of = functools.partial(call_loss, params, noted) if call_loss else None
        composed = functools.partial(
            losses_and_outputs, block, run, loss, losses_of, inputs, labels, asked
        )
        losses, outputs = recorded(lambda: refusing_rows(composed, asked))
    if has_been_called and not block._active:
        check_unwritten(block, given, list(leaves((inputs, labels))))
    nested = losses, alike(blocked, outputs) if keep_outputs else None
    group = grouped(block, loss, *nested)
    refuse_read(others, group)
    form = alike(lambda symbol: len(symbol.list_outputs()), nested)
    ops = Ops(group, outputs, noted.calls)
    _refuse_others(block, noted, ops, group, params)
    refuse_unread_losses(block, ops, sum(leaves(form[0])), params, keep_outputs=keep_outputs)
    reached, by_output = losses_by_output(ops, params) if in_halves else ([], ())
    apart, of_any = called_apart(ops, block, params, in_halves=in_halves)
    structure = json.dumps([reached, sorted(of_any), ops.as_called(params), structure_of(group)])
    if known is not None and (known.structure, known.form) == (structure, form):
        return replace(known, form=form, user_code=ops.user_code(), drawing=ops.drawing())
    warn_of_symbols(blocks, loss, asked)
    symbol = as_run(marked_apart(group, apart), ops, params)
    names, inputs = [variable.name for variable in given], symbol.list_inputs()
    _check_one_call(blocks, inputs)
    _check_known(inputs, {*params, *names}, has_loss=loss is not None)
    unread = _unread(noted, params, inputs)
    _warn_of_gradients(block, noted, ops, _parsed(symbol), params)
    warn_of_order(block, noted, group, [*_waiting(inputs, params), *unread], params)
    return BlockNetwork(
        declared(symbol, params, in_halves=in_halves),
        dict(zip(names, (spec.shape for spec in leaves(specs)), strict=True)),
        form,
        structure,
        tuple(as_initialised(noted, _in_order(noted, outputs, (*inputs, *unread)))),
        unread,
        by_output,
        ops.user_code(),
        ops.drawing(),
        moving_statistics(block, ops, params, sum(leaves(form[0]))),
    )


def _refuse_others(
    block: Any, noted: Calls, ops: Ops, group: mx.sym.Symbol, params: Mapping[str, Parameter]
) -> None:
    """Refuse a ``block`` of which a step would compute something else than MXNet does."""
    refuse_returned_parameters(ops, params)
    refuse_scaled_losses(block, ops, params)
    refuse_other_modes(block, noted.calls, group)


def _warn_of_gradients(
    block: Any, noted: Calls, ops: Ops, graph: Mapping[str, Any], params: Mapping[str, Parameter]
) -> None:
    """Warn of gradients that a step computes otherwise than a ``block`` that gets arrays."""
    warn_of_loops(block, ops)
    warn_of_pause(block, noted, graph, [n for n, p in params.items() if p.grad_req != "null"])


def _parsed(symbol: mx.sym.Symbol) -> Mapping[str, Any]:
    """The graph of ``symbol``; TraceError for an operator of a library that has a state.

    MXNet makes the state anew for every call of a block, and the executor of a step keeps it.
    """
    graph = symbol_json.parse(symbol)
    for node in from_json(graph)[0]:
        if keeps_state_of_library(node):
            raise TraceError(
                f"op {node.name!r} ({node.op}) has a state of its library, which MXNet makes anew "
                f"for every call of a block, and a planned step keeps; train the block without a "
                f"plan, or its Symbol in a memplan.mxnet.Module"
            )
    return graph


def _check_known(inputs: Sequence[str], available: Collection[str], *, has_loss: bool) -> None:
    """ArgumentError where the network reads anything else than what is ``available``."""
    unknown = [name for name in inputs if name not in available]
    if unknown:
        raise ArgumentError(
            f"the network reads {', '.join(map(repr, unknown[:8]))}, no parameter of the "
            f"block{' or the loss' if has_loss else ''}; register the blocks that it calls, by "
            f"register_child() or as its attributes: those in a list, tuple or dict are not"
            + ("; if the loss has parameters, give it as a Block, not as a function" * has_loss)
        )


def _check_one_call(blocks: Sequence[Any], inputs: Sequence[str]) -> None:
    """TraceError where a network of these ``inputs`` has some of an earlier call of ``blocks``.

    These are other variables of the same names.
    """
    given = [name for name in inputs if name.startswith((INPUT, LABEL))]
    if len(given) != len({*given}):
        kept = ", ".join(kept_by(blocks))
        raise TraceError(
            f"block {blocks[0].name!r}, or its loss, returns or reads what an earlier call has "
            f"computed, as in a list that grows from call to call, and a planned step has that no "
            f"more; empty it where hybrid_forward, or the loss, begins, or hand it on as an input"
            f"{f' (what is computed is kept in {kept})' if kept else ''}"
        )


def _outputs(noted: Calls) -> list[mx.sym.Symbol]:
    """What all operators and graphs have computed that were called."""
    return [output for call in noted.calls for output in call.outputs]


def _in_order(noted: Calls, outputs: Any, names: Collection[str]) -> list[str]:
    """These ``names`` in the order of graphs that were called, and of the block's ``outputs``."""
    ordered = dict.fromkeys((*inputs_of(_outputs(noted)), *inputs_of(outputs), *names))
    return [name for name in ordered if name in names]


def _unread(
    noted: Calls, params: Mapping[str, Parameter], inputs: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Shapes of those of ``params`` that calls have read, but not the network of these ``inputs``.

    MXNet initialises them where it calls what reads them, whether or not the result is used.
    """
    names = {*_waiting(noted, params)}.difference(inputs)
    if not names:
        return {}
    whole = declared(mx.sym.Group(_outputs(noted)), params, in_halves=False)
    arguments, _, states = whole.infer_shape_partial()
    pairs = [*zip(whole.list_arguments(), arguments, strict=True)]
    pairs += zip(whole.list_auxiliary_states(), states, strict=True)
    return {n: tuple(shape) for n, shape in pairs if n in names and shape_is_known(shape)}


def _waiting(names: Iterable[str], params: Mapping[str, Parameter]) -> Iterator[str]:
    """Those of ``names`` whose parameters are."""
    return (name for name in names if name in params and _is_waiting(params[name]))


def _is_waiting(parameter: Parameter) -> bool:
    """Is it to be initialised where its shape is known?"""
    return bool(parameter._deferred_init)
