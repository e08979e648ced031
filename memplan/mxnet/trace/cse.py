"""Merging equal nodes of a network, as MXNet does before it differentiates.

Follows src/executor/eliminate_common_expr_pass.cc (tag 1.9.1).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from memplan.mxnet.trace.nnvm import Entry, Node, copy_repeats, depth_first
from memplan.mxnet.trace.probe import merges


def merge_equal_nodes(outputs: list[Entry]) -> list[Entry]:
    """``outputs`` after every op that equals an earlier one (same inputs) is replaced by it.

    The nodes must have their ``infos``; they are changed in place. Where
    MXNET_ELIMINATE_COMMON_EXPR is 0 MXNet merges nothing, nor does this.
    """
    while True:
        pairs = _equal_pairs(outputs)
        if not pairs:
            return outputs
        for first, twin in pairs:
            outputs = _replace(outputs, first, twin)
            first.duplicates += (twin,)
        outputs = copy_repeats(outputs, first=0)


def _equal_pairs(outputs: list[Entry]) -> list[tuple[Node, Node]]:
    groups: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for node in depth_first(outputs):
        if node.inputs:
            attrs = tuple(sorted(node.attrs.items()))
            sources = tuple(node.inputs)
            groups[node.op, attrs, sources].append(node)
    twins = [same for same in groups.values() if len(same) > 1 and merges(same[0])]
    return [(same[0], other) for same in twins for other in same[1:]]


def _replace(outputs: list[Entry], first: Node, twin: Node) -> list[Entry]:
    for node in depth_first(outputs):
        node.inputs = [(first if source is twin else source, k) for source, k in node.inputs]
        node.control = tuple(first if source is twin else source for source in node.control)
    first.control += twin.control
    return [(first if source is twin else source, k) for source, k in outputs]
