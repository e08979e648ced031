"""What was called while a network was composed, and which of its ops MXNet runs in graphs.

Names do not tell: all calls of a layer have its name, and a layer need not have that of the block
that it is in.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mxnet as mx
from mxnet import autograd
from mxnet.base import MXNetError

from memplan.mxnet.realise.generators import draws
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.inference import infer
from memplan.mxnet.trace.losses import has_gradient, is_loss
from memplan.mxnet.trace.nnvm import VARIABLE, from_json, output_of
from memplan.mxnet.trace.operators import CUSTOM, may_draw
from memplan.mxnet.trace.probe import merges
from memplan.mxnet.trace.states import states_written
from memplan.mxnet.train.arrays.nesting import alike, leaves, of_semantics

Symbols = list[mx.sym.Symbol]
Block = Any

# A node's place, and which of its outputs.
Entry = tuple[int, int]

Head = TypeVar("Head")

# MXNet runs a graph of so many operators one by one, unless it is told otherwise.
_INLINED = 2


@dataclass(frozen=True)
class Call:
    """Of an operator, or of the graph of ``block``: the Symbols that it got, and that it made.

    ``is_scaled`` marks a loss whose gradient AMP scales where it gets arrays. ``is_recorded`` and
    ``in_training`` say in which mode autograd is when it is called. The outputs that are ``copies``
    of inputs are the inputs themselves in the graph.
    """

    inputs: Symbols | None
    outputs: Symbols
    is_scaled: bool = False
    block: Block = None
    is_recorded: bool = field(default_factory=autograd.is_recording)
    in_training: bool = field(default_factory=autograd.is_training)
    copies: Symbols = field(default_factory=list)


def symbols_in(nested: Any) -> Symbols:
    """Those in ``nested``, as legacy ones: a group has no others beside them."""
    found = (leaf for leaf in leaves(nested) if isinstance(leaf, mx.sym.Symbol))
    return [symbol.as_nd_ndarray() for symbol in found]


def inputs_of(nested: Any) -> list[str]:
    """What those in ``nested`` are computed from, in MXNet's order."""
    symbols = symbols_in(nested)
    return mx.sym.Group(symbols).list_inputs() if symbols else []


def with_copies(outputs: Any, inputs: Symbols) -> tuple[Any, Symbols]:
    """The ``outputs`` of a graph with loss operators, with copies of what it got, and these copies.

    A loss that reads such an output has MXNet differentiate the graph, and one that reads what the
    graph got does not: they are two arrays.
    """
    given = {name for symbol in inputs for name in symbol.list_outputs()}

    def is_given(symbol: mx.sym.Symbol) -> bool:
        return symbol.get_children() is None or not given.isdisjoint(symbol.list_outputs())

    made, copies = symbols_in(outputs), []
    is_passed = any(map(is_given, made))
    if not is_passed or not any(map(is_loss, from_json(symbol_json.parse(mx.sym.Group(made)))[0])):
        return outputs, []

    def copied(value: Any) -> Any:
        if not (isinstance(value, mx.sym.Symbol) and is_given(value)):
            return value
        copies.append(mx.sym.identity(value.as_nd_ndarray()))
        return of_semantics(copies[-1])

    return alike(copied, outputs), copies


def next_heads(heads: Iterator[Head], symbols: Symbols) -> list[Head]:
    """The next ``heads`` of a graph, as many as ``symbols`` have."""
    return [next(heads) for symbol in symbols for _ in symbol.list_outputs()]


def _places(heads: Iterable[Entry]) -> list[int]:
    return [place for place, _ in heads]


def order_between(
    nodes: Sequence[Any] | Mapping[Any, Any], outputs: Sequence[Any], inputs: Sequence[Any]
) -> list[Any]:
    """The nodes between ``inputs`` and ``outputs``, in the order of MXNet's graph of these."""
    order: list[Any] = []
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


