"""Outputs of backward operators that nobody reads: in packed memory they are not there.

MXNet's executor asks no operator for them, but has memory for them all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from memplan.mxnet.realise.direct_call import may_be_partial
from memplan.mxnet.realise.loops import states_to_differentiate
from memplan.mxnet.realise.packed_rules import needs_state
from memplan.mxnet.realise.rewrite import unwritten
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.nnvm import EntryInfo, Node
from memplan.step.graph import TrainingGraph

# Layers that write these gradients, whatever they are asked for (Backward of MXNet's
# src/operator/spatial_transformer-inl.h, crop-inl.h, correlation-inl.h and the like). MXNet makes
# an array for one that nobody wants (PushOperator of src/imperative/imperative_utils.h), which no
# plan counts. Of all that autograd calls on a CPU, but for frozen weights: an RNN without oneDNN
# writes zeros for them, and a Convolution_v1 of many pictures part of their gradient.
_WRITTEN_UNASKED = {
    "Correlation": (0, 1),
    "Crop": (0, 1),
    "SpatialTransformer": (0, 1),
    "_contrib_DeformableConvolution": (0, 1, 2),  # that of a bias is not
    "_contrib_MultiBoxDetection": (0, 1, 2),
}

# Their kernels look at what is asked of each gradient (nn/layer_norm-inl.h, group_norm-inl.h).
_EACH_BY_ITSELF = frozenset({"_backward_GroupNorm", "_backward_LayerNorm"})


def without_unread(graph: TrainingGraph, nodes: Sequence[Node], device_type: str) -> TrainingGraph:
    """``graph``, whose ops are ``nodes``, in which what need not be written takes no bytes."""
    read = {*graph.heads, *(tensor for op in graph.ops for tensor in op.inputs)}
    ops, tensors = list(graph.ops), list(graph.tensors)
    for index, (op, node) in enumerate(zip(graph.ops, nodes, strict=True)):
        unread = {place for place, tensor in enumerate(op.outputs) if tensor not in read}
        if left_out := _left_out(node, unread, device_type):
            for place in left_out:
                tensor = op.outputs[place]
                tensors[tensor] = dataclasses.replace(tensors[tensor], nbytes=0, nelements=0)
            handovers = tuple(h for h in op.handovers if h.output not in left_out)
            ops[index] = dataclasses.replace(op, handovers=handovers)
    return dataclasses.replace(graph, ops=tuple(ops), tensors=tuple(tensors))


def is_left_out(graph: TrainingGraph, tensor: int, info: EntryInfo) -> bool:
    """Is it a tensor that is not written, because it has no bytes to be written into?"""
    return info.nelements > 0 and not graph.tensors[tensor].nbytes


def asked_for_unread(forward: Node) -> frozenset[int]:
    """The inputs whose gradients autograd is asked for, whoever reads them.

    Those that the backward op needs, and those that it writes anyhow: it does so in packed memory.
    """
    return states_to_differentiate(forward).union(_WRITTEN_UNASKED.get(forward.op, ()))


def _left_out(node: Node, unread: Collection[int], device_type: str) -> set[int]:
    """Which outputs of a backward op need not be written, of those that nobody reads.

    Autograd is not asked for them, some kernels write none, and others can be told so.
    """
    forward = node.forward
    if forward is None or not unread:
        return set()
    if needs_state(node):
        return set(unread) - asked_for_unread(forward)
    if device_type == "cpu" and may_be_partial(node.op) and _heeds_requests(node):
        # oneDNN computes the gradients of weight and bias together, or neither: asked for the bias
        # alone a convolution writes both, and a dense layer none. A norm computes each by itself.
        together = set() if node.op in _EACH_BY_ITSELF else set(range(1, node.noutputs))
        return set(unread) if together <= set(unread) else set(unread) - together
    return set(unread).intersection(unwritten(node, forward))


def _heeds_requests(node: Node) -> bool:
    """Does the kernel that computes ``node`` leave alone what it is not asked for?

    MXNet's own for a convolution of points writes the gradient of its data all the same
    (nn/convolution-inl.h), and what it does for a deconvolution was not looked at.
    """
    if node.op not in ("_backward_Convolution", "_backward_Deconvolution"):
        return True
    data = node.infos.inputs[1]
    return onednn_is_enabled() and data is not None and data.dtype == "float32"
