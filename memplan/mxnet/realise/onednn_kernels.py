"""Which convolutions oneDNN computes on a CPU by kernels of its own, which want its own layouts.

All others are products of matrices, in the usual layout, for which pictures are rolled out into
columns. What a kernel can do is read in the source of oneDNN 2.4, which MXNet 1.9.1 brings (in
src/cpu/x64: jit_avx2_conv_kernel_f32.cpp, jit_uni_dw_conv_kernel_utils.hpp), and DNNL_VERBOSE=1
says which was taken. With AVX-512 they can do more.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from memplan.mxnet.trace.nnvm import EntryInfo, Node
from memplan.mxnet.trace.sizes import Attributes

# The channels that oneDNN's layouts put side by side, at least: 8 with AVX2, 16 with AVX-512.
_BLOCK = 8

# Pictures of so few channels are read in the usual layout, and written in one of oneDNN's.
_FEW_CHANNELS, _FEW_CHANNELS_OF_AVX512 = 7, 3

# What AVX2's kernels can do: so much padding at the left, of a kernel so wide for the gradient of
# a weight, and of a depthwise one.
_MOST_PADDING, _MOST_WIDTH, _MOST_WIDTH_OF_DEPTHWISE = 3, 13, 3

_AVX512 = frozenset("avx512f avx512bw avx512dq avx512vl".split())


class Kernel(NamedTuple):
    """How a convolution, or a gradient of one, is computed.

    Are its ``data``, and its ``output``, in a layout of oneDNN's? Or is it a product of matrices,
    which takes columns?
    """

    data: bool
    output: bool
    has_columns: bool = False


class Kernels(NamedTuple):
    """Those for a convolution, for the gradient of its data, and for that of its weight."""

    forward: Kernel
    of_data: Kernel
    of_weight: Kernel


_MATRICES = Kernel(False, False, has_columns=True)


@functools.cache
def has_avx512() -> bool:
    """Does this machine have what oneDNN's kernels for AVX-512 need?"""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return flags is not None and set(flags[1].split()) >= _AVX512


def kernels(call: Node) -> Kernels:
    """How oneDNN computes ``call``, a Convolution or Deconvolution whose shapes are known."""
    data, out = call.infos.inputs[0], call.infos.outputs[0]
    if data is None or out is None or data.dtype != "float32" or len(data.shape) < 3:
        return Kernels(_MATRICES, _MATRICES, _MATRICES)
    forward, of_data, of_weight = _kernels(call, data, out)
    if call.op == "Deconvolution" and forward.output == forward.data:
        # It is the gradient of a convolution, and its gradient is one.
        return Kernels(of_data, forward, of_weight)
    return Kernels(forward, of_data, of_weight)


def _kernels(call: Node, data: EntryInfo, out: EntryInfo) -> Kernels:
    groups = int(call.attrs.get("num_group", "1"))
    ninputs, noutputs = data.shape[1] // groups, out.shape[1] // groups
    if ninputs == noutputs == 1 and groups > 1:
        return _depthwise(_Geometry(call, data, out), groups)
    few = _FEW_CHANNELS_OF_AVX512 if has_avx512() else _FEW_CHANNELS
    if call.op == "Convolution" and ninputs <= few and noutputs % _BLOCK == 0:
        kernel = Kernel(False, True)
        if has_avx512():
            return Kernels(kernel, kernel, kernel._replace(has_columns=True))
        geometry = _Geometry(call, data, out)
        forward = kernel if geometry.suits_forward() else _MATRICES
        is_own = ninputs == 3 and geometry.suits_weight()
        # Of the data of a network no gradient is computed.
        of_data = Kernel(False, False) if call.inputs[0][0].is_variable else _MATRICES
        return Kernels(forward, of_data, kernel if is_own else _MATRICES)
    if ninputs % _BLOCK or noutputs % _BLOCK:
        return Kernels(_MATRICES, _MATRICES, _MATRICES)
    own = Kernel(True, True)
    if has_avx512():
        return Kernels(own, own, own)
    geometry = _Geometry(call, data, out)
    suits = geometry.suits_forward(), geometry.suits_data(), geometry.suits_weight()
    return Kernels(*(own if fits else _MATRICES for fits in suits))


def _depthwise(geometry: _Geometry, groups: int) -> Kernels:
    if groups % _BLOCK or geometry.ndim != 2:
        return Kernels(_MATRICES, _MATRICES, _MATRICES)
    own = Kernel(True, True)
    suits_weight = not geometry.is_dilated and geometry.width <= _MOST_WIDTH_OF_DEPTHWISE
    of_data, of_weight = (
        own if fits else _MATRICES for fits in (not geometry.is_dilated, suits_weight)
    )
    return Kernels(own, of_data, of_weight)


class _Geometry:
    """Where a convolution looks, and which of AVX2's kernels can do that."""

    def __init__(self, call: Node, data: EntryInfo, out: EntryInfo) -> None:
        if call.op == "Deconvolution":
            data, out = out, data
        self.data, self.out, self.ndim = data.shape[2:], out.shape[2:], len(data.shape) - 2
        attrs = Attributes(call)
        self.kernel, self.stride, self.dilation = (
            attrs.each(name, self.data, 1) for name in ("kernel", "stride", "dilate")
        )
        self.padding = attrs.each("pad", self.data, 0)
        self.width = self.kernel[-1]
        self.is_dilated = any(number > 1 for number in self.dilation)

    def suits_forward(self) -> bool:
        """May the convolution itself be computed by such a kernel?"""
        return self.padding[-1] <= min(_MOST_PADDING, self.out[-1])

    def suits_data(self) -> bool:
        """May the gradient of its data?"""
        above = self.stride[-2] if self.ndim > 1 else 1
        in_depth = self.stride[0] if self.ndim > 2 else 1
        steps = zip(self.stride, self.dilation, strict=True)
        return above == self.stride[-1] and in_depth == 1 and all(1 in pair for pair in steps)

    def suits_weight(self) -> bool:
        """May the gradient of its weight?"""
        pads_depth = self.ndim > 2 and self.padding[0] > 0
        fits = self.ndim == 1 or self.kernel[-2] <= self.data[-2]
        return fits and not (pads_depth or self.is_dilated) and self.width <= _MOST_WIDTH
