"""The ops of a network that MXNet calls by themselves, in no graph, where it makes a difference."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.train.block_changes import hybridized, is_graph

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
) -> dict[str, int]:
    """Their names, and their places among the nodes of ``symbol``.

    ``blocks`` are the block that is trained, and losses. If that is hybridized, so is all.
    """
    graph, block = symbol_json.parse(symbol), blocks[0]
    trained = {name for name, parameter in params.items() if parameter.grad_req != "null"}
    places = _slopes(graph, block, in_halves)
    if not is_graph(block):
        in_graphs = _in_graphs(graph["nodes"], hybridized(blocks))
        places |= _repeated(graph["nodes"], trained, in_graphs)
    return {graph["nodes"][place]["name"]: place for place in sorted(places)}


def _slopes(graph: Mapping[str, Any], block: Block, in_halves: bool) -> set[int]:
    """The PReLUs of which MXNet writes over no gradient.

    A hybridized block writes over those that die in its graph, so not over that of an output, which
    autograd has, and one that is not hybridized over none. The slopes have other gradients then.
    """
    nodes, heads = graph["nodes"], graph["heads"]
    read = {source for node in nodes for source, *_ in node["inputs"]}
    outputs = {source for source, *_ in heads if in_halves} - read
    in_graphs = {name for root in hybridized([block]) for name in root.collect_params()}
    return {
        place
        for place, node in enumerate(nodes)
        if node["op"] == "LeakyReLU" and node.get("attrs", {}).get("act_type") == "prelu"
        if place in outputs
        or not (is_graph(block) or nodes[node["inputs"][1][0]]["name"] in in_graphs)
    }


def _repeated(
    nodes: Sequence[Node], trained: Collection[str], in_graphs: Collection[int]
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
        sources = tuple((first_of.get(source, source), k) for source, k, *_ in node["inputs"])
        if node["op"] == VARIABLE:
            reached |= {place} if node["name"] in trained else set()
            continue
        if any(source in reached for source, _ in sources):
            reached.add(place)
        call = node["op"], tuple(sorted(node.get("attrs", {}).items())), sources
        first = calls.setdefault(call, place)
        if first != place and place in reached and place not in in_graphs:
            repeated.add(place)
        elif first != place:
            first_of[place] = first
    return repeated


def _in_graphs(nodes: Sequence[Node], roots: Iterable[Block]) -> set[int]:
    """The ops that MXNet calls in the graphs of ``roots``."""
    roots = list(roots)
    imported = [root for root in roots if isinstance(root, mx.gluon.SymbolBlock)]
    graphs = [symbol_json.parse(root._cached_graph[1]) for root in imported]
    names = {node["name"] for graph in graphs for node in graph["nodes"]}
    prefixes = tuple(root.prefix for root in roots if root not in imported)
    return {
        place
        for place, node in enumerate(nodes)
        if node["name"] in names or node["name"].startswith(prefixes)
    }
