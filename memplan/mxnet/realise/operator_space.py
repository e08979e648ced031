"""What operators without oneDNN take on a CPU beside what they read and write.

Most take nothing: they compute element by element, or element after element. Some ask MXNet for
temporary space (get_space_typed in its src/operator), as large as what they read.
"""

from __future__ import annotations

import math

from memplan.mxnet.trace.nnvm import Node

# The temporary space of each, in arrays of the size of its first input.
_SPACE = {
    "_backward_LayerNorm": 2,  # what is normalized, and the gradient by gamma (layer_norm-inl.h)
    "_backward_GroupNorm": 2,  # the same (group_norm-inl.h)
    "CTCLoss": 1,  # the probabilities (nn/ctc_loss-inl.h)
}

# Those that ask for a row of it at most, as do their backward ops, but for what is above. Of each
# kind some were measured: a process that trains such an op on arrays of 20 MB in packed memory
# grows by 1 to 3 MB beyond these, code of MXNet's included.
_NOTHING = frozenset(
    """_contrib_AdaptiveAvgPooling2D _contrib_arange_like _contrib_BilinearResize2D
    _contrib_div_sqrt_dim _contrib_gradientmultiplier _contrib_interleaved_matmul_encdec_qk
    _contrib_interleaved_matmul_encdec_valatt _contrib_interleaved_matmul_selfatt_qk
    _contrib_interleaved_matmul_selfatt_valatt _contrib_MultiBoxPrior _contrib_round_ste
    _contrib_sign_ste _equal _full _greater _greater_equal _hypot _identity_with_attr_like_rhs
    _lesser _lesser_equal _logical_and _logical_or _logical_xor _maximum _minimum _mod _not_equal
    _np_cumsum _np_max _np_prod _np_sum _np_transpose _npi_concatenate _npi_exp _npi_mean _ones
    _power _split_v2 _zeros _zeros_without_dtype abs Activation arccos arccosh arcsin arcsinh
    arctan arctanh argmax argmin batch_dot BilinearSampler BlockGrad Cast cbrt ceil clip col2im
    Concat Correlation cos cosh CTCLoss degrees depth_to_space dot Dropout elemwise_div
    elemwise_mul elemwise_sub Embedding erf erfinv exp expand_dims expm1 fix Flatten floor gamma
    gammaln GridGenerator GroupNorm hard_sigmoid im2col InstanceNorm L2Normalization LayerNorm
    LeakyReLU LinearRegressionOutput log log10 log1p log2 LogisticRegressionOutput
    MAERegressionOutput make_loss MakeLoss max mean min moments nanprod nansum negative norm
    ones_like Pad pick Pooling prod radians rcbrt reciprocal relu repeat Reshape reshape_like
    reverse rint ROIPooling round rsqrt SequenceMask shape_array sigmoid sign sin sinh slice
    slice_axis slice_like SliceChannel smooth_l1 SoftmaxActivation SoftmaxOutput softmin softsign
    space_to_depth SpatialTransformer sqrt square squeeze stack sum SVMOutput SwapAxis take tan
    tanh tile transpose trunc UpSampling where zeros_like""".split()
)


def space_nbytes(node: Node) -> int:
    """The temporary space that ``node`` asks for; 0 where none is known."""
    if is_convolution_of_mxnet(node):
        return _columns_nbytes(node if node.forward is None else node.forward)
    times = _SPACE.get(node.op, 0)
    data = node.infos.inputs[0] if times else None
    return 0 if data is None else times * data.nbytes


def is_convolution_of_mxnet(node: Node) -> bool:
    """Is a convolution, or are its gradients, computed without oneDNN, because of the dtype?"""
    call = node if node.forward is None else node.forward
    data = call.infos.inputs[0] if call.op == "Convolution" else None
    return data is not None and data.dtype != "float32"


def _columns_nbytes(call: Node) -> int:
    """The columns of one picture (col_buffer_size of nn/convolution-inl.h), but of points none."""
    weight, out = call.infos.inputs[1], call.infos.outputs[0]
    if weight is None or out is None or math.prod(weight.shape[2:]) == 1:
        return 0
    places = int(call.attrs.get("num_group", "1")) * math.prod(out.shape[2:])
    return math.prod(weight.shape[1:]) * places * weight.itemsize


def is_known(node: Node) -> bool:
    """Is it known what ``node`` takes?"""
    name = (node if node.forward is None else node.forward).op
    return name in _NOTHING or name.startswith("broadcast_") or name.endswith("_scalar")
