"""Gradients that several ops read, and ops that must be the only readers of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memplan.errors import TraceError
from memplan.mxnet.trace.nnvm import Entry, Node, count_readers
from memplan.mxnet.trace.operators import is_true


def check_shared_gradients(order: Sequence[Node], full: Sequence[Entry]) -> None:
    """TraceError for an op that shares the gradient of its output, and must not.

    MXNet takes the backward op of a hard_sigmoid for an identity (FInplaceIdentity in
    elemwise_unary_op_basic.cc), so that it writes over that gradient before others have read it, or
    does not run at all. That of an np.average without weights divides it where it lies
    (numpy/np_broadcast_reduce_op.h), and tells nobody.
    """
    nreaders = count_readers(order, full)
    for node in order:
        if node.op == "_backward_hard_sigmoid":
            fault = "(hard_sigmoid) shares the gradient of its output with another op"
            advice = "clip(alpha * x + beta, 0, 1)"
        elif node.op == "_backward_np_average" and not _has_weights(node):
            fault = "(np.average without weights) shares the gradient of its output with another op"
            advice = "np.mean(x)"
        else:
            continue
        if is_shared(node.inputs[0], nreaders):
            assert node.forward is not None
            raise TraceError(
                f"{node.forward.name!r} {fault}, as the terms of a sum do, and MXNet then computes "
                f"gradients that depend on the memory that they run in; write {advice}"
            )


def _has_weights(backward: Node) -> bool:
    forward = backward.forward
    return forward is not None and is_true(forward.attrs.get("weighted", "True"))


def is_shared(entry: Entry, nreaders: Mapping[Entry, int]) -> bool:
    """Does another op read the memory of ``entry``? An op with one input may return a view."""
    while nreaders[entry] == 1:
        inputs = entry[0].inputs
        if len(inputs) != 1:
            return False
        [entry] = inputs
    return True
