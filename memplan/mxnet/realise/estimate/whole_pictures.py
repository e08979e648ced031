"""The layout of the gradient of a pooling of whole pictures, which is none that oneDNN else writes.

oneDNN takes the layout that the gradient of one place by channel has, where all but the batch have
one stride, and puts what is longest first: DNNL_VERBOSE=1 shows acdb for 20 x 28 x 28 pictures, and
acdB16b for 64 x 64 x 64 ones that lie in blocks of 16 channels, as aBcd16b.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

from memplan.mxnet.realise.estimate import onednn_avx2, onednn_avx512
from memplan.mxnet.realise.estimate.processor import has_avx512
from memplan.mxnet.trace.nnvm import Node


class Turned(NamedTuple):
    """Such a layout, with what tells that of one gradient from that of another."""

    of_call: Hashable


def is_of_whole_pictures(node: Node) -> bool:
    """Is ``node`` the gradient of a pooling that leaves one place by channel?"""
    if node.op != "_backward_Pooling" or node.forward is None:
        return False
    out = node.forward.infos.outputs[0]
    return out is not None and math.prod(out.shape[2:]) <= 1


def has_notes_of_any_layout(pooling: Node) -> bool:
    """Are the notes of a max ``pooling`` right for its data in whatever layout, later?

    They are, of whole pictures: one for each channel, in the order of these, unless oneDNN pads.
    """
    data, out = pooling.infos.inputs[0], pooling.infos.outputs[0]
    if data is None or out is None or math.prod(out.shape[2:]) > 1:
        return False
    return data.shape[1] % _block(data.shape[1]) == 0


def is_turned(node: Node, *, in_blocks: bool) -> bool:
    """Is ``node`` the gradient of a pooling of whole pictures that is written in such a layout?

    It is in the layout of the data only if there are at least as many channels as rows, and rows as
    columns. Are channels counted ``in_blocks``, as they lie where the data is in oneDNN's layout?
    """
    data = None if node.forward is None else node.forward.infos.inputs[0]
    if data is None or not is_of_whole_pictures(node):
        return False
    nchannels, *lengths = data.shape[1:]
    sizes = [-(-nchannels // _block(nchannels)) if in_blocks else nchannels, *lengths]
    return sizes != sorted(sizes, reverse=True)


def _block(nchannels: int) -> int:
    """How many channels lie side by side in the layout that oneDNN gives so many."""
    is_whole = nchannels % onednn_avx512.BLOCK == 0
    return onednn_avx512.BLOCK if has_avx512() and is_whole else onednn_avx2.BLOCK
