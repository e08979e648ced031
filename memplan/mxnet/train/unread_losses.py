"""Loss operators that the loss of a step does not read: a block returns them, or drops them.

Their gradients need none of their outputs. MXNet computes them where the block runs as a graph,
which it differentiates whole, and not where the block gets arrays; a step computes those that are
in its network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.train.block_changes import hybridized
from memplan.mxnet.train.nesting import leaves
from memplan.mxnet.train.random_order import Call
from memplan.mxnet.train.sums_of_loss import runs_as_graph

# Whether a Custom op is one is said by code of the script's.
_LOSSES = frozenset(
    """Custom LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput MakeLoss SVMOutput
    SoftmaxOutput make_loss""".split()
)


def refuse_unread_losses(
    blocks: Sequence[mx.gluon.Block],
    calls: Sequence[Call],
    losses: Any,
    outputs: Any,
    params: Mapping[str, Any],
    *,
    keep_outputs: bool,
) -> None:
    """TraceError where a step would train by other loss operators of ``blocks`` than MXNet does.

    ``losses`` are Symbols that ``calls`` have computed, of ``outputs`` of the first of the blocks,
    which the step has, too, with ``keep_outputs``; ``params`` are the parameters by their names. A
    block without a loss returns the losses itself.
    """
    made = [output for output in leaves((losses, outputs)) if isinstance(output, mx.sym.Symbol)]
    _refuse_dropped(blocks, calls, mx.sym.Group(made), params)
    _refuse_returned(blocks[0], losses, outputs, params, keep_outputs=keep_outputs)


def _refuse_returned(
    block: mx.gluon.Block,
    losses: Any,
    outputs: Any,
    params: Mapping[str, Any],
    *,
    keep_outputs: bool,
) -> None:
    """TraceError for those that ``block`` returns."""
    roots = list(hybridized([block]))
    if losses is outputs or (keep_outputs == (roots == [block]) and roots in ([], [block])):
        return
    read = list(leaves(losses))
    made = [output for output in leaves(outputs) if isinstance(output, mx.sym.Symbol)]
    nread = len(symbol_json.parse(mx.sym.Group(read))["nodes"])
    # The ops of which the losses are computed come first, and are not there twice.
    nodes = symbol_json.parse(mx.sym.Group([*read, *made]))["nodes"]
    for index in range(nread, len(nodes)):
        node = nodes[index]
        if node["op"] not in _LOSSES or not _trains(nodes, index, params):
            continue
        in_graph = [root for root in roots if _is_of(node, root)]
        # Of a graph within MXNet computes all gradients, but only if the loss reads some output.
        if (in_graph and roots != [block]) or keep_outputs != bool(in_graph):
            raise TraceError(
                f"the loss does not read op {node['name']!r} ({node['op']}) of block "
                f"{block.name!r}, whose gradient needs none of its output: whether MXNet trains by "
                f"it depends on what is hybridized, and a step does so only with "
                f"keep_outputs=True. Write softmax for probabilities, put BlockGrad around what "
                f"the op reads, or return that, and compute it outside of the block"
            )


def _refuse_dropped(
    blocks: Iterable[mx.gluon.Block],
    calls: Sequence[Call],
    symbol: mx.sym.Symbol,
    params: Mapping[str, Any],
) -> None:
    """TraceError for those that ``blocks`` drop of a graph that they read something else of.

    They are not in ``symbol``, what the blocks return, and MXNet trains by them.
    """
    graphs = [call.outputs for call in calls if call.inputs is not None and call.outputs]
    made = [output for outputs in graphs for output in outputs]
    if not made:
        return
    nread = len(symbol_json.parse(symbol)["nodes"])
    nodes = symbol_json.parse(mx.sym.Group([symbol, *made]))["nodes"]
    dropped = [
        place
        for place in range(nread, len(nodes))
        if nodes[place]["op"] in _LOSSES and _trains(nodes, place, params)
    ]
    for root in hybridized(blocks) if dropped else []:
        places = [k for k, n in enumerate(nodes) if n["op"] != VARIABLE and _is_of(n, root)]
        if not places or places[0] >= nread or not runs_as_graph(root, len(places)):
            continue
        for node in (nodes[place] for place in places if place in dropped):
            raise TraceError(
                f"op {node['name']!r} ({node['op']}) of hybridized block {root.name!r} is dropped "
                f"by what calls the block: MXNet trains by it, for it differentiates a graph whole "
                f"of which the loss reads something, and a planned step would not. Put BlockGrad "
                f"around what the op reads, or write softmax for probabilities, or do not "
                f"compute it there"
            )


def _is_of(node: Mapping[str, Any], block: mx.gluon.Block) -> bool:
    """Is ``node`` of the graph of ``block``?"""
    return str(node["name"]).startswith(block.prefix)


def _trains(nodes: Sequence[Any], index: int, params: Mapping[str, Any]) -> bool:
    """Does a parameter get a gradient by way of this one of the ``nodes``?"""
    found, left = {index}, [index]
    while left:
        node = nodes[left.pop()]
        parameter = params.get(node["name"]) if node["op"] == VARIABLE else None
        if parameter is not None and parameter.grad_req != "null":
            return True
        if node["op"] == "BlockGrad":
            continue
        new = {source for source, *_ in node["inputs"]} - found
        found |= new
        left += new
    return False
