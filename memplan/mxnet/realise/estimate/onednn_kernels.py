"""Which convolutions oneDNN computes on a CPU by kernels of its own, which want its own layouts.

All others are products of matrices, in the usual layout, for which pictures are rolled out into
columns. oneDNN would also round channels up to whole blocks, but MXNet takes no kernel whose arrays
are larger than its own (src/operator/nn/mkldnn/mkldnn_convolution.cc). DNNL_VERBOSE=1 says which
kernel was taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

from memplan.mxnet.realise.estimate import onednn_avx2, onednn_avx512
from memplan.mxnet.realise.estimate.onednn_geometry import Convolution, convolution
from memplan.mxnet.realise.estimate.processor import has_avx512
from memplan.mxnet.trace.nnvm import Node

# Modules that say what a kind of kernels can do.
Kinds = tuple[ModuleType, ...]


class Kernel(NamedTuple):
    """How a convolution, or a gradient of one, is computed.

    Are its ``data``, and its ``output``, in a layout of oneDNN's? Or is it a product of matrices,
    which takes columns?
    """

    data: bool
    output: bool
    has_columns: bool = False

    @property
    def turned_round(self) -> Kernel:
        """The same for the convolution back."""
        return Kernel(self.output, self.data, self.has_columns)


class Kernels(NamedTuple):
    """Those for a convolution, for the gradient of its data, and for that of its weight."""

    forward: Kernel
    of_data: Kernel
    of_weight: Kernel


_MATRICES = Kernel(False, False, has_columns=True)
_OWN, _OF_FEW_CHANNELS = Kernel(True, True), Kernel(False, True)

# Whether kernels for AVX-512 suit the gradient of the data, the convolution, the gradient of the
# weight.
_SUITS_AVX512 = (onednn_avx512.suits_data, onednn_avx512.suits_forward, onednn_avx512.suits_weight)


def knows_dtype(call: Node) -> bool:
    """Does oneDNN know the dtypes that ``call`` reads and writes first?

    Of those that MXNet trains with it knows float32 alone: MXNet's own code computes all others.
    """
    infos = (*call.infos.inputs[:1], *call.infos.outputs[:1])
    return all(info is None or info.dtype == "float32" for info in infos)


def kernels(call: Node) -> Kernels:
    """How oneDNN computes ``call``, a Convolution or Deconvolution whose shapes are known."""
    data, out = call.infos.inputs[0], call.infos.outputs[0]
    if data is None or out is None or not knows_dtype(call) or len(data.shape) < 3:
        return Kernels(_MATRICES, _MATRICES, _MATRICES)
    conv = convolution(call, data, out)
    if call.op == "Deconvolution":  # it is the gradient of a convolution, and its gradient is one
        back, forth, of_weight = map(functools.partial(_kinds_back, conv), _SUITS_AVX512)
        kernels_back = _of_data(conv, back), _forward(conv, forth), _of_weight(conv, of_weight)
        return Kernels(*(kernel.turned_round for kernel in kernels_back))
    kinds = _kinds()
    of_data = _of_data(conv, kinds)
    if of_data.has_columns and call.inputs[0][0].is_variable:
        of_data = Kernel(False, False)  # of the data of a network no gradient is computed
    return Kernels(_forward(conv, kinds), of_data, _of_weight(conv, kinds))


def _forward(conv: Convolution, kinds: Kinds) -> Kernel:
    for kind in kinds:
        if kind.suits_forward(conv):
            return _OF_FEW_CHANNELS if kind.reads_usual_layout(conv) else _OWN
    return _MATRICES


def _of_data(conv: Convolution, kinds: Kinds) -> Kernel:
    return _OWN if any(kind.suits_data(conv) for kind in kinds) else _MATRICES


def _of_weight(conv: Convolution, kinds: Kinds) -> Kernel:
    if any(kind.suits_weight(conv) for kind in kinds):
        return _OWN if conv.ninputs > 3 or conv.is_depthwise else _OF_FEW_CHANNELS
    return _MATRICES


def _kinds() -> Kinds:
    """The kinds of kernels that oneDNN asks, in its order."""
    return (onednn_avx512, onednn_avx2) if has_avx512() else (onednn_avx2,)


def _kinds_back(conv: Convolution, suits: Callable[[Convolution], bool]) -> Kinds:
    """Those that it asks for a deconvolution: for the product that ``suits`` is about.

    None where AVX-512 suits ``conv`` with its channels rounded up alone: MXNet cannot take what is
    offered then, and oneDNN asks no other kind.
    """
    if not has_avx512() or suits(conv):
        return _kinds()
    are_read_as_they_are = onednn_avx512.reads_usual_layout(conv) and not conv.is_of_points
    rounded = _rounded(conv, keeps_inputs=are_read_as_they_are and suits is not _SUITS_AVX512[0])
    return () if suits(rounded) else _kinds()


def _rounded(conv: Convolution, *, keeps_inputs: bool) -> Convolution:
    """``conv`` with whole blocks of channels; oneDNN rounds none in groups of several channels."""
    if conv.is_depthwise:
        return replace(conv, groups=_whole(conv.groups))
    if conv.groups > 1:
        return conv
    ninputs = conv.ninputs if keeps_inputs else _whole(conv.ninputs)
    return replace(conv, ninputs=ninputs, noutputs=_whole(conv.noutputs))


def _whole(nchannels: int) -> int:
    """``nchannels`` rounded up to whole blocks."""
    return -(-nchannels // onednn_avx512.BLOCK) * onednn_avx512.BLOCK
