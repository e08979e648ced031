"""Parameters that a hybridized block returns as they are: MXNet takes no gradient of them there.

A step is one graph, in which there is no difference between such an output and its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.errors import ArgumentError
from memplan.mxnet.train.blocks.calls import Ops


def refuse_returned_parameters(ops: Ops, params: Mapping[str, Any]) -> None:
    """ArgumentError where a step would train any of ``params`` by way of such an output.

    Whether the loss reads the output, and not the parameter elsewhere, is not known.
    """
    if not ops.passed:
        return
    trained = {place for place in ops.trained(params) if place < ops.nknown}
    for block, place in ops.passed:
        if place in trained:
            name = ops.nodes[place]["name"]
            raise ArgumentError(
                f"hybridized block {block.name!r} returns parameter {name!r} as it is, and MXNet "
                f"takes no gradient of it there, which a planned step would; return "
                f"F.identity(parameter), through which the gradient goes, or F.BlockGrad(parameter)"
                f", or train the block without a plan"
            )
