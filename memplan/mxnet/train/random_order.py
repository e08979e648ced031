"""Where a block draws other random numbers than a planned step, which has one graph for all.

MXNet draws for every operator when Python calls it, whether or not something reads its result, and
for a hybridized block in the order of that one's graph, which has all outputs of the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE, Node
from memplan.mxnet.trace.operators import draws_in_training
from memplan.mxnet.train.cached_graphs import LOOP
from memplan.mxnet.train.composing_thread import is_it
from memplan.mxnet.train.nesting import leaves

Symbols = list[mx.sym.Symbol]


@dataclass(frozen=True)
class Call:
    """Of an operator, or of a graph: the Symbols that it got, and those that it made of them.

    ``is_scaled`` marks a loss whose gradient AMP scales where it gets arrays. ``is_recorded`` and
    ``in_training`` say in which mode autograd is when it is called.
    """

    inputs: Symbols | None
    outputs: Symbols
    is_scaled: bool = False
    is_recorded: bool = field(default_factory=autograd.is_recording)
    in_training: bool = field(default_factory=autograd.is_training)


@dataclass(frozen=True)
class OtherDraws:
    """Names of operators: ``moved``, all of them if any is, and ``missing`` in the graph."""

    moved: list[str]
    missing: list[str]


@contextlib.contextmanager
def noting_symbols() -> Iterator[list[Call]]:
    """Within it the operators that this thread calls with Symbols."""
    calls: list[Call] = []
    create = mx.symbol.register._symbol_creator
    is_here = is_it()

    def create_and_note(*args: Any, **kwargs: Any) -> Any:
        made = create(*args, **kwargs)
        if is_here():
            calls.append(Call(None, symbols_in(made)))
        return made

    try:
        mx.symbol.register._symbol_creator = create_and_note
        yield calls
    finally:
        mx.symbol.register._symbol_creator = create


def other_draws(symbol: mx.sym.Symbol, calls: Sequence[Call]) -> OtherDraws:
    """What is drawn otherwise by ``symbol``, made by these ``calls``, than in their order.

    Names do not tell, for all calls of a layer have its name. But one graph of it all has every
    operator once, and those of ``symbol``, which comes first, in its order.
    """
    nodes, known, places_of = ops_of(symbol, calls)
    drawn = [place for places in places_of for place in places]
    # What a loop draws is in a graph of its own.
    drawn = [k for k in drawn if draws(nodes[k]) and LOOP not in nodes[k].get("attrs", {})]
    places = [place for place in drawn if place < known]
    moved = places if places != sorted(places) else []
    missing = [place for place in drawn if place >= known]
    return OtherDraws(*([nodes[k]["name"] for k in some] for some in (moved, missing)))


def ops_of(symbol: mx.sym.Symbol, calls: Sequence[Call]) -> tuple[list[Any], int, list[list[int]]]:
    """The operators of all ``calls``, as places among nodes: nodes, how many come first, places.

    First come the nodes of ``symbol``. Those of a call are in MXNet's order.
    """
    parts = [s for call in calls for s in (*(call.inputs or ()), *call.outputs)]
    whole = symbol_json.parse(mx.sym.Group([symbol, *parts]))
    nodes, heads = whole["nodes"], iter(head[0] for head in whole["heads"])
    known = len(_order(nodes, _next(heads, [symbol]), ()))
    places_of = []
    for call in calls:
        inputs = None if call.inputs is None else _next(heads, call.inputs)
        outputs = _next(heads, call.outputs)
        places = outputs[:1] if inputs is None else _order(nodes, outputs, inputs)
        places_of.append([place for place in places if nodes[place]["op"] != VARIABLE])
    return nodes, known, places_of


def draws(node: Mapping[str, Any]) -> bool:
    """Does an operator draw random numbers in training?"""
    return draws_in_training(Node(node["op"], node["name"], node.get("attrs", {})))


def symbols_in(nested: Any) -> Symbols:
    """Those in ``nested``, as legacy ones: a group has no others beside them."""
    found = (leaf for leaf in leaves(nested) if isinstance(leaf, mx.sym.Symbol))
    return [symbol.as_nd_ndarray() for symbol in found]


def _next(heads: Iterator[int], symbols: Symbols) -> list[int]:
    """The next ``heads`` of a graph, as many as ``symbols`` have."""
    return [next(heads) for symbol in symbols for _ in symbol.list_outputs()]


def _order(nodes: Sequence[Any], outputs: Sequence[int], inputs: Sequence[int]) -> list[int]:
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
