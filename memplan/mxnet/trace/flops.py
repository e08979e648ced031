"""Floating-point operations of one op, for rooflines: multiplications and additions counted apart.

Exact for the operators that dominate; one operation per element written for all others, whose
time is a matter of bytes.
"""

from __future__ import annotations

import math

from memplan.mxnet.trace.nnvm import EntryInfo, Node
from memplan.mxnet.trace.operators import is_true

_BACKWARD = "_backward_"


def flops(node: Node) -> int:
    """Operations of ``node``; of a backward op those of each gradient that somebody reads."""
    call = node.forward if node.op.startswith(_BACKWARD) and node.forward else node
    product = _product_flops(call)
    if product is None:
        return sum(info.nelements for info in node.infos.outputs if info is not None)
    if call is node:
        return product
    # Each of the two gradients (of data, of weight) is a product as large as the forward one.
    return 2 * product


def _product_flops(call: Node) -> int | None:
    """Operations of a forward matrix product or convolution; None for any other op."""
    inputs, outputs = call.infos.inputs, call.infos.outputs
    if not inputs or not outputs or inputs[0] is None or outputs[0] is None:
        return None
    data, out = inputs[0], outputs[0]
    weight = inputs[1] if len(inputs) > 1 else None
    if call.op in ("Convolution", "Deconvolution") and weight is not None:
        # Every element of the smaller side meets (channels per group x kernel) weights.
        larger = out if call.op == "Convolution" else data
        return 2 * larger.nelements * math.prod(weight.shape[1:])
    if call.op == "FullyConnected" and weight is not None:
        return 2 * out.nelements * weight.shape[-1]
    if call.op in ("dot", "batch_dot", "_npi_matmul", "_linalg_gemm2") and weight is not None:
        return 2 * out.nelements * _inner_size(call, data)
    if call.op == "RNN" and weight is not None:
        steps_and_batch = math.prod(data.shape[:2])
        return 2 * steps_and_batch * weight.nelements
    return None


def _inner_size(call: Node, data: EntryInfo) -> int:
    # MXNet itself writes "true" on the nodes that it makes.
    transposed = is_true(call.attrs.get("transpose_a"))
    return data.shape[-2 if transposed and len(data.shape) > 1 else -1]
