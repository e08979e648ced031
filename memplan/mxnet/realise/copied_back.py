"""What operators of oneDNN take on a CPU that MXNet lets write over what they read.

They do not: each is computed beside it and copied then, which DNNL_VERBOSE=1 shows as a reorder
that changes nothing (CreateMKLDNNMem of src/operator/nn/mkldnn/mkldnn_base.cc). MXNet's own
operators, by which it computes what oneDNN does not know, do write over it.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import is_along_last_axis, reads_any_layout
from memplan.step.graph import Op, TrainingGraph

# The operators that do so, and the most dimensions of their first input of which oneDNN computes
# them (SupportMKLDNNAct and the like of src/operator/nn).
_MOST_DIMENSIONS = {
    "_backward_Activation": 5,
    "_backward_FullyConnected": 4,
    "_backward_LeakyReLU": 5,
    "_backward_Pooling": 5,
    "_backward_log_softmax": 4,
    "_backward_softmax": 4,
}


def copied_back_nbytes(graph: TrainingGraph, nodes: Sequence[Node]) -> list[int]:
    """Op by op of ``graph``, which ``nodes`` are: the bytes of what is computed beside its place.

    And what an LRN of oneDNN's leaves for a gradient of its own, and MXNet drops: of twice the data
    half is written (mincore says so).
    """
    return [
        graph.tensors[op.outputs[0]].nbytes
        if _is_of_onednn(node) and (node.op == "LRN" or _overwrites(graph, index, op))
        else 0
        for index, (op, node) in enumerate(zip(graph.ops, nodes, strict=True))
    ]


def _overwrites(graph: TrainingGraph, index: int, op: Op) -> bool:
    """Does ``op`` write where something lies that nobody reads later?"""
    taken = (op.inputs[handover.input] for handover in op.handovers)
    return any(graph.readers[each][-1] == index and each not in graph.heads for each in taken)


def _is_of_onednn(node: Node) -> bool:
    """Does oneDNN compute ``node``, an LRN or one of those above?"""
    most = 4 if node.op == "LRN" else _MOST_DIMENSIONS.get(node.op, 0)
    data = node.infos.inputs[0] if most else None
    if data is None or data.dtype != "float32" or len(data.shape) > most:
        return False
    if not (onednn_is_enabled() and reads_any_layout(node)):
        return False
    if not node.op.endswith("softmax"):
        return True
    is_plain = node.attrs.get("temperature", "None") == "None"
    return is_plain and is_along_last_axis(node, len(data.shape))
