"""A Gluon block and its loss as one Symbol."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError, TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import from_json, shape_is_known
from memplan.mxnet.trace.probe import keeps_state_of_library
from memplan.mxnet.train.arrays.nesting import Specs, leaves
from memplan.mxnet.train.blocks.branches import refuse_untaken_branches
from memplan.mxnet.train.blocks.called_apart import called_apart, marked_apart
from memplan.mxnet.train.blocks.called_with_symbols import (
    INPUT,
    LABEL,
    Composition,
    call_with_symbols,
    trained_blocks,
)
from memplan.mxnet.train.blocks.calls import Ops, inputs_of
from memplan.mxnet.train.blocks.initial_order import (
    Calls,
    as_initialised,
    warn_of_loops,
    warn_of_order,
    warn_of_pause,
)
from memplan.mxnet.train.blocks.moving_statistics import MovingStatistics, moving_statistics
from memplan.mxnet.train.blocks.network_symbol import as_run, declared
from memplan.mxnet.train.blocks.other_modes import refuse_other_modes
from memplan.mxnet.train.blocks.refused_symbols import LOSS_OF_SEVERAL_LABELS
from memplan.mxnet.train.blocks.returned_parameters import refuse_returned_parameters
from memplan.mxnet.train.blocks.scaled_losses import refuse_scaled_losses
from memplan.mxnet.train.blocks.structure import structure_of
from memplan.mxnet.train.blocks.symbols_seen import kept_by, warn_of_symbols
from memplan.mxnet.train.blocks.unread_losses import (
    LossOperator,
    losses_by_output,
    refuse_unread_losses,
)

Parameter = Any

_AS_A_BLOCK = (
    f"; if the loss has parameters, give it as a Block, not as a function (one of several labels, "
    f"which arrive as one argument, by {LOSS_OF_SEVERAL_LABELS})"
)


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
    task: Composition,
    specs: Specs,
    params: Mapping[str, Parameter],
    *,
    known: BlockNetwork | None,
) -> BlockNetwork:
    """The network of a block and its loss, for inputs and labels of these ``specs``.

    ``params`` are theirs, by name. Block and loss are called with Symbols; what MXNet would compute
    otherwise is refused; and what a step needs to know is made of the rest. Where the calls have
    made the network that is ``known``, of equal ``params``, that is returned before.
    Raises TraceError for blocks that take no Symbols, ArgumentError for variables of no ``params``.
    """
    block, composed = task.block, call_with_symbols(task, specs, params)
    group, noted, form = composed.symbol, composed.noted, composed.form
    ops = Ops(group, composed.outputs, noted.calls)
    _refuse_others(block, noted, ops, group, params)
    refuse_untaken_branches(block, ops, composed.nread, params)
    refuse_unread_losses(block, ops, composed.nread, params, keep_outputs=task.keep_outputs)
    reached, by_output = losses_by_output(ops, params) if task.in_halves else ([], ())
    apart, of_any = called_apart(ops, block, params, in_halves=task.in_halves)
    structure = json.dumps([reached, sorted(of_any), ops.as_called(params), structure_of(group)])
    if known is not None and (known.structure, known.form) == (structure, form):
        return replace(known, form=form, user_code=ops.user_code(), drawing=ops.drawing())
    blocks = trained_blocks(block, task.loss)
    warn_of_symbols(blocks, task.loss, composed.asked)
    symbol = as_run(marked_apart(group, apart), ops, params)
    names, inputs = [variable.name for variable in composed.variables], symbol.list_inputs()
    _check_one_call(blocks, inputs)
    _check_known(inputs, {*params, *names}, has_loss=task.loss is not None)
    unread = _unread(noted, params, inputs)
    _warn_of_gradients(block, noted, ops, _parsed(symbol), params)
    warn_of_order(block, noted, group, [*_waiting(inputs, params), *unread], params)
    return BlockNetwork(
        declared(symbol, params, in_halves=task.in_halves),
        dict(zip(names, (spec.shape for spec in leaves(specs)), strict=True)),
        form,
        structure,
        tuple(as_initialised(noted, _in_order(noted, composed.outputs, (*inputs, *unread)))),
        unread,
        by_output,
        ops.user_code(),
        ops.drawing(),
        moving_statistics(block, ops, params, composed.nread),
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
            + _AS_A_BLOCK
            * has_loss
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
