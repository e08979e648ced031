"""Operators that take nothing on a CPU beside what they read and write, nor do their backward ops.

By what they register in MXNet's src/operator: they ask for no temporary space (FResourceRequest,
ForwardResource, BackwardResource), or for some numbers or a row, or for nothing where arrays are
dense and on a CPU (ReduceWorkspaceSize of tensor/broadcast_reduce-inl.h is 0), or only where they
add to what is there (kAddTo of tensor/la_op.h). And their code makes no large arrays of its own.
Where one takes something in some cases, or its backward op does,
:mod:`memplan.mxnet.realise.estimate.operator_space` tells of it.
"""

from __future__ import annotations

# Of each kind some were measured: a process that trains such an op on arrays of 20 MB in packed
# memory grows by 1 to 3 MB beyond these, code of MXNet's included.
_OF_ND = frozenset(
    """_arange _contrib_AdaptiveAvgPooling2D _contrib_arange_like _contrib_BilinearResize2D
    _contrib_box_decode _contrib_box_encode _contrib_box_iou _contrib_div_sqrt_dim
    _contrib_gradientmultiplier _contrib_index_array _contrib_index_copy
    _contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
    _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
    _contrib_MultiBoxPrior _contrib_ROIAlign _contrib_round_ste _contrib_RROIAlign
    _contrib_sign_ste _contrib_SyncBatchNorm _equal _eye _full _greater _greater_equal _hypot
    _identity_with_attr_like_rhs _lesser _lesser_equal _linalg_extractdiag _linalg_extracttrian
    _linalg_gemm _linalg_gemm2 _linalg_makediag _linalg_maketrian _linalg_potrf _linalg_potri
    _linalg_sumlogdiag _linalg_syrk _linalg_trmm _linalg_trsm _linspace _logical_and _logical_or
    _logical_xor _maximum _minimum _mod _not_equal _ones _power _ravel_multi_index _scatter_set_nd
    _shuffle _slice_assign _split_v2 _unravel_index _zeros _zeros_without_dtype abs Activation
    arccos arccosh arcsin arcsinh arctan arctanh argmax argmax_channel argmin batch_dot batch_take
    BatchNorm_v1 BilinearSampler BlockGrad Cast cbrt ceil clip col2im Concat Correlation cos cosh
    Crop degrees depth_to_space diag dot Dropout elemwise_div elemwise_mul elemwise_sub Embedding
    erf erfinv exp expand_dims expm1 fix Flatten floor gamma gammaln gather_nd GridGenerator
    GroupNorm hard_sigmoid im2col InstanceNorm L2Normalization LayerNorm LeakyReLU
    LinearRegressionOutput log log10 log1p log2 log_softmax logical_not LogisticRegressionOutput
    MAERegressionOutput make_loss MakeLoss max mean min nanprod nansum negative norm one_hot
    ones_like Pad pick Pooling Pooling_v1 prod radians rcbrt reciprocal relu repeat Reshape
    reshape_like reverse rint ROIPooling round rsqrt scatter_nd SequenceLast SequenceMask
    SequenceReverse shape_array sigmoid sign sin sinh size_array slice slice_axis slice_like
    SliceChannel smooth_l1 softmax SoftmaxActivation SoftmaxOutput softmin softsign space_to_depth
    SpatialTransformer sqrt square squeeze stack sum SVMOutput SwapAxis tan tanh tile transpose
    trunc where zeros_like""".split()
)

_OF_NUMPY = frozenset(
    """_np_all _np_any _np_atleast_1d _np_atleast_2d _np_atleast_3d _np_copy _np_cumsum _np_diag
    _np_diagflat _np_diagonal _np_max _np_min _np_moveaxis _np_prod _np_reshape _np_squeeze _np_sum
    _np_trace _np_transpose _npi_absolute _npi_arange _npi_arccos _npi_arccosh _npi_arcsin
    _npi_arcsinh _npi_arctan _npi_arctan2 _npi_arctanh _npi_argmax _npi_argmin _npi_around
    _npi_bitwise_and _npi_bitwise_not _npi_bitwise_or _npi_bitwise_xor _npi_blackman
    _npi_broadcast_to _npi_cbrt _npi_ceil _npi_cholesky _npi_column_stack _npi_concatenate
    _npi_copysign _npi_cos _npi_cosh _npi_degrees _npi_diag_indices_from _npi_diff _npi_dsplit
    _npi_dstack _npi_ediff1d _npi_equal _npi_exp _npi_expm1 _npi_exponential _npi_eye _npi_fix
    _npi_flip _npi_floor _npi_full_like _npi_greater _npi_greater_equal _npi_gumbel _npi_hamming
    _npi_hanning _npi_hsplit _npi_hstack _npi_hypot _npi_identity _npi_indices _npi_isfinite
    _npi_isinf _npi_isnan _npi_isneginf _npi_isposinf _npi_lcm _npi_ldexp _npi_less _npi_less_equal
    _npi_log _npi_log10 _npi_log1p _npi_log2 _npi_logical_not _npi_logistic _npi_logspace _npi_mean
    _npi_nan_to_num _npi_negative _npi_normal _npi_normal_n _npi_not_equal _npi_ones _npi_pad
    _npi_pareto _npi_polyval _npi_radians _npi_rayleigh _npi_reciprocal _npi_rint _npi_sign
    _npi_sin _npi_sinh _npi_sqrt _npi_square _npi_stack _npi_tan _npi_tanh _npi_tensordot_int_axes
    _npi_tril _npi_true_divide _npi_trunc _npi_vstack _npi_weibull _npi_where _npi_where_lscalar
    _npi_where_rscalar _npi_where_scalar2 _npi_zeros _npx_relu _npx_reshape _npx_sigmoid""".split()
)

# Two parameters; the states of the generator belong to MXNet (random/sample_op.h).
_RANDOM = frozenset(
    """_random_exponential _random_exponential_like _random_gamma _random_gamma_like
    _random_generalized_negative_binomial _random_generalized_negative_binomial_like
    _random_negative_binomial _random_negative_binomial_like _random_normal _random_normal_like
    _random_poisson _random_poisson_like _random_randint _random_uniform _random_uniform_like
    _sample_exponential _sample_gamma _sample_generalized_negative_binomial
    _sample_negative_binomial _sample_normal _sample_poisson _sample_uniform""".split()
)

_NOTHING = _OF_ND | _OF_NUMPY | _RANDOM


def takes_nothing(op: str) -> bool:
    """Is it known that ``op`` takes nothing?"""
    return op in _NOTHING or op.startswith("broadcast_") or op.endswith("_scalar")
