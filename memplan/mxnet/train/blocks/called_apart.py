"""The ops of a network that MXNet calls by themselves, in no graph, where it makes a difference."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.trace.operators import APART
from memplan.mxnet.train.blocks.calls import Graph, Ops, call_of_node
from memplan.mxnet.train.blocks.hybridized import is_one_graph

Block = Any
Parameter = Any

# A node of a graph in JSON.
Node = Mapping[str, Any]


def called_apart(
    ops: Ops, block: Block, params: Mapping[str, Parameter], *, in_halves: bool
) -> tuple[set[int], set[int]]:
    """Their places among ``ops``, which are those of ``block`` and its loss.

    And the places of which they are some, whatever ``params`` are trained. If MXNet runs the block
    as a graph, so is all.
    """
    nodes, graph_of = ops.nodes[: ops.nknown], ops.graph_of
    if is_one_graph(block) and ops.has_graph_of(block):
        places = _slopes_at_the_end(nodes, ops.heads) if in_halves else set()
        return places, places
    trained = {name for name, parameter in params.items() if parameter.grad_req != "null"}
    slopes = _slopes_at_borders(nodes, graph_of)
    repeated = _repeated(nodes, trained, graph_of, are_merged=False)
    return slopes | repeated, slopes | _repeated(nodes, params, graph_of, are_merged=True)


def marked_apart(symbol: mx.sym.Symbol, places: Collection[int]) -> mx.sym.Symbol:
    """``symbol``, whose nodes at these ``places`` say that they are called apart."""
    graph = symbol_json.parse(symbol)
    for place in places:
        graph["nodes"][place].setdefault("attrs", {})[APART] = str(place)
    return symbol_json.load(graph)


def _slopes_at_the_end(nodes: Sequence[Node], heads: Iterable[int]) -> set[int]:
    """The PReLUs that nobody reads within the graph of a block: autograd has their gradients.

    MXNet writes over those that die in the graph. The slopes have other gradients then.
    """
    outputs = set(heads) - {source for node in nodes for source, *_ in node["inputs"]}
    return {place for place in outputs if _has_slopes(nodes[place])}


def _slopes_at_borders(nodes: Sequence[Node], graph_of: Mapping[int, Graph]) -> set[int]:
    """The PReLUs of which MXNet writes over no gradient.

    Those in no graph, those that nobody reads within theirs, for autograd has their gradients, and
    those that alone read there what comes from outside, whose gradient has an array of its own.
    """
    readers: dict[tuple[int, Graph | None], list[int]] = {}
    for place, node in enumerate(nodes):
        for source, *_ in node["inputs"]:
            readers.setdefault((source, graph_of.get(place)), []).append(place)
    result = set()
    for place, node in enumerate(nodes):
        if _has_slopes(node):
            own, data = graph_of.get(place), node["inputs"][0][0]
            reads_outside = graph_of.get(data) != own and readers[data, own] == [place]
            if own is None or reads_outside or (place, own) not in readers:
                result.add(place)
    return result


def _has_slopes(node: Node) -> bool:
    return node["op"] == "LeakyReLU" and node.get("attrs", {}).get("act_type") == "prelu"


def _repeated(
    nodes: Sequence[Node],
    names: Collection[str],
    graph_of: Mapping[int, Graph],
    *,
    are_merged: bool,
) -> set[int]:
    """The ops that equal an earlier one, and through which gradients of these parameters go.

    A graph has one in the place of both, which hands on the sum of their gradients; else the sum is
    of what each of them hands on, and has other last bits. So those within one graph are no such
    ops, and what reads them reads the earlier one; so it does of all if they ``are_merged``.
    """
    reached: set[int] = set()
    repeated: set[int] = set()
    first_of: dict[int, int] = {}
    calls: dict[Any, int] = {}
    for place, node in enumerate(nodes):
        if node["op"] == VARIABLE:
            reached |= {place} if node["name"] in names else set()
            continue
        call = call_of_node(node, first_of)
        if any(source in reached for source, _ in call[-1]):
            reached.add(place)
        first = calls.setdefault(call, place)
        is_apart = place not in graph_of or graph_of[place] != graph_of.get(first)
        is_repeated = first != place and place in reached and is_apart
        if is_repeated:
            repeated.add(place)
        if first != place and (are_merged or not is_repeated):
            first_of[place] = first
    return repeated
