"""Floating-point operations of one op, for rooflines: multiplications and additions counted apart.

Exact for the operators that dominate; one operation per element written for all others, whose
time is a matter of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from memplan.mxnet.trace import einsum
from memplan.mxnet.trace.nnvm import EntryInfo, Node
from memplan.mxnet.trace.operators import is_true

_BACKWARD = "_backward_"

# The places of their weights.
_CONVOLUTIONS = {
    "Convolution": 1,
    "Deconvolution": 1,
    "_contrib_DeformableConvolution": 2,
    "_contrib_ModulatedDeformableConvolution": 3,
}

# Products of two arrays that have no axis in common but those over which is summed up.
_OF_TWO = frozenset("dot _np_dot _npi_tensordot _npi_tensordot_int_axes".split())

# Products of matrices, one by one.
_BATCHED = frozenset("batch_dot _npi_matmul _linalg_gemm _linalg_gemm2".split())

_ATTENTION = "_contrib_interleaved_matmul_"


def flops(node: Node) -> int:
    """Operations of ``node``; of a backward op those of each gradient that somebody reads."""
    call = node.forward if node.op.startswith(_BACKWARD) and node.forward else node
    product = _product_flops(call)
    if product is None:
        return sum(info.nelements for info in node.infos.outputs if info is not None)
    if call is node:
        return product
    # Each of the two gradients (of data, of weight) is a product as large as the forward one.
    return _ngradients(call) * product


def _ngradients(call: Node) -> int:
    """How many products of the size of the forward one the backward op of ``call`` makes."""
    is_of_all = call.op == "_npi_einsum" and not einsum.is_optimized(call)
    return len(call.infos.inputs) if is_of_all else 2


def _product_flops(call: Node) -> int | None:
    """Operations of a forward matrix product or convolution; None for any other op."""
    read = [info for info in call.infos.inputs if info is not None]
    out = call.infos.outputs[0] if call.infos.outputs else None
    if out is None or not read or len(read) < len(call.infos.inputs):
        return None
    data = read[0]
    if call.op in _CONVOLUTIONS:
        # Every element of the smaller side meets (channels per group x kernel) weights.
        larger = data if call.op == "Deconvolution" else out
        return 2 * larger.nelements * math.prod(read[_CONVOLUTIONS[call.op]].shape[1:])
    if call.op == "FullyConnected":
        return 2 * out.nelements * read[1].shape[-1]
    if call.op in _OF_TWO:
        # What is read has m x k and k x n elements, and the result m x n.
        return 2 * math.isqrt(data.nelements * read[1].nelements * out.nelements)
    if call.op in _BATCHED or call.op.startswith(_ATTENTION):
        return 2 * out.nelements * _inner_size(call, read)
    if call.op == "_npi_einsum":
        return einsum.operations(call)
    if call.op == "RNN":
        steps_and_batch = math.prod(data.shape[:2])
        return 2 * steps_and_batch * read[1].nelements
    return None


def _inner_size(call: Node, read: Sequence[EntryInfo]) -> int:
    """How many products are added up to each element of the result."""
    data = read[0]
    if call.op.startswith(_ATTENTION):
        if call.op.endswith("valatt"):
            return read[1].shape[-1]
        # Queries, keys and values lie side by side in one array, or queries in one of their own.
        nparts = 3 if call.op.endswith("selfatt_qk") else 1
        return data.shape[-1] // (nparts * int(call.attrs["heads"]))
    # MXNet itself writes "true" on the nodes that it makes.
    if is_true(call.attrs.get("transpose_a")) and len(data.shape) > 1:
        return data.shape[int(call.attrs.get("axis", "-2"))]
    return data.shape[-1]
