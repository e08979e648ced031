"""Loss operators among a block's outputs that the loss of a step does not read.

Their gradients need none of their outputs. MXNet computes them where the block runs as a graph,
which it differentiates whole, and not where the block gets arrays; a step computes those that are
in its network.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.train.nesting import leaves

_LOSSES = frozenset(
    """LinearRegressionOutput LogisticRegressionOutput MAERegressionOutput MakeLoss SVMOutput
    SoftmaxOutput make_loss""".split()
)


def refuse_unread_losses(
    block: mx.gluon.HybridBlock, losses: Any, outputs: Any, *, keep_outputs: bool
) -> None:
    """TraceError where a step would train by other loss operators of ``block`` than MXNet does.

    ``losses`` are Symbols computed of ``outputs``, which the step has, too, with ``keep_outputs``.
    """
    if keep_outputs == block._active or losses is outputs:
        return
    read = list(leaves(losses))
    made = [output for output in leaves(outputs) if isinstance(output, mx.sym.Symbol)]
    nread = len(symbol_json.parse(mx.sym.Group(read))["nodes"])
    # The ops of which the losses are computed come first, and are not there twice.
    others = symbol_json.parse(mx.sym.Group([*read, *made]))["nodes"][nread:]
    for node in others:
        if node["op"] in _LOSSES:
            does, would = ("does", "does not") if block._active else ("does not", "does")
            raise TraceError(
                f"the loss does not read op {node['name']!r} ({node['op']}) of block "
                f"{block.name!r}, whose gradient needs none of its output: MXNet {does} train by "
                f"it, and a step {would}. Write softmax for probabilities, or return what the op "
                f"reads, and compute it outside of the block"
            )
