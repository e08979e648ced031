"""What was called while a network was composed, and which of its ops MXNet runs in graphs.

Names do not tell: all calls of a layer have its name, and a layer need not have that of the block
that it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.losses import has_gradient, is_loss
from memplan.mxnet.trace.nnvm import VARIABLE, from_json
from memplan.mxnet.trace.operators import CUSTOM
from memplan.mxnet.train.nesting import alike, leaves, of_semantics

Symbols = list[mx.sym.Symbol]
Block = Any

Head = TypeVar("Head")

# MXNet runs a graph of so many operators one by one, unless it is told otherwise.
_INLINED = 2


@dataclass(frozen=True)
class Call:
    """Of an operator, or of the graph of ``block``: the Symbols that it got, and that it made.

    ``is_scaled`` marks a loss whose gradient AMP scales where it gets arrays. ``is_recorded`` and
    ``in_training`` say in which mode autograd is when it is called. So many of the outputs are
    ``copied`` inputs, where the graph has the inputs themselves.
    """

    inputs: Symbols | None
    outputs: Symbols
    is_scaled: bool = False
    block: Block = None
    is_recorded: bool = field(default_factory=autograd.is_recording)
    in_training: bool = field(default_factory=autograd.is_training)
    copied: int = 0


def symbols_in(nested: Any) -> Symbols:
    """Those in ``nested``, as legacy ones: a group has no others beside them."""
    found = (leaf for leaf in leaves(nested) if isinstance(leaf, mx.sym.Symbol))
    return [symbol.as_nd_ndarray() for symbol in found]


def with_copies(outputs: Any, inputs: Symbols) -> tuple[Any, int]:
    """The ``outputs`` of a graph with loss operators, with copies of what it got; how many.

    A loss that reads such an output has MXNet differentiate the graph, and one that reads what the
    graph got does not: they are two arrays.
    """
    given = {name for symbol in inputs for name in symbol.list_outputs()}

    def is_given(symbol: mx.sym.Symbol) -> bool:
        return symbol.get_children() is None or not given.isdisjoint(symbol.list_outputs())

    made = symbols_in(outputs)
    passed = sum(map(is_given, made))
    if not passed or not any(map(is_loss, from_json(symbol_json.parse(mx.sym.Group(made)))[0])):
        return outputs, 0

    def copied(value: Any) -> Any:
        if not (isinstance(value, mx.sym.Symbol) and is_given(value)):
            return value
        return of_semantics(mx.sym.identity(value.as_nd_ndarray()))

    return alike(copied, outputs), passed


def next_heads(heads: Iterator[Head], symbols: Symbols) -> list[Head]:
    """The next ``heads`` of a graph, as many as ``symbols`` have."""
    return [next(heads) for symbol in symbols for _ in symbol.list_outputs()]


def _places(heads: Iterable[tuple[int, int]]) -> list[int]:
    return [place for place, _ in heads]


def order_between(nodes: Sequence[Any], outputs: Sequence[int], inputs: Sequence[int]) -> list[int]:
    """The nodes between ``inputs`` and ``outputs``, in the order of MXNet's graph of these."""
    order: list[int] = []
    seen = set(inputs)
    waiting = [(place, False) for place in reversed(outputs)]
    while waiting:
        place, has_inputs = waiting.pop()
        if has_inputs:
            order.append(place)
        elif place not in seen:
            seen.add(place)
            waiting.append((place, True))
            waiting += [(source, False) for source, *_ in reversed(nodes[place]["inputs"])]
    return order


def is_run_whole(block: Block, noperators: int) -> bool:
    """Does MXNet run a graph of ``block``, which has so many operators, as one?"""
    flags = dict(block._flags)
    return bool(flags.get("static_alloc")) or noperators > int(flags.get("inline_limit", _INLINED))


