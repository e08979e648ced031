"""The scratchpads that oneDNN keeps for convolutions and their gradients on a CPU, by shapes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from memplan.mxnet.realise.estimate.columns import Columns
from memplan.mxnet.realise.estimate.onednn_geometry import convolution
from memplan.mxnet.realise.estimate.onednn_kernels import kernels
from memplan.mxnet.realise.estimate.openmp import threads
from memplan.mxnet.realise.estimate.operator_space import is_convolution_of_mxnet
from memplan.mxnet.trace.nnvm import Node, total_nbytes
from memplan.mxnet.trace.operators import CONVOLUTIONS
from memplan.step.graph import TrainingGraph

# A convolution is prepared anew for every combination of layouts that it meets: no more than this
# many were seen on the networks of benchmarks/process_networks.py. In packed steps those that met
# the same ones were prepared once (DNNL_VERBOSE=2): six of a dense block for three combinations,
# and five of a network of equal blocks for one.
LAYOUTS = 3


def scratchpads(graph: TrainingGraph, nodes: Sequence[Node], layouts: Iterable[Hashable]) -> int:
    """oneDNN's scratchpads for convolutions and their gradients: for each that differs, kept.

    Products of matrices take columns (:mod:`memplan.mxnet.realise.estimate.columns`). oneDNN's own
    kernels were seen to take none, with 1, 4 and 8 threads. A gradient of the data that nobody
    reads is not computed. The ops of ``graph`` are ``nodes``; those of equal ``layouts`` meet the
    same ones.
    """
    kinds: dict[Any, set[Hashable]] = {}
    node_of: dict[Any, Node] = {}
    heads = set(graph.heads)
    for op, node, met in zip(graph.ops, nodes, layouts, strict=True):
        call = node.call
        if call.op in CONVOLUTIONS and not is_convolution_of_mxnet(node):
            is_read = bool(graph.readers[op.outputs[0]]) or op.outputs[0] in heads
            kind = (node.op, call.key, call.infos.inputs[:2], is_read)
            kinds.setdefault(kind, set()).add(met)
            node_of[kind] = node
    return sum(
        min(len(layouts_met), LAYOUTS) * _scratchpad(node_of[kind], is_read=kind[-1])
        for kind, layouts_met in kinds.items()
    )


def _scratchpad(node: Node, *, is_read: bool) -> int:
    """That of a convolution, or those of its gradients, once; ``is_read``: is output 0 read?"""
    call = node.call
    found = kernels(call)
    products = list(zip(found, _of_products(call), strict=True))
    if call is not node:
        computed = products[1:] if is_read else products[2:]
        return sum(size for kernel, size in computed if kernel.has_columns)
    kernel, size = products[0]
    columns = size if kernel.has_columns else 0
    # A deconvolution adds its bias to a copy (ref_deconvolution.hpp).
    has_copy = call.op == "Deconvolution" and len(call.inputs) > 2
    return columns + (total_nbytes(call.infos.outputs) if has_copy else 0)


def largest_columns_nbytes(nodes: Iterable[Node]) -> int:
    """The columns of a picture, the largest of which ``nodes`` make a product of matrices."""
    calls = {node.call for node in nodes}
    return max(
        (
            columns.of_picture_nbytes
            for call in calls
            if call.op in CONVOLUTIONS and not is_convolution_of_mxnet(call)
            if (columns := columns_of(call)) and any(each.has_columns for each in kernels(call))
        ),
        default=0,
    )


def _of_products(call: Node) -> tuple[int, int, int]:
    """The columns for a convolution, for the gradient of its data, and for that of its weight."""
    columns = columns_of(call)
    if columns is None:
        return 0, 0, 0
    forward, of_data = columns.forward_nbytes, columns.of_data_nbytes
    if call.op == "Deconvolution":  # it is the gradient of the data of a convolution
        forward, of_data = of_data, forward
    return forward, of_data, columns.of_weight_nbytes


def columns_of(call: Node) -> Columns | None:
    """Those for a convolution or deconvolution, if its shapes are known."""
    data, weight = call.infos.inputs[:2]
    out = call.infos.outputs[0]
    if data is None or weight is None or out is None or len(data.shape) < 3:
        return None
    arrays_nbytes = data.nbytes + weight.nbytes + out.nbytes
    return Columns(convolution(call, data, out), threads(), arrays_nbytes, weight.itemsize)
