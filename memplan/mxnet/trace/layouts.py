"""In which memory layouts MXNet's operators read and write arrays on a CPU, by its source, 1.9.1.

An array is in the usual layout, as numpy has it, or in one of oneDNN's own, as with the channels of
pictures in blocks of 8 or 16. A Convolution of oneDNN's writes the latter. Others of oneDNN's read
either and hand it on (:data:`KEEPS_LAYOUT`); all others read the usual one, and leave what they
write in the layout of what lay there, if they write over it (:func:`writes_in_layout_of_place`). So
who is written over, which a schedule decides, decides on layouts, too. That counts twice:

- In numbers, which some ops round by the layout of what they read, and a max pooling and a PReLU
  even get wrong. In memplan/mxnet/realise/ ``in_place`` says what the unplanned step writes over,
  and ``shared_arrays`` what that means for arrays that have several shapes. Explicit and mirror
  plans run once what would decide otherwise (``varying_layouts``; where a Reshape does,
  ``turned_layouts``), and explicit ones keep some inputs from being written over
  (``in_place.kept_in_explicit``). Packed steps write over the same or bring the layout along
  (``packed_layouts``, with ``viewed_arrays``), by calls of ``layout_copy`` and ``usual_layout``.
- In bytes, for MXNet's executor keeps copies for ops that read the usual layout alone. In
  memplan/mxnet/realise/estimate/ ``layout_rules`` says what operators leave in which layouts,
  ``layout_copies`` which copies these are in the base order, where ``reshaped`` and
  ``whole_pictures`` are two kinds of layouts that need more, and :mod:`memplan.memory.layouts`
  which they are by another schedule.
"""

from __future__ import annotations

import re

from memplan.mxnet.trace.nnvm import EntryInfo, Node
from memplan.mxnet.trace.operators import CONVOLUTIONS, is_true

# Operators of oneDNN on a CPU (TIsMKLDNN): they read arrays in any layout.
_ONEDNN = frozenset(
    """Activation BatchNorm Concat Convolution Deconvolution Flatten FullyConnected LRN LeakyReLU
    Pooling RNN Reshape SoftmaxOutput _contrib_BatchNormWithReLU _copy add_n amp_cast amp_multicast
    elemwise_add expand_dims log_softmax slice softmax transpose""".split()
)
_ONEDNN_BACKWARD = frozenset(
    """_backward_Activation _backward_BatchNorm _backward_Concat _backward_Convolution
    _backward_Deconvolution _backward_FullyConnected _backward_LRN _backward_LeakyReLU
    _backward_Pooling _backward_RNN _backward_add _backward_amp_cast _backward_amp_multicast
    _backward_contrib_BatchNormWithReLU _backward_copy _backward_log_softmax
    _backward_softmax""".split()
)

# Those of them that write in the layout of what they read.
KEEPS_LAYOUT = frozenset(
    """Activation BatchNorm Concat LRN LeakyReLU Pooling _contrib_BatchNormWithReLU _copy add_n
    amp_cast amp_multicast elemwise_add _backward_Activation _backward_BatchNorm _backward_LRN
    _backward_LeakyReLU _backward_Pooling _backward_add _backward_amp_cast _backward_amp_multicast
    _backward_contrib_BatchNormWithReLU _backward_copy""".split()
)

# Those of them that add up in the layout of what they read, and write in the usual one, but for the
# softmax of rows (:func:`must_be_in_place`).
_ALONG_AXES = frozenset(
    "SoftmaxOutput _backward_log_softmax _backward_softmax log_softmax softmax".split()
)

# Products of matrices, whose output is in the usual layout whatever they read.
_USUAL = frozenset({"FullyConnected", "RNN", "batch_dot", "dot"})

# What they compute only with these attributes (SupportMKLDNNAct, ...LeakyRelu, ...Pooling).
_ONEDNN_ATTRS = {
    "Activation": ("act_type", ("relu", "sigmoid", "softrelu", "tanh"), ""),
    "LeakyReLU": ("act_type", ("leaky", "elu", "gelu"), "leaky"),
    "Pooling": ("pool_type", ("max", "avg"), "max"),
}


def reads_any_layout(node: Node) -> bool:
    """Does ``node`` read arrays of a CPU in any layout? Others need copies in the usual one.

    It does where MXNet calls oneDNN's function for it, which may find that oneDNN does not know
    the shape, axis or dtype.
    """
    if node.op not in _ONEDNN and node.op not in _ONEDNN_BACKWARD:
        return False
    name = node.op.removeprefix("_backward_")
    if name == "Concat":  # not where axes are counted from the last (BackwardConcatStorageType)
        return int(node.attrs.get("dim", "1")) > 0
    if name == "slice":  # SupportMKLDNNSlice of tensor/matrix_op-inl.h
        return {*re.findall(r"-?[0-9]+", node.attrs.get("step", ""))} <= {"1"}
    if name in ("softmax", "log_softmax"):
        return not _has_lengths_or_dtype(node)
    if name == "Pooling" and not _has_known_layout(node):
        return False
    attribute, layouts, default = _ONEDNN_ATTRS.get(name, ("", ("",), ""))
    return node.attrs.get(attribute, default) in layouts


