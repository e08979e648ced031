"""Gradients that MXNet's loops add up over iterations, of what the body reads besides its states.

MXNet 1.9.1 has the operator that reads such an input add its gradient to what is there, in every
iteration. Some operators write it instead, or hand on what they have added up: the gradient of a
sum goes to both of its terms, and the other one then gets that of all iterations so far. So in the
loops of packed steps such an operator reads a copy, whose backward op adds as it should.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from memplan.mxnet.trace.inference import COND, FOREACH, WHILE_LOOP
from memplan.mxnet.trace.nnvm import VARIABLE, Node
from memplan.mxnet.trace.sizes import Attributes

Json = Any

# Of some fifty operators that were tried in a loop those with other gradients than without a graph,
# and those of losses, of which the same is known with grad_req="add". Loops within are not known to
# be among them, and read copies for safety.
_DO_NOT_ADD = frozenset(
    """elemwise_add clip reverse _split_v2 amp_cast SoftmaxOutput LinearRegressionOutput
    LogisticRegressionOutput MAERegressionOutput _contrib_box_nms""".split()
) | {FOREACH, WHILE_LOOP, COND}

# Which subgraph of a loop runs in every iteration.
_BODY = {FOREACH: 0, WHILE_LOOP: 1}


def with_copies(node: Node) -> Json:
    """The subgraphs of ``node``, in which nothing adds up gradients that it cannot add."""
    if node.subgraphs is None:
        return None
    graphs = [_within(graph) for graph in node.subgraphs]
    if node.op in _BODY:
        body = graphs[_BODY[node.op]]
        graphs[_BODY[node.op]] = _reading_copies(body, _added_up(node, body["arg_nodes"]))
    return graphs


def _within(graph: Json) -> Json:
    """``graph`` with copies in the loops that it has."""
    nodes = []
    for item in graph["nodes"]:
        graphs = item.get("subgraphs")
        node = Node(item["op"], item["name"], item.get("attrs", {}), subgraphs=graphs)
        nodes.append(item if graphs is None else item | {"subgraphs": with_copies(node)})
    return graph | {"nodes": nodes}


def _added_up(loop: Node, variables: Sequence[int]) -> set[int]:
    """The ``variables`` of a body that are neither states nor parts of data: of all iterations."""
    attrs = Attributes(loop)
    if loop.op == FOREACH:
        return {variables[place] for place in attrs.numbers("remain_locs")}
    states = attrs.numbers("func_var_locs")
    return {number for place, number in enumerate(variables) if place not in states}


def _reading_copies(graph: Json, added_up: set[int]) -> Json:
    """``graph``, of whose nodes ``added_up`` an operator that does not add reads copies."""
    copied = {
        source
        for node in graph["nodes"]
        for source, *_ in node["inputs"]
        if node["op"] in _DO_NOT_ADD and source in added_up
    }
    if not copied:
        return graph
    nodes: list[Json] = []
    place_of: dict[int, int] = {}
    copy_of: dict[int, int] = {}
    for number, node in enumerate(graph["nodes"]):
        copies = copy_of if node["op"] in _DO_NOT_ADD else {}
        inputs = [[copies.get(source, place_of[source]), *rest] for source, *rest in node["inputs"]]
        place_of[number] = len(nodes)
        nodes.append(copy.deepcopy(node) | {"inputs": inputs})
        if number in copied:
            copy_of[number] = len(nodes)
            name = f"{node['name']}_copy"
            nodes.append({"op": "_copy", "name": name, "inputs": [[place_of[number], 0, 0]]})
    rows = _rows(graph, place_of, len(nodes))
    return graph | {
        "nodes": nodes,
        "arg_nodes": [n for n, node in enumerate(nodes) if node["op"] == VARIABLE],
        "heads": [[place_of[source], *rest] for source, *rest in graph["heads"]],
        "node_row_ptr": rows,
    }


def _rows(graph: Json, place_of: Mapping[int, int], count: int) -> list[int]:
    """Where the outputs of each node begin; a copy has one."""
    before, number_of = graph["node_row_ptr"], {place: n for n, place in place_of.items()}
    rows = [0]
    for place in range(count):
        number = number_of.get(place)
        width = 1 if number is None else before[number + 1] - before[number]
        rows.append(rows[-1] + width)
    return rows
