"""The ops of a network that MXNet calls by themselves, in no graph, where it makes a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.errors import TraceError
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

# In which graph the op at a place is.
GraphOf = Mapping[int, Graph]

# The ops of a graph that hand on gradients to an output of an op, by its place and number: one that
# does so for several of its inputs is there as often.
Readers = dict[tuple[Graph | None, int, int], list[int]]

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
    slopes = _slopes_at_borders(ops, ops.trained(params))
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
    noutputs = Counter(ops.heads)
    # All is one graph, whose children have none of their own.
    found = _with_gradients_of_outputs(ops, {}, noutputs, _readers(ops, {}, noutputs))
    return {place for place in _known_slopes(ops) if place in found}


def _slopes_at_borders(ops: Ops, trained: Collection[int]) -> set[int]:
    """The PReLUs of which MXNet writes over no gradient.

    Those in no graph, those that have the gradient of an output of theirs, which is autograd's, and
    those that alone hand on a gradient there to what comes from outside, which has an array of its
    own. An output counts whether or not anything reads it: MXNet has zeros for its gradient.
    TraceError where it is not known whether they do so alone, and the slopes are ``trained``.
    """
    graph_of = ops.graph_of
    noutputs = {k: count for graph in ops.graphs for k, count in graph.noutputs.items()}
    readers = _readers(ops, graph_of, noutputs)
    of_outputs = _with_gradients_of_outputs(ops, graph_of, noutputs, readers)

    def is_kept(place: int) -> bool:
        own, (data, slopes) = graph_of.get(place), ops.nodes[place]["inputs"]
        if own is None or place in of_outputs:
            return True
        beside = readers.get((own, data[0], data[1]), [])
        if len(beside) > 1 and place in beside and slopes[0] in trained:
            _check_gets_once(ops, own, place)
        return graph_of.get(data[0]) != own and beside == [place]

    return {place for place in _known_slopes(ops) if is_kept(place)}


def _check_gets_once(ops: Ops, graph: Graph, place: int) -> None:
    """TraceError if a PReLU of ``graph`` reads what that gets twice."""
    data = ops.nodes[place]["inputs"][0]
    if (data[0], data[1]) in graph.gets_twice:
        raise TraceError(
            f"hybridized block {graph.block.name!r} gets {ops.nodes[data[0]]['name']!r} twice, "
            f"which op {ops.nodes[place]['name']!r} (LeakyReLU, act_type='prelu') reads: what "
            f"gradient MXNet takes of its slopes depends on which of the two others read; give the "
            f"block F.identity(x) the second time, do not hybridize it, or freeze the slopes "
            f"(grad_req 'null')"
        )


def _readers(ops: Ops, graph_of: GraphOf, noutputs: Mapping[int, int]) -> Readers:
    """The ops that hand on gradients in graphs where ``noutputs`` says how many outputs each is.

    Ops that only a dropped output needs are among them. They lie behind those of the network.
    """
    readers: Readers = {}
    reached = set(noutputs)
    for place in reversed(range(len(ops.nodes))):
        if place not in reached:
            continue
        own = graph_of.get(place)
        for number, (source, output, *_) in enumerate(ops.nodes[place]["inputs"]):
            if has_gradient(ops.operators[place], number):
                readers.setdefault((own, source, output), []).append(place)
                reached |= {source} if graph_of.get(source) == own else set()
    return readers


def _with_gradients_of_outputs(
    ops: Ops, graph_of: GraphOf, noutputs: Mapping[int, int], readers: Readers
) -> set[int]:
    """The ops whose gradient is that of an output of their graph, in the same array.

    ``noutputs`` says how many outputs of it each is. Such a gradient that is a sum, of that of an
    output and of what readers hand on, or of several, has an array of the graph's.
    """
    given, result = set(noutputs), set[int]()
    for place in reversed(range(len(ops.nodes))):
        own = graph_of.get(place)
        nparts = noutputs.get(place, 0) + len(readers.get((own, place, 0), ()))
        if place in given and nparts == 1:
            result.add(place)
            if ops.operators[place].op in _HANDS_ON:
                sources = (source for source, *_ in ops.nodes[place]["inputs"])
                given |= {source for source in sources if graph_of.get(source) == own}
    return result


def _known_slopes(ops: Ops) -> list[int]:
    """The places of the PReLUs of the network."""
    return [place for place, node in enumerate(ops.nodes[: ops.nknown]) if _has_slopes(node)]


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
