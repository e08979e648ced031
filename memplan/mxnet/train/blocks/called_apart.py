"""The ops of a network that MXNet calls by themselves, in no graph, where it makes a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.losses import has_gradient
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.trace.operators import APART
from memplan.mxnet.train.blocks.calls import Graph, Ops, call_of_node
from memplan.mxnet.train.blocks.hybridized import is_one_graph

Block = Any
Parameter = Any

# A node of a graph in JSON.
Node = Mapping[str, Any]

# Operators whose inputs get the gradient of the output itself, in its array (CloneGradient of
# MXNet's src/operator). A ``_copy`` or a Reshape, say, hands on a copy of it.
_HANDS_ON = frozenset({"elemwise_add", "_contrib_round_ste", "_contrib_sign_ste"})


def called_apart(
    ops: Ops, block: Block, params: Mapping[str, Parameter], *, in_halves: bool
) -> tuple[set[int], set[int]]:
    """Their places among ``ops``, which are those of ``block`` and its loss.

    And the places of which they are some, whatever ``params`` are trained. If MXNet runs the block
    as a graph, so is all.
    """
    nodes, graph_of = ops.nodes[: ops.nknown], ops.graph_of
    if is_one_graph(block) and ops.has_graph_of(block):
        places = _slopes_at_the_end(ops) if in_halves else set()
        return places, places
    trained = {name for name, parameter in params.items() if parameter.grad_req != "null"}
    slopes = _slopes_at_borders(ops)
    repeated = _repeated(nodes, trained, graph_of, are_merged=False)
    return slopes | repeated, slopes | _repeated(nodes, params, graph_of, are_merged=True)


def marked_apart(symbol: mx.sym.Symbol, places: Collection[int]) -> mx.sym.Symbol:
    """``symbol``, whose nodes at these ``places`` say that they are called apart."""
    graph = symbol_json.parse(symbol)
    for place in places:
        graph["nodes"][place].setdefault("attrs", {})[APART] = str(place)
    return symbol_json.load(graph)


def _slopes_at_the_end(ops: Ops) -> set[int]:
    """The PReLUs that have the gradient of an output of the graph of a block: it is autograd's.

    MXNet writes over those that die in the graph. The slopes have other gradients then.
    """
    whole = dict.fromkeys(range(ops.nknown))  # one graph, whose children have none of their own
    found = _with_gradients_of_outputs(ops, whole, Counter(ops.heads))
    return {place for place in found if _has_slopes(ops.nodes[place])}


def _slopes_at_borders(ops: Ops) -> set[int]:
    """The PReLUs of which MXNet writes over no gradient.

    Those in no graph, those that have the gradient of an output of theirs, which is autograd's, and
    those that alone read there what comes from outside, whose gradient has an array of its own.
    """
    nodes, graph_of = ops.nodes[: ops.nknown], ops.graph_of
    readers: dict[tuple[int, Graph | None], list[int]] = {}
    for place, node in enumerate(nodes):
        for source, *_ in node["inputs"]:
            readers.setdefault((source, graph_of.get(place)), []).append(place)
    outputs = Counter({place for place, graph in readers if graph != graph_of.get(place)})
    outputs |= Counter(set(ops.heads))  # autograd adds up what others make of one
    result = _with_gradients_of_outputs(ops, graph_of, outputs)
    for place in filter(lambda place: _has_slopes(nodes[place]), range(ops.nknown)):
        own, data = graph_of.get(place), nodes[place]["inputs"][0][0]
        reads_outside = graph_of.get(data) != own and readers[data, own] == [place]
        if own is None or reads_outside:
            result.add(place)
    return {place for place in result if _has_slopes(nodes[place])}


def _with_gradients_of_outputs(
    ops: Ops, graph_of: Mapping[int, Graph | None], noutputs: Mapping[int, int]
) -> set[int]:
    """The ops whose gradient is that of an output of their graph, in the same array.

    ``noutputs`` says how many outputs of it each is. Such a gradient that is a sum, of that of an
    output and of what readers hand on, or of several, has an array of the graph's.
    """
    nparts, given, result = Counter(noutputs), set(noutputs), set[int]()
    for place in reversed(range(ops.nknown)):
        node = ops.operators[place]
        if not nparts[place]:
            continue
        if place in given and nparts[place] == 1:
            result.add(place)
        for number, source in enumerate(ops.nodes[place]["inputs"]):
            if graph_of.get(source[0]) == graph_of.get(place) and has_gradient(node, number):
                nparts[source[0]] += 1
                if place in result and node.op in _HANDS_ON:
                    given.add(source[0])
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
