"""Where a block draws other random numbers than a planned step, which has one graph for all.

MXNet draws for every operator when Python calls it, whether or not something reads its result, and
for a hybridized block in the order of that one's graph, which has all outputs of the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE, Node
from memplan.mxnet.trace.operators import (
    GENERATORS,
    LOOP,
    RECURRENT,
    depends_on_mode,
    draws_in_training,
    generator_of,
)
from memplan.mxnet.train.blocks.calls import Call, next_heads, order_between, symbols_in
from memplan.mxnet.train.blocks.composing_thread import same_thread


@dataclass(frozen=True)
class OtherDraws:
    """Names of operators: ``moved``, all of a generator if any is, and ``missing`` in the graph."""

    moved: list[str]
    missing: list[str]


@contextlib.contextmanager
def noting_symbols() -> Iterator[list[Call]]:
    """Within it the operators that this thread calls with Symbols."""
    calls: list[Call] = []
    create = mx.symbol.register._symbol_creator
    is_here = same_thread()

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
    pairs = [(call, k) for call, ks in zip(calls, places_of, strict=True) for k in ks]
    drawn = [k for call, k in pairs if call.in_training or not depends_on_mode(alone(nodes[k]))]
    # What a loop draws is in a graph of its own.
    drawn = [k for k in drawn if draws(nodes[k]) and LOOP not in nodes[k].get("attrs", {})]
    moved = _moved(nodes, [place for place in drawn if place < known])
    missing = [place for place in drawn if place >= known]
    return OtherDraws(*([nodes[k]["name"] for k in some] for some in (moved, missing)))


def _moved(nodes: Sequence[Any], places: Sequence[int]) -> list[int]:
    """Those of ``places`` whose ``nodes`` draw from a generator in another order than the graph."""
    ops, moved = {k: nodes[k]["op"] for k in places}, set[int]()
    for generator in GENERATORS:
        # On a GPU cuDNN may draw for an RNN as it does for Dropout.
        of_it = [k for k in places if ops[k] in RECURRENT or generator_of(ops[k]) == generator]
        moved.update(of_it if of_it != sorted(of_it) else ())
    return [k for k in places if k in moved]


def ops_of(symbol: mx.sym.Symbol, calls: Sequence[Call]) -> tuple[list[Any], int, list[list[int]]]:
    """The operators of all ``calls``, as places among nodes: nodes, how many come first, places.

    First come the nodes of ``symbol``. Those of a call are in MXNet's order.
    """
    parts = [s for call in calls for s in (*(call.inputs or ()), *call.outputs)]
    whole = symbol_json.parse(mx.sym.Group([symbol, *parts]))
    nodes, heads = whole["nodes"], iter(head[0] for head in whole["heads"])
    known = len(order_between(nodes, next_heads(heads, [symbol]), ()))
    places_of = []
    for call in calls:
        inputs = None if call.inputs is None else next_heads(heads, call.inputs)
        outputs = next_heads(heads, call.outputs)
        places = outputs[:1] if inputs is None else order_between(nodes, outputs, inputs)
        places_of.append([place for place in places if nodes[place]["op"] != VARIABLE])
    return nodes, known, places_of


def alone(node: Mapping[str, Any]) -> Node:
    """The operator that a ``node`` of a Symbol's JSON is, without its inputs."""
    return Node(node["op"], node["name"], node.get("attrs", {}))


def draws(node: Mapping[str, Any]) -> bool:
    """Does an operator draw random numbers in training?"""
    return draws_in_training(alone(node))
