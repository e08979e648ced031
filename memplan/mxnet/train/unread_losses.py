"""Loss operators among a block's outputs that the loss of a step does not read.

Their gradients need none of their outputs. MXNet computes them where the block runs as a graph,
which it differentiates whole, and not where the block gets arrays; a step computes those that are
in its network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.train.block_changes import hybridized
from memplan.mxnet.train.nesting import leaves

# Whether a Custom op is one is said by code of the script's.
_LOSSES = frozenset(
    """Custom LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput MakeLoss SVMOutput
    SoftmaxOutput make_loss""".split()
)


def refuse_unread_losses(
    block: mx.gluon.HybridBlock,
    losses: Any,
    outputs: Any,
    params: Mapping[str, Any],
    *,
    keep_outputs: bool,
) -> None:
    """TraceError where a step would train by other loss operators of ``block`` than MXNet does.

    ``losses`` are Symbols computed of ``outputs``, which the step has, too, with ``keep_outputs``;
    ``params`` are the parameters by their names. A block without a loss returns the losses itself.
    """
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
        in_graph = [root for root in roots if node["name"].startswith(root.prefix)]
        # Of a graph within MXNet computes all gradients, but only if the loss reads some output.
        if (in_graph and roots != [block]) or keep_outputs != bool(in_graph):
            raise TraceError(
                f"the loss does not read op {node['name']!r} ({node['op']}) of block "
                f"{block.name!r}, whose gradient needs none of its output: whether MXNet trains by "
                f"it depends on what is hybridized, and a step does so only with "
                f"keep_outputs=True. Write softmax for probabilities, put BlockGrad around what "
                f"the op reads, or return that, and compute it outside of the block"
            )


def _trains(nodes: Sequence[Any], index: int, params: Mapping[str, Any]) -> bool:
    """Does a parameter get a gradient by way of this one of the ``nodes``?"""
    found, left = {index}, [index]
    while left:
        node = nodes[left.pop()]
        parameter = params.get(node["name"]) if node["op"] == "null" else None
        if parameter is not None and parameter.grad_req != "null":
            return True
        if node["op"] == "BlockGrad":
            continue
        new = {source for source, *_ in node["inputs"]} - found
        found |= new
        left += new
    return False