def adds_along_axes(node: Node) -> bool:
    """Does ``node`` add up in the layout of what it reads, whatever it writes in?"""
    return node.op in _ALONG_AXES and reads_any_layout(node)


def writes_in_layout_of_place(node: Node) -> bool:
    """Does ``node`` leave its output in the layout of what lies where it writes?

    That is so of the gradient of a dense layer's data, too, which oneDNN computes.
    """
    return not reads_any_layout(node) or node.op == "_backward_FullyConnected"


def viewed_inputs(node: Node) -> tuple[int, ...]:
    """The inputs of which MXNet makes views, as it cannot of arrays in layouts of oneDNN's.

    They are the output's gradient and the data of a BatchNorm's backward op, unless the data are
    pictures, by channel (MKLDNNBatchNormBackwardImpl of src/operator/nn/mkldnn). The forward op
    makes a view, too, of a copy.
    """
    return (0, 3) if node.op == "_backward_BatchNorm" and is_of_views(node.call) else ()


def is_of_views(call: Node) -> bool:
    """Is ``call`` a BatchNorm that makes views: of anything but pictures, by channel?"""
    data = call.infos.inputs[0] if call.op == "BatchNorm" else None
    if data is None or data.dtype != "float32":
        return False
    return len(data.shape) != 4 or int(call.attrs.get("axis", "1")) != 1


def must_be_in_place(node: Node) -> bool:
    """Does MXNet end the process where ``node`` does not write over what it reads?

    A softmax along the rows of pictures does, or of sequences, which a convolution leaves in a
    layout of oneDNN's, be it one over one dimension or two.
    """
    data = node.infos.inputs[0] if node.op in ("softmax", "log_softmax") else None
    if data is None or len(data.shape) < 3 or not reads_any_layout(node):
        return False
    return is_along_last_axis(node, len(data.shape)) and _may_have_layout_of_convolution(node)


def must_not_be_over_convolution(node: Node) -> bool:
    """Does MXNet fail where ``node`` writes over a layout of a Convolution's, as MXNet lets it?

    So may a cumsum without an axis, whose output has another shape than the layout is for.
    """
    data = node.infos.inputs[0] if node.op == "_np_cumsum" else None
    if data is None or len(data.shape) < 2 or node.attrs.get("axis", "None") != "None":
        return False
    return _may_have_layout_of_convolution(node)


def _may_have_layout_of_convolution(node: Node) -> bool:
    """May what ``node`` reads be in the layout of a Convolution's output?

    What is read has that, be it by oneDNN or by what writes over it, but for products of matrices,
    such as the scores of attention.
    """
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        for (source, _), info in zip(node.inputs, node.infos.inputs, strict=True):
            is_handed_on = reads_any_layout(node) or _are_as_large(info, node.infos.outputs[0])
            if source.op in CONVOLUTIONS and is_handed_on:
                return True
            if is_handed_on and source not in seen and source.op not in _USUAL:
                seen.add(source)
                waiting.append(source)
    return False


def _are_as_large(one: EntryInfo | None, other: EntryInfo | None) -> bool:
    return one is None or other is None or one.nelements == other.nelements


def is_along_last_axis(softmax: Node, ndim: int) -> bool:
    """Is a ``softmax``, or its gradient, along the last axis of ``ndim`` dimensions?"""
    return int(softmax.attrs.get("axis", "-1")) in (-1, ndim - 1)


def _has_lengths_or_dtype(node: Node) -> bool:
    """Is ``node`` a softmax of rows of several lengths, or its gradient, or that of another dtype?

    See SoftmaxStorageType and SoftmaxGradStorageType (src/operator/nn/softmax.cc).
    """
    is_gradient = node.op.startswith("_backward_")
    has_dtype = is_gradient and node.attrs.get("dtype", "None") != "None"
    return has_dtype or is_true(node.attrs.get("use_length"))


def _has_known_layout(node: Node) -> bool:
    """Is the layout of a pooling one of oneDNN's? Of whole pictures without a kernel none is known.

    See SupportMKLDNNPooling (src/operator/nn/mkldnn/mkldnn_pooling-inl.h).
    """
    is_usual = node.attrs.get("layout", "None") in ("None", "NCW", "NCHW", "NCDHW")
    return is_usual and any(map(str.isdigit, node.attrs.get("kernel", "")))
