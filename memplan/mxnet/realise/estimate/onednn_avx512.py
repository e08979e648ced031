"""What oneDNN's kernels for AVX-512 can do; what they cannot, those for AVX2 may do.

Read in the source of oneDNN 2.4 (init_conf in src/cpu/x64: jit_avx512_common_conv_kernel.cpp,
jit_uni_dw_conv_kernel_utils.cpp). Channels lie side by side in blocks of 16, in groups also of 8 or
4.
"""

from __future__ import annotations

from memplan.mxnet.realise.estimate import onednn_avx2
from memplan.mxnet.realise.estimate.onednn_geometry import Convolution
from memplan.mxnet.realise.estimate.processor import cache_nbytes_of_onednn

BLOCK = 16
_BLOCKS_OF_GROUPS = (16, 8, 4)

# Registers for places that are computed at once, and those that their blocks of channels share.
_PLACES, _REGISTERS, _PLACES_OF_DEPTHWISE = 28, 31, 6
_MOST_BLOCKS, _MOST_BLOCKS_FOR_DATA = 5, 4

_MOST_CODE_NBYTES, _INSTRUCTION_NBYTES = 256 << 10, 15
_MOST_WIDTH_FOR_WEIGHT = 14


def reads_usual_layout(conv: Convolution) -> bool:
    """Are there so few channels that the data is read as MXNet has it?"""
    return conv.ninputs < BLOCK and conv.groups == 1


def suits_forward(conv: Convolution) -> bool:
    """May the convolution itself be computed by such a kernel?"""
    if conv.is_depthwise:
        return onednn_avx2.suits_depthwise(conv, BLOCK, _PLACES_OF_DEPTHWISE)
    is_first = reads_usual_layout(conv)
    block = BLOCK if is_first and conv.noutputs % BLOCK == 0 else _block(conv)
    if not block or not conv.sees_data_everywhere:
        return False
    nblocks = 1 if _is_narrow(conv) else _divisor(conv.noutputs // block, _MOST_BLOCKS)
    width = conv.width
    places = min(width.out, _PLACES if _is_narrow(conv) else _REGISTERS // (nblocks + 1))
    behind = width.behind(width.out - width.out % places)
    nsums = width.kernel * (conv.ninputs if is_first else block) * nblocks * places
    is_short = _is_short(nsums, width.padding > 0, width.padding_behind > 0)
    return max(width.padding, behind) <= places and is_short


def _is_narrow(conv: Convolution) -> bool:
    """Are many places computed at once, and one block of channels?"""
    height, width = conv.height, conv.width
    read = -(-width.data // width.stride) * BLOCK * height.kernel * conv.depth.kernel
    weight = height.kernel * width.kernel * BLOCK * 2 * BLOCK * conv.depth.kernel
    nbytes = 4 * (read + width.out * 2 * BLOCK + weight)
    is_small = width.kernel == 3 and width.out <= _PLACES and nbytes < cache_nbytes_of_onednn(1)
    if is_small and max(width.stride, height.stride) > 1:
        is_small = conv.batch <= 16 and (conv.noutputs <= 192 or height.out <= 10)
    is_wide = width.out <= 147 and conv.noutputs <= 96
    is_single = conv.batch == 1 and (width.out <= _PLACES or is_wide)
    return width.kernel > 3 or is_small or is_single


def suits_data(conv: Convolution) -> bool:
    """May the gradient of its data be?"""
    if conv.is_depthwise:
        return onednn_avx2.suits_data_of_depthwise(conv, BLOCK)
    if conv.is_of_points and conv.splits(BLOCK):
        return True
    block = _block(conv)
    if not block or not conv.sees_data_everywhere or conv.leaves_out_dilated:
        return False
    width = conv.width
    nblocks, places = _places_for_data(conv, block)
    overflow = max(0, width.extent - 1 - width.padding) // width.stride * width.stride
    nsums = width.kernel * block * nblocks * places
    rest = width.data % places
    overflows_behind = width.extent - 1 - max(0, width.padding_behind + rest) >= width.stride
    is_short = _is_short(nsums, overflow > 0, overflows_behind)
    return overflow <= places and onednn_avx2.ends_within(width, places) and is_short


def _places_for_data(conv: Convolution, block: int) -> tuple[int, int]:
    """How many blocks of channels, and places, are computed at once."""
    height, width, nblocks = conv.height, conv.width, conv.ninputs // block
    is_strided = max(height.stride, conv.depth.stride) > 1
    read = width.data * block * 2 * height.kernel
    weight = height.kernel * width.kernel * block * block * 2
    fits = 4 * (read + width.out * block + weight) <= cache_nbytes_of_onednn(1)
    is_between = width.data <= 5 or 8 < width.data <= 13
    has_few = width.kernel == 1 or (width.kernel == 5 and width.data < 8)
    if is_strided or not (has_few or (width.kernel < 5 and (is_between or not fits))):
        is_wide = width.kernel > 3 or (width.kernel == 3 and fits and width.out > 8)
        if is_wide or is_strided or nblocks % 2:
            return 1, min(width.data, _PLACES)
        return 2, min(width.data, _REGISTERS // 3)
    most = _divisor(nblocks, _MOST_BLOCKS_FOR_DATA)
    return most, min(width.data, _REGISTERS // (most + 1))


def suits_weight(conv: Convolution) -> bool:
    """May the gradient of its weight be?"""
    if conv.is_depthwise:
        return onednn_avx2.suits_weight_of_depthwise(conv, BLOCK)
    if conv.is_of_points and conv.splits(BLOCK):
        return True
    of_colours = conv.ninputs <= 3 and conv.groups == 1
    if conv.noutputs % BLOCK or (conv.ninputs % BLOCK and not of_colours):
        return False
    depth, height, width = conv.axes
    return (
        conv.sees_data_everywhere
        and not depth.is_dilated
        and not (height.is_dilated and (height.stride > 1 or height.extent > height.data))
        and max(height.padding, height.padding_behind) <= height.extent // 2
        and max(width.padding, width.padding_behind) <= _PLACES
        and (depth.padding == 0 or depth.kernel < depth.data + depth.padding)
        and width.kernel <= _MOST_WIDTH_FOR_WEIGHT
    )


def _block(conv: Convolution) -> int:
    """How many channels lie side by side; 0 where no block fits."""
    blocks = _BLOCKS_OF_GROUPS if conv.groups > 1 else (BLOCK,)
    return next((block for block in blocks if conv.splits(block)), 0)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)


def _is_short(nsums: int, *is_apart: bool) -> bool:
    """Is the code short enough, if the ends that are apart are written out by themselves?"""
    return (1 + sum(is_apart)) * nsums * _INSTRUCTION_NBYTES <= _MOST_CODE_NBYTES
