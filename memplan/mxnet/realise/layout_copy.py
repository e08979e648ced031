"""Copies of arrays in their layouts of oneDNN's, for arrays of another shape, too.

So MXNet's executor has an array that it shares between two shapes. MXNet's copy of an array has the
usual layout, a sum of one term that of the term (MKLDNNSumForward of MXNet's
src/operator/nn/mkldnn/mkldnn_sum.cc). The C API refuses it for an output of another shape, but a
direct call does not look at that.
"""

from __future__ import annotations

from memplan.mxnet.realise.direct_call import may_be_partial, partial_call
from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.imperative import Call

_SUM, _OF_ONE = "add_n", {"num_args": "1"}


def can_copy() -> bool:
    """Can it be called directly here?"""
    return may_be_partial(_SUM)


def copy_of(inputs: Handles, outputs: Handles) -> Call:
    """A call that copies the only array of ``inputs`` into that of ``outputs``, of its shape."""
    return Call(_SUM, _OF_ONE, inputs, outputs)


class LayoutCopy(Call):
    """Copies an array, the only one of ``inputs``, into that of ``outputs``, of another shape."""

    settles = False

    __slots__ = ()

    def __init__(self, inputs: Handles, outputs: Handles) -> None:
        super().__init__(_SUM, _OF_ONE, inputs, outputs)
        call = partial_call(_SUM, tuple(_OF_ONE.items()), inputs, outputs, ())
        self._function, self._arguments = call