def call_of_node(node: Mapping[str, Any], first_of: Mapping[int, int]) -> tuple[Any, ...]:
    """What equal ops have in common, where sources stand for others; the sources come last."""
    sources = tuple((first_of.get(source, source), k) for source, k, *_ in node["inputs"])
    return node["op"], tuple(sorted(node.get("attrs", {}).items())), sources


def _merged_entries(entries: Iterable[Sequence[int]], first_of: Mapping[int, int]) -> list[Any]:
    """These ``entries`` of a graph in JSON, of the nodes that stand for others."""
    return [[first_of.get(source, source), *rest] for source, *rest in entries]


def with_merged(symbol: mx.sym.Symbol, first_of: Mapping[int, int]) -> mx.sym.Symbol:
    """``symbol``, where nodes stand for others.

    MXNet's executor merges equal ops, but differentiates each of them that is an output.
    """
    graph = symbol_json.parse(symbol)
    if first_of.keys().isdisjoint(range(len(graph["nodes"]))):
        return symbol
    for part in graph["nodes"]:
        part["inputs"] = _merged_entries(part["inputs"], first_of)
    graph["heads"] = _merged_entries(graph["heads"], first_of)
    return symbol_json.load(graph)


def without_repeats(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """``symbol`` with a copy for an output that is there already, as in a hybridized block.

    MXNet's executor takes one gradient only for an output that is there twice.
    """
    heads = [tuple(head) for head in symbol_json.parse(symbol)["heads"]]
    if len(set(heads)) == len(heads):
        return symbol
    outputs = [output_of(symbol, k) for k in range(len(heads))]
    repeated = [head in heads[:k] for k, head in enumerate(heads)]
    copies = [mx.sym.identity(o) if r else o for o, r in zip(outputs, repeated, strict=True)]
    return mx.sym.Group(copies)


def is_run_whole(block: Block, noperators: int) -> bool:
    """Does MXNet run a graph of ``block``, which has so many operators, as one?"""
    flags = dict(block._flags)
    return bool(flags.get("static_alloc")) or noperators > int(flags.get("inline_limit", _INLINED))


@dataclass(frozen=True, eq=False)
class Graph:
    """One of ``block`` that MXNet runs as one: the places of its ``ops``, and its outputs.

    ``ends`` are these, as entries of the network's nodes, and ``noutputs`` says how many outputs
    those of the ops are that are any: what is returned again counts again. It has two variables for
    each of what it ``gets_twice``, and which of them an op reads is not known.
    """

    block: Block
    ops: frozenset[int]
    ends: Sequence[Entry]
    noutputs: Mapping[int, int]
    gets_twice: frozenset[Entry]


class Ops:
    """The ops of the network ``symbol``, and those beside it that ``calls`` have made.

    They are ``nodes`` of one graph in JSON, ``operators`` the same ones as objects. A node is known
    by its *place* among them, an output by its *entry*, the place and which output of the node it
    is. The nodes of the symbol come first, ``nknown`` of them, at the places that they have in the
    symbol alone; those behind are what calls have made and the network does not read.

    The entries of the symbol's outputs are ``outputs``, one after the other. Places are in
    ``heads`` (of what computes these), in
    ``returned`` (of what computes ``outputs`` of a block), ``scaled`` (of the calls that are marked
    so) and ``passed`` (of variables that the graph of a block returns, where MXNet takes no
    gradient of them), ``in_graphs`` (of ops in graphs of blocks, be they run as one or not).
    ``graphs`` are those that MXNet runs as one, and ``graph_of`` says in which
    of them the op at a place is. ``merged`` has the places of ops that equal an earlier one of
    their graph, with the place of that: MXNet has it for both, and here, too, nothing reads the
    others.
    """

    def __init__(self, symbol: mx.sym.Symbol, outputs: Any, calls: Sequence[Call]) -> None:
        made, called = symbols_in(outputs), [c for c in calls if c.block is not None]
        scaled = [call.outputs[0] for call in calls if call.is_scaled]
        parts = [s for call in called for s in (*(call.inputs or ()), *call.outputs, *call.copies)]
        whole = symbol_json.parse(mx.sym.Group([symbol, *made, *scaled, *parts]))
        heads = iter((place, output) for place, output, *_ in whole["heads"])
        self.nodes: list[Mapping[str, Any]] = whole["nodes"]
        self.operators = from_json(whole)[0]
        self.outputs = next_heads(heads, [symbol])
        self.heads = _places(self.outputs)
        self.nknown = max(self.heads) + 1
        self.returned = _places(next_heads(heads, made))
        self.scaled = _places(next_heads(heads, scaled))
        self.graphs: list[Graph] = []
        self.passed: list[tuple[Block, int]] = []
        self.in_graphs: set[int] = set()
        self.merged: dict[int, int] = {}
        for call in called:
            inputs = next_heads(heads, call.inputs or [])
            outs, copies = next_heads(heads, call.outputs), next_heads(heads, call.copies)
            self._add(call.block, outs, inputs, _places(copies))
        self.graph_of = {place: graph for graph in self.graphs for place in graph.ops}
        self._read_merged()

    def _add(
        self, block: Block, outputs: Sequence[Entry], inputs: Sequence[Entry], copies: Sequence[int]
    ) -> None:
        order = order_between(self.nodes, _places(outputs), _places(inputs))
        ops = frozenset(place for place in order if self.nodes[place]["op"] != VARIABLE)
        self.in_graphs |= ops
        gets_twice = frozenset(entry for entry, count in Counter(inputs).items() if count > 1)
        first_of = self._merged_in(ops.difference(copies), gets_twice)
        copied = {(place, 0): tuple(self.nodes[place]["inputs"][0][:2]) for place in copies}
        returned = [copied.get((p, k), (first_of.get(p, p), k)) for p, k in outputs]
        heads = dict.fromkeys(returned)
        ncopies = len(returned) - len(heads)  # MXNet copies what is returned again
        is_whole = is_run_whole(block, len(ops) - len(copies) - len(first_of) + ncopies)
        read = self._differentiated_by(ops) if is_whole else set()
        variables = [place for place, _ in heads if self.nodes[place]["op"] == VARIABLE]
        self.passed += [(block, place) for place in variables if place not in read]
        if is_whole:
            noutputs = Counter(place for place, _ in returned if place in ops)
            ops -= first_of.keys()
            self.graphs.append(Graph(block, ops, [*heads], noutputs, gets_twice))
        self.merged |= first_of

    def _differentiated_by(self, ops: Iterable[int]) -> set[int]:
        """The places of what any of these ``ops`` reads, and has a gradient for."""
        read = (
            (place, k, s) for place in ops for k, (s, *_) in enumerate(self.nodes[place]["inputs"])
        )
        return {source for place, k, source in read if has_gradient(self.operators[place], k)}

    def _merged_in(self, ops: Iterable[int], unclear: frozenset[Entry]) -> dict[int, int]:
        """The ``ops`` of a graph that equal an earlier one, and that one.

        Those that read what is ``unclear`` are left out.
        """
        first_of: dict[int, int] = {}
        calls: dict[Any, int] = {}
        are_merged: dict[int, bool] = {}
        for place in sorted(ops):
            call = call_of_node(self.nodes[place], first_of)
            first = calls.setdefault(call, place)
            if first == place:
                continue
            if first not in are_merged:
                are_merged[first] = unclear.isdisjoint(call[-1]) and self._merges(first)
            if are_merged[first]:
                first_of[place] = first
        return first_of

    def _merges(self, place: int) -> bool:
        """Does MXNet merge the op at this ``place`` with an equal one?"""
        node = self.operators[place]
        if not node.inputs or may_draw(node):
            return False
        if not node.infos.inputs:
            # Where MXNet cannot infer them, tracing says so.
            with contextlib.suppress(MXNetError):
                infer([(other, 0) for other in self.operators], {}, {})
        return bool(node.infos.inputs) and merges(node)

    def _read_merged(self) -> None:
        """Have what reads one that is ``merged`` read that with which it is."""
        if self.merged:
            self.nodes = [
                {**node, "inputs": _merged_entries(node["inputs"], self.merged)}
                for node in self.nodes
            ]
        for places in (self.heads, self.returned, self.scaled):
            places[:] = [self.merged.get(place, place) for place in places]
        numbers = [number for _, number in self.outputs]
        self.outputs = list(zip(self.heads, numbers, strict=True))

    def has_graph_of(self, block: Block) -> bool:
        """Does MXNet run a graph of ``block`` as one?"""
        return any(graph.block is block for graph in self.graphs)

    def user_code(self) -> list[tuple[Block, list[int]]]:
        """Whose each graph is that has Custom ops of the network, and which of all of them it has.

        They are counted in the network's order.
        """
        customs = [place for place in range(self.nknown) if self.nodes[place]["op"] == CUSTOM]
        pairs = [(g.block, [n for n, k in enumerate(customs) if k in g.ops]) for g in self.graphs]
        return [pair for pair in pairs if pair[1]]

    def drawing(self) -> list[Block]:
        """Whose the graphs are that draw random numbers."""
        return [g.block for g in self.graphs if draws(self.operators[k] for k in g.ops)]

    def losses(self) -> list[int]:
        """The places of loss operators."""
        nodes = enumerate(self.operators)
        return [place for place, node in nodes if place not in self.merged and is_loss(node)]

    def behind(self, heads: Sequence[int]) -> set[int]:
        """The places of what is at ``heads``, and of all that it is computed of."""
        return set(order_between(self.nodes, heads, ()))

    def reached(self, heads: Iterable[int]) -> set[int]:
        """The places of what MXNet differentiates for a loss that reads what is at ``heads``.

        That is all behind it, and of a graph in which something of that is, all of the graph.
        """
        places: set[int] = set()
        graphs: set[Graph] = set()
        waiting = list(heads)
        while waiting:
            place = waiting.pop()
            if place in places:
                continue
            places.add(place)
            waiting += [source for source, *_ in self.nodes[place]["inputs"]]
            graph = self.graph_of.get(place)
            if graph is not None and graph not in graphs:
                graphs.add(graph)
                waiting += graph.ops
        return places

    def writes_states(self) -> bool:
        """Do any of them write states, such as the statistics of a norm?"""
        return any(map(states_written, self.operators))

    def trained(self, params: Mapping[str, Any]) -> list[int]:
        """The places of the variables that are ``params``, by their names, and are trained."""
        return [
            place
            for place, node in enumerate(self.operators)
            if node.is_variable
            and (parameter := params.get(node.name)) is not None
            and parameter.grad_req != "null"
        ]

    def as_called(self, params: Mapping[str, Any]) -> list[Any]:
        """What tells networks of the same ops apart.

        Their graphs, where it depends on these which states are written, or in which order.
        """
        written = Counter(s.name for node in self.operators for s in states_written(node))
        dropped = any(map(states_written, self.operators[self.nknown :]))
        by_graphs: list[Any] = [[*self.merged.items()]]
        if written and (dropped or len(set(self.heads)) > 1 or max(written.values()) > 1):
            ops, ends = [sorted(g.ops) for g in self.graphs], [g.ends for g in self.graphs]
            by_graphs += [ops, ends, self.trained(params)]
        return by_graphs

    def carrying(self, params: Mapping[str, Any]) -> set[int]:
        """The places of the nodes by way of which any of ``params``, by their names, is trained."""
        places = set(self.trained(params))
        for place, node in enumerate(self.operators):
            sources = enumerate(self.nodes[place]["inputs"])
            if any(source in places and has_gradient(node, k) for k, (source, *_) in sources):
                places.add(place)
        return places
