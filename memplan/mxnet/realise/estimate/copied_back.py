"""What operators of oneDNN take on a CPU that MXNet lets write over what they read, or to nowhere.

They do not write over it: each is computed beside it and copied then, which DNNL_VERBOSE=1 shows as
a reorder that changes nothing (CreateMKLDNNMem of src/operator/nn/mkldnn/mkldnn_base.cc). MXNet's
own operators, by which it computes what oneDNN does not know, do write over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.layouts import is_along_last_axis, reads_any_layout
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import is_true
from memplan.step.graph import Op, TrainingGraph

# The operators that do so, and LRN, which leaves something else, with the most dimensions of their
# first input of which oneDNN computes them (SupportMKLDNNAct and the like of src/operator/nn).
_MOST_DIMENSIONS = {
    "_backward_Activation": 5,
    "_backward_FullyConnected": 4,
    "_backward_LeakyReLU": 5,
    "_backward_Pooling": 5,
    "_backward_log_softmax": 4,
    "_backward_softmax": 4,
    "LRN": 4,
}

# In inference another one, which MXNet itself computes in training (SoftmaxOutputComputeExCPU).
_MOST_DIMENSIONS_IN_INFERENCE = _MOST_DIMENSIONS | {"SoftmaxOutput": 4}

# Those that write in temporary space where MXNet wants no output of theirs (kNullOp), as where they
# run again for the order alone. Others do nothing then, or were not seen to take more.
_MOST_DIMENSIONS_UNREAD = {"Convolution": 5, "Deconvolution": 5, "FullyConnected": 4}


def copied_back_nbytes(graph: TrainingGraph, nodes: Sequence[Node]) -> list[int]:
    """Op by op of ``graph``, which ``nodes`` are: the bytes of what is computed beside its place.

    And what an LRN of oneDNN's leaves for a gradient of its own, and MXNet drops: of twice the data
    half is written (mincore says so).
    """
    is_inference = graph.nforward == len(graph.ops)
    most_dimensions = _MOST_DIMENSIONS_IN_INFERENCE if is_inference else _MOST_DIMENSIONS
    return [
        graph.tensors[op.outputs[0]].nbytes
        if _is_of_onednn(node, most_dimensions)
        and (node.op == "LRN" or _overwrites(graph, index, op))
        else 0
        for index, (op, node) in enumerate(zip(graph.ops, nodes, strict=True))
    ]


def nbytes_if_overwriting(graph: TrainingGraph, nodes: Sequence[Node]) -> list[int]:
    """Op by op, the bytes of what is computed beside its place where an op is to write over it."""
    return [
        graph.tensors[op.outputs[0]].nbytes
        if op.handovers and _is_of_onednn(node, _MOST_DIMENSIONS)
        else 0
        for op, node in zip(graph.ops, nodes, strict=True)
    ]


def nbytes_if_unread(graph: TrainingGraph, nodes: Sequence[Node]) -> list[int]:
    """Op by op, the bytes that it writes in temporary space where nobody reads its output."""
    return [
        graph.tensors[op.outputs[0]].nbytes if _is_of_onednn(node, _MOST_DIMENSIONS_UNREAD) else 0
        for op, node in zip(graph.ops, nodes, strict=True)
    ]


def is_beside_space(node: Node) -> bool:
    """Does oneDNN compute ``node`` in memory of its own, not in MXNet's temporary space?

    These never ask for that (TmpMemMgr::Init of src/operator/nn/mkldnn/mkldnn_base-inl.h).
    """
    return node.op in ("LRN", "SoftmaxOutput") or node.op.endswith("softmax")


def _overwrites(graph: TrainingGraph, index: int, op: Op) -> bool:
    """Does ``op`` write where something lies that nobody reads later?"""
    taken = (op.inputs[handover.input] for handover in op.handovers)
    return any(graph.readers[each][-1] == index and each not in graph.heads for each in taken)


def _is_of_onednn(node: Node, most_dimensions: Mapping[str, int]) -> bool:
    """Does oneDNN compute ``node``, of first inputs of so many dimensions by operator?"""
    most = most_dimensions.get(node.op, 0)
    data = node.infos.inputs[0] if most else None
    if data is None or data.dtype != "float32" or len(data.shape) > most:
        return False
    if not (onednn_is_enabled() and reads_any_layout(node)):
        return False
    if not node.op.endswith("softmax"):
        return not is_true(node.attrs.get("multi_output"))  # of a SoftmaxOutput
    is_plain = node.attrs.get("temperature", "None") == "None"
    return is_plain and is_along_last_axis(node, len(data.shape))
