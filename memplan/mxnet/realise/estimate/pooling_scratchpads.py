"""The scratchpads that oneDNN keeps for poolings and their gradients on a CPU, by shapes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from memplan.mxnet.realise.estimate.onednn_avx512 import BLOCK
from memplan.mxnet.realise.estimate.onednn_kernels import knows_dtype
from memplan.mxnet.realise.estimate.openmp import threads
from memplan.mxnet.realise.estimate.processor import cache_nbytes_of_onednn, has_avx512
from memplan.mxnet.realise.estimate.whole_pictures import is_turned
from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.layouts import reads_any_layout
from memplan.mxnet.trace.nnvm import Node

# With fewer channels oneDNN takes no such kernel for a pooling, or for its gradient.
_FEWEST, _FEWEST_OF_GRADIENT = 4, 2

# So many places of a window have numbers that fit a byte, in which a max pooling notes the largest.
_MOST_IN_BYTE = 255


def pooling_scratchpads(nodes: Iterable[Node], layouts: Iterable[Sequence[Hashable]]) -> int:
    """oneDNN's scratchpads for poolings and their gradients: for each that differs, kept.

    Its kernels for AVX-512 read channels in blocks. Of data in the usual layout each thread brings
    a block of one picture, or volume, after another into that, and what it computes of it back
    (init_conf of oneDNN 2.4's src/cpu/x64/jit_uni_pool_kernel.cpp). ``nodes`` read their inputs in
    these ``layouts``, None for the usual one.
    """
    sizes: dict[Hashable, int] = {}
    for node, met in zip(nodes, layouts, strict=True):
        call = node.call
        if call.op != "Pooling" or not reads_any_layout(node) or not knows_dtype(call):
            continue
        place = next((n for n, entry in enumerate(node.inputs) if entry == call.inputs[0]), 0)
        if met[place : place + 1] == (None,):
            sizes[node.op, call.key, call.infos.inputs[0], met] = _scratchpad(node)
    return sum(sizes.values())


def _scratchpad(node: Node) -> int:
    """Blocks of what a pooling reads and writes, or its gradient does, and of the notes it takes.

    Where a core's part of the last cache has no room for a block the pooling is done without.
    """
    call = node.call
    data, out = call.infos.inputs[0], call.infos.outputs[0]
    fewest = _FEWEST if call is node else _FEWEST_OF_GRADIENT
    if data is None or out is None or not has_avx512() or is_turned(node, in_blocks=False):
        return 0
    if data.shape[1] < fewest or len(data.shape) < 4 or min(data.shape[-2:]) == 1:
        return 0
    noutputs = BLOCK * math.prod(out.shape[2:])
    nbytes = data.itemsize * (BLOCK * math.prod(data.shape[2:]) + noutputs)
    if nbytes > cache_nbytes_of_onednn(3):
        return 0
    if call.attrs.get("pool_type", "max") == "max":
        nbytes += noutputs * _note_nbytes(call, data.shape[2:])
    return nbytes * min(threads(), data.shape[0] * -(-data.shape[1] // BLOCK))


def _note_nbytes(call: Node, sizes: Sequence[int]) -> int:
    """The bytes of the number of a place in the window of a max pooling."""
    attrs = Attributes(call)
    window = sizes if attrs.get("global_pool") else attrs.each("kernel", sizes, 1)
    return 1 if math.prod(window) <= _MOST_IN_BYTE else 4
