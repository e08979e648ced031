"""What networks have in common that differ in names only."""

from __future__ import annotations

import json
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.trace.operators import LOOP


def structure_of(symbol: mx.sym.Symbol) -> str:
    """The same for every network of these ops and variables, whatever the ops are named."""
    return json.dumps(_unnamed(symbol_json.parse(symbol)))


def _unnamed(graph: Any) -> list[Any]:
    """Nodes and heads of a graph, without what differs where a block is called again.

    Those are the names of ops, as recurrent cells count their calls in them, those of loops, which
    MXNet counts, and the third number of an input, which counts how often a parameter's variable
    was written into.
    """
    nodes = [
        {
            **node,
            "attrs": {k: v for k, v in node.get("attrs", {}).items() if k != LOOP},
            "name": node["name"] if node["op"] == VARIABLE else "",
            "inputs": [entry[:2] for entry in node["inputs"]],
            "subgraphs": list(map(_unnamed, node.get("subgraphs", []))),
        }
        for node in graph["nodes"]
    ]
    return [nodes, graph["heads"]]
