"""The loss of a TrainStep, called once in every step, as a loop of autograd calls it.

What a function of the script's reads, draws or counts is not known. So it is called with variables
that stand for what the block returns, which takes a fraction of a millisecond, and the whole
network is composed anew where it returns something else than before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.realise.step_scope import recorded
from memplan.mxnet.trace.nnvm import output_of
from memplan.mxnet.train.arrays.nesting import alike, as_in, as_inputs, leaves, of_semantics
from memplan.mxnet.train.blocks.block_changes import BlockChanges
from memplan.mxnet.train.blocks.calls import Call, inputs_of, symbols_in
from memplan.mxnet.train.blocks.initial_order import Calls
from memplan.mxnet.train.blocks.other_modes import in_other_mode
from memplan.mxnet.train.blocks.random_order import noting_symbols
from memplan.mxnet.train.blocks.structure import structure_of
from memplan.mxnet.train.blocks.symbols_seen import refusing_rows

Parameter = Any

# Names of the variables that stand for what the block returns.
OUTPUT = "memplan_output"


def _losses_by(loss: Any, outputs: Any, labels: Any) -> Any:
    """What the ``loss``, or a list of them, computes of what the block returns."""
    arguments = () if labels is None else (labels,)
    if not isinstance(loss, list | tuple):
        return loss(outputs, *arguments)
    columns = {"losses": loss, "outputs": tuple(outputs)}
    if arguments:
        columns["labels"] = as_inputs(labels)
    if len(set(map(len, columns.values()))) > 1:
        counts = ", ".join(f"{name}: {len(column)}" for name, column in columns.items())
        raise ArgumentError(f"a list of losses takes one output and one label each, got {counts}")
    return [fn(*pair) for fn, *pair in zip(*columns.values(), strict=True)]


@dataclass
class _Known:
    """What the loss gets for inputs of one kind, and what it computed of that when last called.

    ``outputs`` stand for those ``of_block``.
    """

    of_block: Any
    outputs: Any
    labels: Any
    #: How often MXNet has used each name when the loss is called.
    counts: Mapping[str, int]
    #: The graphs that the block has called.
    graphs: Sequence[Call]
    computed: Any = None


class LossCalls:
    """Calls a ``loss`` once in every step, where ``changes`` says that code of the script's runs.

    That is so in the network that is composed, and else with what stands for the block.
    """

    def __init__(self, loss: Any, changes: BlockChanges) -> None:
        self._loss, self._changes = loss, changes
        #: By kinds of inputs; None where it must be called with what the block returns.
        self._known: dict[Hashable, _Known | None] = {}
        # What the loss computed in this step, if no network was composed of that yet.
        self._called: tuple[Hashable, Any] | None = None

    def are_other(self, kind: Any, is_composed: bool) -> bool:
        """Does the loss, called now, compute something else for inputs of this ``kind``?

        It may where it must be called with what the block returns. It is not called where the
        network ``is_composed`` in this step anyway, and the loss is called for that.
        """
        self._called = None
        if is_composed or kind not in self._known or not self._changes.are_losses_called():
            return False
        known = self._known[kind]
        if known is None:
            return True
        before = known.computed
        known.labels = as_in(kind[0].items[1], known.labels)
        with mx.name.NameManager() as names, self._changes.as_in_graphs(only_losses=True):
            names._counter = dict(known.counts)
            with noting_symbols() as calls:
                losses = recorded(lambda: refusing_rows(lambda: self._call(known)))
        made = symbols_in(losses)
        if made and in_other_mode(calls, mx.sym.Group(made)):
            return True  # which the structure does not show, and is noted where it is called again
        self._called = kind, losses
        return bool(known.computed != before)

    def of_network(self, kind: Hashable) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
        """What returns what the block has, and what calls the loss, for inputs of this ``kind``.

        The block is not to run where it was only the loss that was called in this step: a
        hybridized block of the script's would compute another than its graph. Else the first is
        None.
        """
        known = self._known.get(kind)
        is_called = known is not None and self._called is not None and self._called[0] == kind
        run = (lambda *_: _same(known.of_block)) if known and is_called else None
        return run, functools.partial(self._in_network, kind)

    def _in_network(
        self,
        kind: Hashable,
        params: Mapping[str, Parameter],
        noted: Calls,
        outputs: Any,
        labels: Any,
    ) -> Any:
        """What the loss computes of ``outputs`` of the block, unless it was called in this step.

        It may read ``params``. What it calls is noted.
        """
        called_for, losses = self._called or (None, None)
        self._called = None
        known = self._known.get(kind)
        if known and called_for == kind:  # the block was not called
            noted.calls[:0] = known.graphs
        nnoted = len(noted.calls)
        if called_for != kind:
            # A block that runs in every step may keep what the loss reads.
            if self._changes.are_unseen() or not self._changes.are_losses_called():
                return _losses_by(self._loss, outputs, labels)
            if self._known.get(kind, self) is None:
                return _losses_by(self._loss, outputs, labels)
            try:
                losses = self._call_first(kind, outputs, labels, params, noted.calls)
            except Exception:  # as where it asks a Symbol for more than a variable has
                self._known[kind] = None
                del noted.calls[nnoted:]
                return _losses_by(self._loss, outputs, labels)
        return _put_behind(losses, outputs, params, noted.calls, nnoted)

    def _call_first(
        self,
        kind: Hashable,
        outputs: Any,
        labels: Any,
        params: Mapping[str, Parameter],
        calls: Sequence[Call],
    ) -> Any:
        """What it computes of what stands for ``outputs``; LookupError if of more than that.

        The block has made ``calls`` before.
        """
        counts = dict(mx.name.NameManager._current.value._counter)
        stand_ins = _stand_ins(outputs)
        graphs = [call for call in calls if call.block is not None]
        known = _Known(_same(outputs), stand_ins, _same(labels), counts, graphs)
        self._known[kind] = known
        losses = self._call(known)
        given = {*params, *inputs_of((stand_ins, labels))}
        if not given.issuperset(inputs_of(losses)):
            raise LookupError("the loss reads what the block has kept, and does not return")
        return losses

    def _call(self, known: _Known) -> Any:
        known.computed = None
        # It may write into the lists that it gets.
        losses = _losses_by(self._loss, _same(known.outputs), _same(known.labels))
        symbols = list(leaves(losses))
        if symbols and all(isinstance(symbol, mx.sym.Symbol) for symbol in symbols):
            form = alike(lambda symbol: len(symbol.list_outputs()), losses)
            known.computed = structure_of(_group(symbols)), form
        return losses


def _same(nested: Any) -> Any:
    return alike(lambda symbol: symbol, nested)


def _group(symbols: Sequence[mx.sym.Symbol]) -> mx.sym.Symbol:
    """These as one, which has no other Symbols than legacy ones; itself if it is one."""
    legacy = [symbol.as_nd_ndarray() for symbol in symbols]
    return legacy[0] if len(legacy) == 1 else mx.sym.Group(legacy)


def _stand_ins(outputs: Any) -> Any:
    """Variables for all ``outputs`` of a block, nested as they are; TypeError for no Symbols."""
    count = itertools.count()

    def stand_in(output: Any) -> mx.sym.Symbol:
        if not isinstance(output, mx.sym.Symbol):
            raise TypeError
        places = range(len(output.list_outputs()))
        return of_semantics(_group([mx.sym.Variable(f"{OUTPUT}{next(count)}") for _ in places]))

    return alike(stand_in, outputs)


def _put_behind(
    losses: Any,
    outputs: Any,
    params: Mapping[str, Parameter],
    calls: list[Call],
    nnoted: int,
) -> Any:
    """The ``losses``, computed of ``outputs`` where they are of what stands for these.

    So are the Symbols of the ``calls``, behind the first ``nnoted``, that made them.
    """
    new = calls[nnoted:]
    symbols = [*leaves(losses), *(s for c in new for s in (*(c.inputs or ()), *c.outputs))]
    if not symbols or not all(isinstance(symbol, mx.sym.Symbol) for symbol in symbols):
        return losses
    whole = _group(symbols)
    given = {f"{OUTPUT}{i}": output for i, output in enumerate(_apart(leaves(outputs)))}
    # What the block has a variable for, too, must have but one.
    names = [name for name in whole.list_inputs() if name in params]
    given |= {name: mx.gluon.Parameter.var(params[name]) for name in names}
    whole = whole(**{name: given[name] for name in whole.list_inputs() if name in given})
    parts = _apart([whole])

    def part(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
        return of_semantics(_group([next(parts) for _ in symbol.list_outputs()]))

    losses = alike(part, losses)
    for place, call in enumerate(new, start=nnoted):
        inputs = call.inputs and [part(symbol).as_nd_ndarray() for symbol in call.inputs]
        made = [part(symbol).as_nd_ndarray() for symbol in call.outputs]
        calls[place] = replace(call, inputs=inputs, outputs=made)
    return losses


def _apart(symbols: Iterable[mx.sym.Symbol]) -> Iterator[mx.sym.Symbol]:
    """Their outputs, one by one."""
    for symbol in symbols:
        for place in range(len(symbol.list_outputs())):
            yield output_of(symbol, place)
