"""In which layouts operators leave what they write on a CPU: oneDNN's own, or the usual one."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.memory.layouts import ALL, ANY, INPUT, OWN, PLACE, TAKEN, USUAL, Rule, may_copy
from memplan.mxnet.realise.estimate.onednn_kernels import kernels, knows_dtype
from memplan.mxnet.realise.estimate.whole_pictures import is_of_whole_pictures, is_turned
from memplan.mxnet.trace.layouts import KEEPS_LAYOUT, reads_any_layout
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import CONVOLUTIONS, ignored_inputs, places_of_tensors
from memplan.step.graph import TrainingGraph

# The operator of oneDNN that writes over a term in the layout that this has.
SUM = "elemwise_add"

# Gradients whose layout is that of one array that they read (DNNL_VERBOSE=1): a pooling's is that
# of the data, into which the other gradient is brought, and that of an LRN that of the other
# gradient, for which the data is brought into the usual one (Reorder2Default in MXNet's
# src/operator/nn/mkldnn/mkldnn_lrn-inl.h).
_FOLLOW = frozenset({"_backward_LRN", "_backward_Pooling"})

# Gradients that have the layout of the other gradient that they read, be it the usual one, into
# which the data is brought, or for it the output of a relu (MKLDNNActivationBackward of MXNet's
# src/operator/nn/mkldnn/mkldnn_act.cc). That of a BatchNorm is in a layout of oneDNN's if either
# array is, into which the other one is brought; it takes two such layouts as they are.
BRING_DATA = frozenset({"_backward_Activation", "_backward_LeakyReLU"})


def rules(graph: TrainingGraph, nodes: Sequence[Node]) -> tuple[Rule, ...]:
    """In which layouts the ops of ``graph``, which ``nodes`` are, leave what they write.

    None where no schedule has an executor keep copies.
    """
    found = rules_of_ops(graph, nodes)
    return found if may_copy(graph, found) else ()


def rules_of_ops(graph: TrainingGraph, nodes: Sequence[Node]) -> tuple[Rule, ...]:
    """The rule of each op, with the tensors of which it reads only the shape.

    The executor copies these, too (SetupDefaultBlobsIn of MXNet's src/common/exec_utils.h).
    """
    tensor_of = {
        (node, k): tensor
        for op, node in zip(graph.ops, nodes, strict=True)
        for k, tensor in enumerate(op.outputs)
    }
    found = []
    for node in nodes:
        entries = (node.inputs[place] for place in ignored_inputs(node))
        # Explicit steps have other nodes for some ops of the graph, none of which is oneDNN's.
        ignored = tuple(tensor_of[entry] for entry in entries if entry in tensor_of)
        found.append(_rule(node)._replace(ignored=ignored))
    return tuple(found)


def _rule(node: Node) -> Rule:
    if not reads_any_layout(node):
        return Rule(PLACE)
    call = node.call
    if not knows_dtype(call):
        return Rule(USUAL)
    if call.op in CONVOLUTIONS:
        forward, of_data, _ = kernels(call)
        is_own = forward.output if call is node else of_data.data
        return Rule(OWN if is_own else USUAL)
    if takes_parts(node) or node.op not in KEEPS_LAYOUT or falls_back(node):
        return Rule(USUAL)
    if follows(node) or node.op in BRING_DATA:
        leader, _ = leader_and_other(node)
        place = _place_of_tensor(node, leader)
        return Rule(USUAL) if place is None else Rule(INPUT, place)
    if node.op == "add_n":  # uses oneDNN only for terms that all are in layouts of oneDNN's
        return Rule(USUAL if any(source.is_variable for source, _ in node.inputs) else ALL)
    if node.op == SUM:
        return Rule(TAKEN)
    # What a pooling of whole pictures leaves of data in a layout of oneDNN's is in one, too.
    return Rule(OWN if is_turned(node, in_blocks=False) else ANY)


def takes_parts(node: Node) -> bool:
    """Is ``node`` the gradient of a Concat by oneDNN?"""
    return node.op == "_backward_Concat" and not falls_back(node)


def follows(node: Node) -> bool:
    """Is ``node`` a gradient that has the layout of one array that it reads?"""
    return node.op in _FOLLOW and not is_of_whole_pictures(node)


def leader_and_other(node: Node) -> tuple[int, int]:
    """The places of that array, and of the other one.

    Where the gradient of an activation does not read the data, it reads the output in its place.
    """
    brings = node.op in BRING_DATA
    data = next((n for n, e in enumerate(node.inputs) if e == node.call.inputs[0]), int(brings))
    return (0, data) if brings or node.op == "_backward_LRN" else (data, 0)


def _place_of_tensor(node: Node, place: int) -> int | None:
    """Which input of its op the input of ``node`` at ``place`` is; None if it is no tensor."""
    places = places_of_tensors(node)
    return places.index(place) if place in places else None


def falls_back(node: Node) -> bool:
    """Is ``node`` one that oneDNN does not know: a sum, or a Concat or the gradient of one?

    Its arrays are copied into the usual layout for MXNet's own code: those of a Concat that have
    other than two or four dimensions (SupportMKLDNNConcat of src/operator/nn/concat.cc), those of
    a sum that have more than four (SupportMKLDNNSum of tensor/elemwise_binary_op_basic.cc).
    """
    call = node.call
    if call.op == SUM:
        return node is call and ndim(call) > 4
    return call.op == "Concat" and ndim(call) not in (2, 4)


def ndim(call: Node) -> int:
    """The dimensions of what an op reads first; 0 where they are unknown."""
    data = call.infos.inputs[0]
    return 0 if data is None else len(data.shape)
