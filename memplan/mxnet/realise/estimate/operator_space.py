"""What operators without oneDNN take on a CPU beside what they read and write.

Most take nothing: they compute element by element, or element after element. Some ask MXNet for
temporary space (get_space_typed in its src/operator), as large as what they read, or larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memplan.mxnet.realise.estimate.box_space import BOX_FORMULAS
from memplan.mxnet.realise.estimate.no_space import takes_nothing
from memplan.mxnet.realise.estimate.numpy_space import NUMPY_FORMULAS, of_scalar
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.gradient import ZERO_OPS
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import CONVOLUTIONS

# The temporary space of each, in arrays of the size of its first input.
_SPACE = {
    "_backward_LayerNorm": 2,  # what is normalized, and the gradient by gamma (layer_norm-inl.h)
    "_backward_GroupNorm": 2,  # the same (group_norm-inl.h)
    "_npi_std": 1,  # what differs from the mean (numpy/np_broadcast_reduce_op.h)
    "_npi_var": 1,  # the same
    "moments": 1,  # the squares of what differs from the mean (nn/moments-inl.h)
    "softmax_cross_entropy": 1,  # the probabilities (loss_binary_op-inl.h)
}

# Those that roll pictures out into columns, one by one, and the place of their weight.
_OF_ONE_PICTURE = {"Convolution": 1, "_contrib_DeformableConvolution": 2}

# Those that sort (tensor/ordering_op-inl.h). Places are numbers of so many bytes.
_SORTS = frozenset({"argsort", "sort", "topk"})
_PLACE_NBYTES = 4


def space_nbytes(node: Node) -> int:
    """The temporary space that ``node`` asks for, of which it writes; 0 where none is known."""
    call = node.call
    if node.op in ZERO_OPS:  # the gradient of what only a choice reads, by whatever op that is
        return 0
    of_op = of_scalar if call.op.endswith("_scalar") else _FORMULAS.get(call.op)
    if of_op is not None:
        return of_op(node, call)
    if is_convolution_of_mxnet(node):
        return _of_one_picture(node, call) if call.op == "Convolution" else _of_pictures(call)
    times = _SPACE.get(node.op, 0)
    data = node.infos.inputs[0] if times else None
    return 0 if data is None else times * data.nbytes


def label_nbytes(node: Node) -> int:
    """The bytes of the label that ``node`` copies to count what is valid (softmax_output-inl.h).

    Only packed steps count them: an executor's blocks hold a gradient of that label, as large as
    it, which nobody writes.
    """
    call = node.call
    if node is call or call.op != "SoftmaxOutput" or call.attrs.get("normalization") != "valid":
        return 0
    label, out = call.infos.inputs[1], call.infos.outputs[0]
    # Where the label is of the shape of the output, it is probabilities, all of them valid.
    return 0 if label is None or out is None or label.shape == out.shape else label.nbytes


def is_convolution_of_mxnet(node: Node) -> bool:
    """Is a (de)convolution, or are its gradients, computed without oneDNN?

    That is so of other dtypes than float32, and where MXNet is told not to use it.
    """
    call = node.call
    data = call.infos.inputs[0] if call.op in CONVOLUTIONS else None
    return data is not None and (data.dtype != "float32" or not onednn_is_enabled())


def _of_one_picture(_: Node, call: Node) -> int:
    """The columns of one picture (col_buffer_size of nn/convolution-inl.h).

    A convolution of points has none.
    """
    weight, out = call.infos.inputs[_OF_ONE_PICTURE[call.op]], call.infos.outputs[0]
    if weight is None or out is None:
        return 0
    if call.op == "Convolution" and math.prod(weight.shape[2:]) == 1:
        return 0
    places = int(call.attrs.get("num_group", "1")) * math.prod(out.shape[2:])
    return math.prod(weight.shape[1:]) * places * weight.itemsize


def _of_upsampling(_: Node, call: Node) -> int:
    return _of_pictures(call) if call.attrs.get("sample_type") == "bilinear" else 0


def _of_pictures(call: Node) -> int:
    """The columns of a deconvolution, and what it reads, of as many pictures as are allowed.

    Its attribute says how many MB it may take (InitTemp of nn/deconvolution-inl.h). An UpSampling
    by interpolation is one, with a group for each channel.
    """
    data, weight = call.infos.inputs[:2]
    out = call.infos.outputs[0]
    if data is None or weight is None or out is None:
        return 0
    columns = out.shape[1] * math.prod(weight.shape[2:])
    of_picture = (columns + data.shape[1]) * math.prod(data.shape[2:]) * data.itemsize
    most = int(call.attrs.get("workspace", "512")) << 20
    return of_picture * max(1, min(most // max(1, of_picture), data.shape[0]))


def _of_sort(node: Node, call: Node) -> int:
    """What is sorted, the places of it, and what is turned round to be sorted by another axis.

    What is asked for beyond that is not written. The gradient has the places of what was taken.
    """
    data, read = call.infos.inputs[0], node.infos.inputs[0]
    if data is None or read is None:
        return 0
    if node is not call:
        return _PLACE_NBYTES * read.nelements
    axis, ndim = call.attrs.get("axis", "-1"), len(data.shape)
    is_turned = axis != "None" and int(axis) % ndim != ndim - 1
    nbytes = (2 if is_turned else 1) * data.nbytes + _PLACE_NBYTES * data.nelements
    if call.attrs.get("ret_typ") == "mask":
        taken = int(call.attrs.get("k", "1"))
        length = data.nelements if axis == "None" else data.shape[int(axis)]
        nbytes += _PLACE_NBYTES * (data.nelements // max(1, length)) * (taken or length)
    return nbytes


def _of_take(node: Node, call: Node) -> int:
    """The places by which the gradient sorts, where they are of another axis than the first.

    For each place two numbers of four bytes in temporary space (TakeOpBackwardImpl of
    tensor/indexing_op.h), both again and one of eight in vectors (SortByKey of tensor/sort_op.h),
    and half of the latter in the buffer of a stable sort.
    """
    data, places = call.infos.inputs[:2]
    if node is call or data is None or places is None:
        return 0
    axis = int(call.attrs.get("axis", "0")) % len(data.shape)
    return 28 * places.nelements + 4 * (data.shape[axis] + 1) if axis else 0


def _of_alignment(node: Node, call: Node) -> int:
    """What a CTCLoss computes for all alignments (get_workspace_size of nn/ctc_loss-inl.h).

    An example has the probabilities of each letter and of all of them, those of each place of its
    text, with blanks between, at each time, and four rows of such places. Numbers have four bytes.
    """
    data, label = call.infos.inputs[:2]
    if node is not call or data is None or label is None:
        return 0
    ntimes, nexamples, nletters = data.shape
    nplaces = 2 * label.shape[1] + 1
    return 4 * nexamples * (nletters * (ntimes + 1) + nplaces * (ntimes + 4))


def _of_broadcast_sum(node: Node, call: Node) -> int:
    """Where the numbers lie of which one of the gradient is the sum.

    Of these ops the gradients of two arrays that are not of one shape are computed so
    (ReduceWithExtraMem of tensor/broadcast_reduce-inl.h).
    """
    left, right, out = *call.infos.inputs[:2], call.infos.outputs[0]
    if node is call or left is None or right is None or out is None or left.shape == right.shape:
        return 0
    fewest = min(left.nelements, right.nelements)
    return _PLACE_NBYTES * (out.nelements // max(1, fewest))


def _of_draws(node: Node, call: Node) -> int:
    """The probabilities, summed up, and a number for each draw (random/sample_multinomial_op.h)."""
    data, out = call.infos.inputs[0], call.infos.outputs[0]
    if node is not call or data is None or out is None:
        return 0
    return 4 * (data.nelements + out.nelements)


_FORMULAS: dict[str, Callable[[Node, Node], int]] = {
    **dict.fromkeys(_SORTS, _of_sort),
    "_contrib_DeformableConvolution": _of_one_picture,
    "UpSampling": _of_upsampling,
    "take": _of_take,
    "CTCLoss": _of_alignment,
    "_sample_multinomial": _of_draws,
    "broadcast_add": _of_broadcast_sum,
    "broadcast_sub": _of_broadcast_sum,
    **BOX_FORMULAS,
    **NUMPY_FORMULAS,
}


def is_known(node: Node) -> bool:
    """Is it known what ``node`` takes?"""
    call = node.call
    return call.op in _FORMULAS or call.op in _SPACE or takes_nothing(call.op)