class Ops:
    """The ops of the network ``symbol``, and those beside it that ``calls`` have made.

    They are ``nodes`` of one graph in JSON, in which those of the symbol come first, ``nknown`` of
    them, in its order. ``heads`` are the places of what computes its outputs, and ``returned`` of
    what computes ``outputs`` of a block. ``graphs`` are the ops of each graph that MXNet runs as
    one, ``blocks`` whose these are, and ``graph_of`` says in which of them an op is. ``scaled`` are
    the places of the calls that are marked so.
    """

    def __init__(self, symbol: mx.sym.Symbol, outputs: Any, calls: Sequence[Call]) -> None:
        made, called = symbols_in(outputs), [c for c in calls if c.block is not None]
        scaled = [call.outputs[0] for call in calls if call.is_scaled]
        parts = [s for call in called for s in (*(call.inputs or ()), *call.outputs)]
        whole = symbol_json.parse(mx.sym.Group([symbol, *made, *scaled, *parts]))
        heads = iter((place, output) for place, output, *_ in whole["heads"])
        self.nodes: list[Mapping[str, Any]] = whole["nodes"]
        self._nodes = from_json(whole)[0]
        self.heads = _places(next_heads(heads, [symbol]))
        self.nknown = max(self.heads) + 1
        self.returned = _places(next_heads(heads, made))
        self.scaled = _places(next_heads(heads, scaled))
        self.graphs: list[frozenset[int]] = []
        self.blocks: list[Block] = []
        for call in called:
            inputs = _places(next_heads(heads, call.inputs or []))
            self._add(call, next_heads(heads, call.outputs), inputs)
        self.graph_of = {place: n for n, ops in enumerate(self.graphs) for place in ops}

    def _add(self, call: Call, outputs: Sequence[tuple[int, int]], inputs: Sequence[int]) -> None:
        order = order_between(self.nodes, _places(outputs), inputs)
        ops = frozenset(place for place in order if self.nodes[place]["op"] != VARIABLE)
        ncopies = len(outputs) - len(set(outputs))  # MXNet copies what is returned again
        if is_run_whole(call.block, len(ops) - call.copied + ncopies):
            self.graphs.append(ops)
            self.blocks.append(call.block)

    def has_graph_of(self, block: Block) -> bool:
        """Does MXNet run a graph of ``block`` as one?"""
        return any(other is block for other in self.blocks)

    def user_code(self) -> list[tuple[Block, list[int]]]:
        """Whose each graph is that has Custom ops of the network, and which of all of them it has.

        They are counted in the network's order.
        """
        customs = [place for place in range(self.nknown) if self.nodes[place]["op"] == CUSTOM]
        numbers = [[n for n, k in enumerate(customs) if k in graph] for graph in self.graphs]
        return [pair for pair in zip(self.blocks, numbers, strict=True) if pair[1]]

    def losses(self) -> list[int]:
        """The places of loss operators."""
        return [place for place, node in enumerate(self._nodes) if is_loss(node)]

    def behind(self, heads: Sequence[int]) -> set[int]:
        """The places of what is at ``heads``, and of all that it is computed of."""
        return set(order_between(self.nodes, heads, ()))

    def reached(self, heads: Iterable[int]) -> set[int]:
        """The places of what MXNet differentiates for a loss that reads what is at ``heads``.

        That is all behind it, and of a graph in which something of that is, all of the graph.
        """
        places: set[int] = set()
        graphs: set[int] = set()
        waiting = list(heads)
        while waiting:
            place = waiting.pop()
            if place in places:
                continue
            places.add(place)
            waiting += [source for source, *_ in self.nodes[place]["inputs"]]
            number = self.graph_of.get(place)
            if number is not None and number not in graphs:
                graphs.add(number)
                waiting += self.graphs[number]
        return places

    def trains(self, place: int, params: Mapping[str, Any]) -> bool:
        """Does any of ``params``, by their names, get a gradient by way of the op at ``place``?"""
        found, left = {place}, [place]
        while left:
            place = left.pop()
            node = self._nodes[place]
            parameter = params.get(node.name) if node.is_variable else None
            if parameter is not None and parameter.grad_req != "null":
                return True
            sources = self.nodes[place]["inputs"]
            new = {source for k, (source, *_) in enumerate(sources) if has_gradient(node, k)}
            left += new - found
            found |= new
        return False
