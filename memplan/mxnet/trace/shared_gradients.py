"""Gradients that several ops read, and ops that must be the only readers of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from memplan.errors import TraceError
from memplan.mxnet.trace.nnvm import Entry, Node


def check_shared_gradients(order: Sequence[Node], full: Sequence[Entry]) -> None:
    """TraceError for a hard_sigmoid that shares the gradient of its output with another op.

    MXNet takes its backward op for an identity (FInplaceIdentity in elemwise_unary_op_basic.cc),
    so that it writes over that gradient before others have read it, or does not run at all.
    """
    nreaders = Counter(entry for node in order for entry in node.inputs)
    nreaders.update(full)
    for node in order:
        if node.op == "_backward_hard_sigmoid" and is_shared(node.inputs[0], nreaders):
            assert node.forward is not None
            raise TraceError(
                f"{node.forward.name!r} (hard_sigmoid) shares the gradient of its output with "
                f"another op, as the terms of a sum do, and MXNet then computes gradients that "
                f"depend on the memory that they run in; write clip(alpha * x + beta, 0, 1)"
            )


def is_shared(entry: Entry, nreaders: Mapping[Entry, int]) -> bool:
    """Does another op read the memory of ``entry``? An op with one input may return a view."""
    while nreaders[entry] == 1:
        inputs = entry[0].inputs
        if len(inputs) != 1:
            return False
        [entry] = inputs
    return True
