"""What operators without oneDNN take on a CPU beside what they read and write.

Most take nothing: they compute element by element, or element after element. Some ask MXNet for
temporary space (get_space_typed in its src/operator), as large as what they read, or larger.
"""

from __future__ import annotations

import math

from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.nnvm import Node

# The temporary space of each, in arrays of the size of its first input.
_SPACE = {
    "_backward_LayerNorm": 2,  # what is normalized, and the gradient by gamma (layer_norm-inl.h)
    "_backward_GroupNorm": 2,  # the same (group_norm-inl.h)
    "CTCLoss": 1,  # the probabilities (nn/ctc_loss-inl.h)
    "moments": 1,  # the squares of what differs from the mean (nn/moments-inl.h)
    "softmax_cross_entropy": 1,  # the probabilities (loss_binary_op-inl.h)
}

# Those that roll pictures out into columns, one by one, and the place of their weight.
_OF_ONE_PICTURE = {"Convolution": 1, "_contrib_DeformableConvolution": 2}

# Those that sort (tensor/ordering_op-inl.h). Places are numbers of so many bytes.
_SORTS = frozenset({"argsort", "sort", "topk"})
_PLACE_NBYTES = 4

# Those that ask for a row of it at most, as do their backward ops, but for what is told of here. Of
# each kind some were measured: a process that trains such an op on arrays of 20 MB in packed memory
# grows by 1 to 3 MB beyond these, code of MXNet's included.
_NOTHING = frozenset(
    """_contrib_AdaptiveAvgPooling2D _contrib_arange_like _contrib_BilinearResize2D
    _contrib_DeformableConvolution _contrib_div_sqrt_dim _contrib_gradientmultiplier
    _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
    _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
    _contrib_MultiBoxPrior _contrib_ROIAlign _contrib_round_ste _contrib_sign_ste _equal _full
    _greater _greater_equal _hypot _identity_with_attr_like_rhs _lesser _lesser_equal
    _linalg_extractdiag _linalg_extracttrian _linalg_gemm _linalg_gemm2 _linalg_makediag
    _linalg_maketrian _linalg_potrf _linalg_potri _linalg_sumlogdiag _linalg_syrk _linalg_trmm
    _linalg_trsm _logical_and _logical_or _logical_xor _maximum _minimum _mod _not_equal
    _np_cumsum _np_max _np_prod _np_sum _np_transpose _npi_concatenate _npi_exp _npi_mean _ones
    _power _split_v2 _zeros _zeros_without_dtype abs Activation arccos arccosh arcsin arcsinh
    arctan arctanh argmax argmin argsort batch_dot BilinearSampler BlockGrad Cast cbrt ceil clip
    col2im Concat Correlation cos cosh CTCLoss degrees depth_to_space diag dot Dropout
    elemwise_div elemwise_mul elemwise_sub Embedding erf erfinv exp expand_dims expm1 fix Flatten
    floor gamma gammaln gather_nd GridGenerator GroupNorm hard_sigmoid im2col InstanceNorm
    L2Normalization LayerNorm LeakyReLU LinearRegressionOutput log log10 log1p log2
    LogisticRegressionOutput MAERegressionOutput make_loss MakeLoss max mean min moments nanprod
    nansum negative norm one_hot ones_like Pad pick Pooling prod radians rcbrt reciprocal relu
    repeat Reshape reshape_like reverse rint ROIPooling round rsqrt SequenceLast SequenceMask
    SequenceReverse shape_array sigmoid sign sin sinh slice slice_axis slice_like SliceChannel
    smooth_l1 softmax_cross_entropy SoftmaxActivation SoftmaxOutput softmin softsign sort
    space_to_depth SpatialTransformer sqrt square squeeze stack sum SVMOutput SwapAxis take tan
    tanh tile topk transpose trunc UpSampling where zeros_like""".split()
)


def space_nbytes(node: Node) -> int:
    """The temporary space that ``node`` asks for, of which it writes; 0 where none is known."""
    call = node if node.forward is None else node.forward
    if call.op in _SORTS:
        return _of_sort(node, call)
    if call.op == "_contrib_DeformableConvolution":
        return _of_one_picture(call)
    if call.op == "UpSampling" and call.attrs.get("sample_type") == "bilinear":
        return _of_pictures(call)
    if is_convolution_of_mxnet(node):
        return _of_one_picture(call) if call.op == "Convolution" else _of_pictures(call)
    times = _SPACE.get(node.op, 0)
    data = node.infos.inputs[0] if times else None
    return 0 if data is None else times * data.nbytes


def is_convolution_of_mxnet(node: Node) -> bool:
    """Is a (de)convolution, or are its gradients, computed without oneDNN?

    That is so of other dtypes than float32, and where MXNet is told not to use it.
    """
    call = node if node.forward is None else node.forward
    data = call.infos.inputs[0] if call.op in ("Convolution", "Deconvolution") else None
    return data is not None and (data.dtype != "float32" or not onednn_is_enabled())


def _of_one_picture(call: Node) -> int:
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


def is_known(node: Node) -> bool:
    """Is it known what ``node`` takes?"""
    name = (node if node.forward is None else node.forward).op
    return name in _NOTHING or name.startswith("broadcast_") or name.endswith("_scalar")
