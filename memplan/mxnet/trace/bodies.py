"""What runs in a loop or a branch."""

from __future__ import annotations

from typing import Any

from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import COND, FOREACH, WHILE_LOOP


def bodies(node: Node) -> list[tuple[Any, list[int]]]:
    """What runs in a loop or a branch, and which inputs its variables are, in their order.

    Of any other op that is nothing.
    """
    attrs, graphs = Attributes(node), node.subgraphs
    if node.op == FOREACH:
        kinds = ("in_data_locs", "in_state_locs", "remain_locs")
        order = [place for kind in kinds for place in attrs.numbers(kind)]
        return [(graphs[0], [order.index(place) for place in range(len(order))])]
    if node.op == WHILE_LOOP:
        return [(graphs[1], attrs.numbers("func_input_locs"))]
    if node.op == COND:
        places = [attrs.numbers(f"{kind}_input_locs") for kind in ("then", "else")]
        return list(zip(graphs[1:], places, strict=True))
    return []
