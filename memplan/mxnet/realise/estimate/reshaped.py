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
