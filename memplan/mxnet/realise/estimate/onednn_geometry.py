"""A convolution as oneDNN's kernels see it: how many channels it has, and where it looks."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.nnvm import EntryInfo, Node


@dataclass(frozen=True)
class Axis:
    """A dimension in which the kernel slides; one without such a dimension has length 1."""

    data: int = 1
    out: int = 1
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    padding: int = 0

    @property
    def extent(self) -> int:
        """From the first place that the kernel looks at to the last."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def is_dilated(self) -> bool:
        return self.dilation > 1

    @property
    def padding_behind(self) -> int:
        """The padding that the last place looks at; negative where data is left over."""
        return self.behind(self.out)

    def behind(self, nout: int) -> int:
        """The padding that the last one of the first ``nout`` places looks at."""
        return (nout - 1) * self.stride + self.extent - self.data - self.padding


@dataclass(frozen=True)
class Convolution:
    """Channels are counted by group; a signal has no height, a picture no depth."""

    batch: int
    groups: int
    ninputs: int
    noutputs: int
    ndim: int
    depth: Axis
    height: Axis
    width: Axis

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        return self.depth, self.height, self.width

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.ninputs == self.noutputs == 1

    @property
    def is_of_points(self) -> bool:
        """Does it look at one place at a time, without groups, which has kernels of its own?

        With strides the data is made dense first, where these divide it and it is no volume
        (rtus_prepare of oneDNN 2.4's src/cpu/x64/jit_uni_1x1_conv_utils.hpp).
        """
        is_single = all(axis.kernel == 1 and axis.padding == 0 for axis in self.axes)
        is_whole = all(axis.out * axis.stride == axis.data for axis in self.axes)
        is_dense = all(axis.stride == 1 for axis in self.axes)
        return self.groups == 1 and is_single and is_whole and (self.ndim <= 2 or is_dense)

    @property
    def sees_data_everywhere(self) -> bool:
        """Does the kernel look at some data, and not at padding alone, wherever it is?"""
        return all(max(a.padding, a.padding_behind) < a.extent for a in self.axes)

    @property
    def leaves_out_dilated(self) -> bool:
        """Is it dilated in a dimension in which it is strided, too?"""
        return any(axis.is_dilated and axis.stride > 1 for axis in self.axes)

    def splits(self, block: int) -> bool:
        """Are the channels of both sides whole blocks?"""
        return self.ninputs % block == 0 and self.noutputs % block == 0


def convolution(call: Node, data: EntryInfo, out: EntryInfo) -> Convolution:
    """``call`` of ``data`` that gives ``out``; a Deconvolution is the convolution back."""
    if call.op == "Deconvolution":
        data, out = out, data
    attrs, sizes = Attributes(call), data.shape[2:]
    sides = (attrs.each(name, sizes, 1) for name in ("kernel", "stride", "dilate"))
    columns = (sizes, out.shape[2:], *sides, attrs.each("pad", sizes, 0))
    axes = [Axis(*numbers) for numbers in zip(*columns, strict=True)]
    depth, height, width = [Axis()] * (3 - len(axes)) + axes
    groups = int(call.attrs.get("num_group", "1"))
    channels = data.shape[1] // groups, out.shape[1] // groups
    return Convolution(data.shape[0], groups, *channels, len(axes), depth, height, width)
