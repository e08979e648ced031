"""The ops of a network that MXNet calls by themselves, in no graph, where it makes a difference."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.trace.operators import APART
from memplan.mxnet.train.block_changes import hybridized, is_graph, with_children

Block = Any
Parameter = Any

# A node of a graph in JSON.
Node = Mapping[str, Any]


def called_apart(
    symbol: mx.sym.Symbol,
    blocks: Sequence[Block],
    params: Mapping[str, Parameter],
    *,
    in_halves: bool,
) -> tuple[set[int], set[int]]:
    """Their places among the nodes of ``symbol``. A layer that is called twice has a name twice.

    And the places of which they are some, whatever ``params`` are trained.
    ``blocks`` are the block that is trained, and losses. If that is hybridized, so is all.
    """
    graph, block = symbol_json.parse(symbol), blocks[0]
    if is_graph(block):
        places = _slopes_at_the_end(graph) if in_halves else set()
        return places, places
    trained = {name for name, parameter in params.items() if parameter.grad_req != "null"}
    nodes, graph_of = graph["nodes"], _graphs(graph["nodes"], hybridized(blocks))
    slopes = _slopes_at_borders(nodes, graph_of)
    repeated, alike = _repeated(nodes, trained, graph_of), _alike(nodes, params, graph_of)
    return slopes | repeated, slopes | alike


def marked_apart(symbol: mx.sym.Symbol, places: Collection[int]) -> mx.sym.Symbol:
    """``symbol``, whose nodes at these ``places`` say that they are called apart."""
    graph = symbol_json.parse(symbol)
    for place in places:
        graph["nodes"][place].setdefault("attrs", {})[APART] = str(place)
    return symbol_json.load(graph)


def _slopes_at_the_end(graph: Mapping[str, Any]) -> set[int]:
    """The PReLUs that nobody reads within the graph of a block: autograd has their gradients.

    MXNet writes over those that die in the graph. The slopes have other gradients then.
    """
    read = {source for node in graph["nodes"] for source, *_ in node["inputs"]}
    outputs = {source for source, *_ in graph["heads"]} - read
    return {place for place in outputs if _has_slopes(graph["nodes"][place])}


def _slopes_at_borders(nodes: Sequence[Node], graph_of: Mapping[int, int]) -> set[int]:
    """The PReLUs of which MXNet writes over no gradient.

    Those in no graph, those that nobody reads within theirs, for autograd has their gradients, and
    those that alone read there what comes from outside, whose gradient has an array of its own.
    """
    readers: dict[tuple[int, int | None], list[int]] = {}
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
    nodes: Sequence[Node], trained: Collection[str], graph_of: Mapping[int, int]
) -> set[int]:
    """The ops that equal an earlier one, and through which gradients of ``trained`` parameters go.

    A graph has one in the place of both, which hands on the sum of their gradients; else the sum is
    of what each of them hands on, and has other last bits.
    """
    reached: set[int] = set()
    repeated: set[int] = set()
    # Others that equal an earlier one are replaced by it.
    first_of: dict[int, int] = {}
    calls: dict[Any, int] = {}
    for place, node in enumerate(nodes):
        if node["op"] == VARIABLE:
            reached |= {place} if node["name"] in trained else set()
            continue
        call = _call(node, first_of)
        if any(source in reached for source, _ in call[-1]):
            reached.add(place)
        first = calls.setdefault(call, place)
        if first != place and place in reached and place not in graph_of:
            repeated.add(place)
        elif first != place:
            first_of[place] = first
    return repeated


def _alike(nodes: Sequence[Node], params: Collection[str], graph_of: Mapping[int, int]) -> set[int]:
    """The ops in no graph that equal an earlier one, if each is replaced by that.

    Only those through which gradients of ``params`` go, if all of these are trained.
    """
    reached: set[int] = set()
    first_of: dict[int, int] = {}
    calls: dict[Any, int] = {}
    for place, node in enumerate(nodes):
        if node["op"] == VARIABLE:
            reached |= {place} if node["name"] in params else set()
            continue
        call = _call(node, first_of)
        if any(source in reached for source, _ in call[-1]):
            reached.add(place)
        first = calls.setdefault(call, place)
        first_of |= {place: first} if first != place else {}
    return (first_of.keys() & reached) - graph_of.keys()


def _call(node: Node, first_of: Mapping[int, int]) -> tuple[Any, ...]:
    """What equal ops have in common, where sources stand for others; the sources come last."""
    sources = tuple((first_of.get(source, source), k) for source, k, *_ in node["inputs"])
    return node["op"], tuple(sorted(node.get("attrs", {}).items())), sources


def _graphs(nodes: Sequence[Node], roots: Iterable[Block]) -> dict[int, int]:
    """The ops that MXNet calls in the graphs of ``roots``, and in which of these."""
    result: dict[int, int] = {}
    for number, root in enumerate(roots):
        names: set[str] = set()
        # Ops have the prefix of the block that calls them, which need not begin with the root's.
        prefixes = tuple(block.prefix for block in with_children([root]))
        if isinstance(root, mx.gluon.SymbolBlock):
            graph = symbol_json.parse(root._cached_graph[1])
            names, prefixes = {node["name"] for node in graph["nodes"]}, ()
        for place, node in enumerate(nodes):
            if node["op"] != VARIABLE and (
                node["name"] in names or node["name"].startswith(prefixes)
            ):
                result[place] = number
    return result
