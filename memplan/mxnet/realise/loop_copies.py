"""Gradients that MXNet's loops compute wrongly, or not at all, of what their bodies read.

MXNet 1.9.1 has the operator that reads an input other than states and parts of data add its
gradient to what is there, in every iteration. Some operators write it instead. So in the loops of
packed steps such an operator reads a copy, whose backward op adds as it should.

Some operators hand on the gradient of their output as that of what they read, uncopied, such as
that of a sum to both of its terms. Where that is added up, the other term gets the gradient of all
iterations so far; where a state or a part of data is read, the array of its gradient is the one
that the loop gave for the gradient of an output, and MXNet ends in an error of storage types, for
the iteration before finds none. So there a copy is read, too, and a sum is one of ``add_n``, which
copies the gradient for each term, in the order in which MXNet adds them up.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.nnvm import VARIABLE, Node
from memplan.mxnet.trace.operators import COND, FOREACH, WHILE_LOOP

Json = Any

#: Those that do not add, by what they did with grad_req="add" and some number in the array of the
#: gradient: each operator in tests/helpers, and others with a gradient. They overwrite it, leave it
#: as it was, scale it, or raise. A few that run on a GPU only are here for safety.
DO_NOT_ADD = frozenset(
    """Crop LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput SVMOutput
    SoftmaxOutput SpatialTransformer _contrib_DeformableConvolution
    _contrib_ModulatedDeformableConvolution _contrib_MultiBoxDetection _contrib_MultiBoxPrior
    _contrib_MultiBoxTarget _contrib_box_iou _contrib_box_nms _contrib_count_sketch _contrib_fft
    _contrib_hawkesll _contrib_ifft _linalg_gelqf _linalg_gemm _linalg_gemm2 _linalg_inverse
    _linalg_syevd _linalg_trmm _linalg_trsm _np_cumsum _np_moveaxis _np_trace _npi_diff
    _npi_dsplit _npi_einsum _npi_flip _npi_hsplit _npi_mean _npi_norm _npi_polyval _npi_rot90
    _npi_solve _npi_tensordot _npi_tensorinv _npi_where _npi_where_lscalar _npi_where_rscalar
    _split_v2 amp_cast amp_multicast clip mean moments reverse""".split()
)

#: Those that do not add the gradient of one of their inputs, and which: of a gamma that is fixed,
#: of an array that is read for its shape, of lengths, of indices.
DO_NOT_ADD_ONE = {
    "BatchNorm": 1,
    "_contrib_BatchNormWithReLU": 1,
    "_contrib_BilinearResize2D": 1,
    "softmax": 1,
    "take": 1,
}

# Those that hand on the gradient of their output as that of what they read, and so do sums.
_HAND_ON = frozenset({"_contrib_round_ste", "_contrib_sign_ste"})
_SUM = "elemwise_add"

# Loops within are not known to add, and read copies for safety.
_READ_COPIES = DO_NOT_ADD | {FOREACH, WHILE_LOOP, COND}

# Which subgraph of a loop runs in every iteration.
_BODY = {FOREACH: 0, WHILE_LOOP: 1}


def symbol_with_copies(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """``symbol``, whose loops and branches are those :func:`with_copies`."""
    return symbol_json.load(_within(symbol_json.parse(symbol)))


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
    """The body ``graph``, where copies are read of variables that need it, and sums are add_n.

    Of those ``added_up`` an operator that does not add reads copies.
    """
    variables = set(graph["arg_nodes"])

    def reads_copy(op: str, place: int, source: int) -> bool:
        does_not_add = op in _READ_COPIES or DO_NOT_ADD_ONE.get(op) == place
        return source in (variables if op in _HAND_ON else added_up if does_not_add else ())

    graph = graph | {"nodes": [_copying_gradient(node, variables) for node in graph["nodes"]]}
    copied = {
        source
        for node in graph["nodes"]
        for place, (source, *_) in enumerate(node["inputs"])
        if reads_copy(node["op"], place, source)
    }
    if not copied:
        return graph
    nodes: list[Json] = []
    place_of: dict[int, int] = {}
    copy_of: dict[int, int] = {}
    for number, node in enumerate(graph["nodes"]):
        inputs = []
        for place, (source, *rest) in enumerate(node["inputs"]):
            places = copy_of if reads_copy(node["op"], place, source) else place_of
            inputs.append([places[source], *rest])
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


def _copying_gradient(node: Json, variables: set[int]) -> Json:
    """``node``, or an add_n of its terms if it is a sum of which some are ``variables``."""
    if node["op"] != _SUM or variables.isdisjoint(source for source, *_ in node["inputs"]):
        return node
    return node | {"op": "add_n", "attrs": node.get("attrs", {}) | {"num_args": "2"}}


def _rows(graph: Json, place_of: Mapping[int, int], count: int) -> list[int]:
    """Where the outputs of each node begin; a copy has one."""
    before, number_of = graph["node_row_ptr"], {place: n for n, place in place_of.items()}
    rows = [0]
    for place in range(count):
        number = number_of.get(place)
        width = 1 if number is None else before[number + 1] - before[number]
        rows.append(rows[-1] + width)
    return rows
