"""Layouts of oneDNN's in which arrays are read under another shape than the one they are for.

An operator without oneDNN that only changes a shape (the gradient of a Reshape, of a ``squeeze``)
may write over an array in such a layout: what it writes is brought into that, as it is for the old
shape. Who reads it in the new shape cannot be brought from one layout into the other at once: there
is a copy in the usual layout between both (MKLDNNMemoryCopy of MXNet's
src/operator/nn/mkldnn/mkldnn_base.cc, MKLDNNDataReshape of src/ndarray/ndarray.cc).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from memplan.mxnet.realise.estimate.whole_pictures import Turned
from memplan.mxnet.trace.nnvm import EntryInfo


class Reshaped(NamedTuple):
    """Such a layout: the one of oneDNN's, and the shape that it is for."""

    layout: Hashable
    shape: tuple[int, ...]


def handed_on(layout: Hashable, read: EntryInfo | None, written: EntryInfo | None) -> Hashable:
    """The ``layout`` of an array that was ``read``, for what is ``written`` over it.

    Written in the shape that the layout is for, it is an array like any other of that layout.
    """
    if read is None or written is None:
        return layout
    layout, shape = layout if isinstance(layout, Reshaped) else (layout, read.shape)
    return layout if written.shape == shape else Reshaped(layout, shape)


def ncopies(layout: Hashable, *, is_own: bool) -> int:
    """How many copies bring an array into the layout of a convolution, or into the usual one?

    The first if ``is_own``. No convolution wants the layout of a pooling of whole pictures.
    """
    if isinstance(layout, Reshaped):
        return 1 + is_own
    return int((layout is None) == is_own or isinstance(layout, Turned))


def nbrought(layout: Hashable, wanted: Hashable) -> int:
    """How many copies bring an array into the layout of another one, of the same shape?

    Of oneDNN's there is one for a shape, but for these kinds.
    """
    if layout is None or wanted is None:
        return int(layout is not wanted)
    turned, reshaped = (
        [isinstance(each, kind) for each in (layout, wanted)] for kind in (Turned, Reshaped)
    )
    if turned[0] == turned[1] and reshaped[0] == reshaped[1]:
        return 0
    return 1 + any(reshaped)  # between two shapes by way of the usual layout
