"""What oneDNN's kernels for AVX2 can do, which it asks if those for AVX-512 cannot.

Read in the source of oneDNN 2.4 (init_conf in src/cpu/x64: jit_avx2_conv_kernel_f32.cpp,
jit_avx2_1x1_conv_kernel_f32.cpp, jit_uni_dw_conv_kernel_utils.cpp). Channels lie side by side in
blocks of 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from memplan.mxnet.realise.estimate.onednn_geometry import Axis, Convolution

BLOCK = 8

# Places that are computed at once, registers, and how wide a kernel may be for the gradient of a
# weight. A kernel wider than that of the last line has padding or strides, not both.
_PLACES, _PLACES_OF_DEPTHWISE, _REGISTERS = 3, 4, 15
_MOST_WIDTH_FOR_WEIGHT, _MOST_WIDTH_FOR_ALL = 13, 7


def reads_usual_layout(conv: Convolution) -> bool:
    """Are there so few channels that the data is read as MXNet has it?"""
    return conv.ninputs * conv.groups < BLOCK


def suits_forward(conv: Convolution) -> bool:
    """May the convolution itself be computed by such a kernel?"""
    if conv.is_depthwise:
        return suits_depthwise(conv, BLOCK, _PLACES_OF_DEPTHWISE)
    if conv.noutputs % BLOCK or (conv.ninputs % BLOCK and not reads_usual_layout(conv)):
        return False
    width, height = conv.width, conv.height
    is_strided, is_padded = max(width.stride, height.stride) > 1, width.padding or height.padding
    if width.kernel > _MOST_WIDTH_FOR_ALL and is_strided and is_padded:
        return False
    return conv.sees_data_everywhere and _has_room(width)


def _has_room(width: Axis) -> bool:
    """Does padding concern the first and the last of the steps that go along a row only?"""
    places = min(_PLACES, width.out)
    if width.padding > places:
        return False
    behind = max(0, width.behind(width.out - width.out % places))
    if behind > places * width.stride and width.out > places:
        places = min(behind // width.stride + width.out % places, width.out, _REGISTERS // 2)
        behind = max(0, width.behind(width.out - width.out % places))
        return places >= max(width.padding, behind)
    return True


def suits_data(conv: Convolution) -> bool:
    """May the gradient of its data be?"""
    if conv.is_depthwise:
        return suits_data_of_depthwise(conv, BLOCK)
    if conv.is_of_points and conv.splits(BLOCK):
        return True
    above = conv.height.stride if conv.ndim > 1 else 1
    if above != conv.width.stride or conv.depth.stride > 1 or conv.leaves_out_dilated:
        return False
    places = max(_places_for_data(conv), default=(0, 0))[1]
    return (
        conv.splits(BLOCK)
        and conv.sees_data_everywhere
        and places > 0
        and ends_within(conv.width, places)
    )


def _places_for_data(conv: Convolution) -> Iterator[tuple[int, int]]:
    """How many places may be computed at once, after how many sums that makes."""
    width = conv.width
    overflow = max(0, width.extent - 1 - width.padding) // width.stride * width.stride
    for nblocks in (1, 2, 3, 4):
        for unroll in range(width.stride, width.data + width.stride, width.stride):
            is_whole = conv.ninputs // BLOCK % nblocks == 0
            fits = unroll * nblocks + unroll // width.stride <= _REGISTERS
            places = min(unroll, width.data)
            if is_whole and fits and (overflow <= places or places == width.data):
                yield -(-places // width.stride) * nblocks, places


def ends_within(width: Axis, places: int) -> bool:
    """Can the end of a row, and what it looks at, be computed in steps of so many places?"""
    rest = width.data % places
    overflow = max(0, width.extent - 1 - width.padding_behind - rest) // width.stride * width.stride
    if overflow > places:
        return False
    return width.data <= places or (places % width.stride == 0 and width.padding_behind + rest >= 0)


def suits_weight(conv: Convolution) -> bool:
    """May the gradient of its weight be?"""
    if conv.is_depthwise:
        return suits_weight_of_depthwise(conv, BLOCK)
    if conv.is_of_points and conv.splits(BLOCK):
        return True
    of_colours = conv.ninputs == 3 and conv.groups == 1
    if conv.noutputs % BLOCK or (conv.ninputs % BLOCK and not of_colours):
        return False
    depth, height, width = conv.axes
    return (
        conv.sees_data_everywhere
        and not any(axis.is_dilated for axis in conv.axes)
        and max(depth.padding, depth.padding_behind) <= 0
        and width.kernel <= _MOST_WIDTH_FOR_WEIGHT
        and height.kernel <= height.data
        and depth.kernel <= depth.data
    )


def suits_depthwise(conv: Convolution, block: int, most_places: int) -> bool:
    """May a convolution with one channel in each group be computed, ``block`` of them at a time?"""
    width = conv.width
    places = min(most_places, width.out)
    behind = width.behind(width.out - width.out % places)
    is_whole = conv.ndim == 2 and conv.groups % block == 0
    return is_whole and conv.sees_data_everywhere and max(width.padding, behind) <= places


def suits_data_of_depthwise(conv: Convolution, block: int) -> bool:
    """May the gradient of its data be?"""
    is_whole = conv.ndim == 2 and conv.groups % block == 0
    return is_whole and not any(axis.is_dilated for axis in conv.axes)


def suits_weight_of_depthwise(conv: Convolution, block: int) -> bool:
    """May the gradient of its weight be?"""
    height, width = conv.height, conv.width
    paddings = height.padding, height.padding_behind
    return (
        suits_data_of_depthwise(conv, block)
        and width.stride <= width.kernel <= 3
        and all(max(a.padding, a.padding_behind) <= a.kernel // 2 for a in (height, width))
        and height.data >= height.kernel + -height.padding % height.stride
        and all(padding <= 1 or padding % height.stride == 0 for padding in paddings)
    )
