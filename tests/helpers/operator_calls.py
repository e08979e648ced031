"""Operators in common use, each in the middle of a small network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx

from helpers.networks import Network

Symbol = mx.sym.Symbol
Call = Callable[[Symbol], Symbol]
V = mx.sym.Variable
S = mx.sym
CONTRIB = mx.sym.contrib
INTERNAL = mx.sym._internal
NP, NPX = mx.sym.np, mx.sym.npx
SHELL = ("scaled", "input", "reader", "shifted", "output")


def shelled(call: Call, shape: tuple[int, ...]) -> Network:
    """``call`` in the middle of a small network whose other ops may all be flagged."""
    scale = V("scale", shape=(1,) * len(shape))
    body = S.sin(S.broadcast_mul(V("data"), scale, name="scaled"), name="input")
    # The backward op of "output" reads its input, those of "reader" and "shifted" do not.
    body = S._internal._plus_scalar(S.sin(call(body), name="reader"), scalar=1.0, name="shifted")
    return S.square(body, name="output"), {"data": shape}


def vector(name: str, size: int = 4) -> Symbol:
    """A parameter that broadcasts along the channels."""
    return V(name, shape=(1, size, 1, 1))


def half(x: Symbol, axis: int = 1, end: int = 2) -> Symbol:
    return S.slice_axis(x, axis=axis, begin=0, end=end)


def product(parts: Symbol) -> Symbol:
    return parts[0] * parts[1]


def multicast(*parts: Symbol) -> Symbol:
    return S.amp_multicast(*parts, num_outputs=len(parts))


def anchors(x: Symbol) -> Symbol:
    return CONTRIB.MultiBoxPrior(x, sizes=(0.5,))


def class_scores(x: Symbol) -> Symbol:
    return S.softmax(S.reshape(half(x), shape=(0, 2, -1)), axis=1)


def self_attention(qkv: Symbol) -> Symbol:
    scores = CONTRIB.interleaved_matmul_selfatt_qk(qkv, heads=2)
    return CONTRIB.interleaved_matmul_selfatt_valatt(qkv, scores, heads=2)


def affine(x: Symbol) -> Symbol:
    return S.FullyConnected(x, num_hidden=6, name="theta")


def definite(x: Symbol) -> Symbol:
    """A symmetric positive definite matrix."""
    return S.linalg_syrk(x) + INTERNAL._eye(N=4)


def numpy(call: Callable[[Any], Any]) -> Call:
    return lambda x: call(x.as_np_ndarray()).as_nd_ndarray()


IMAGE, MATRIX, SEQUENCE = (2, 4, 8, 8), (4, 6), (5, 3, 4)
LENGTHS = {"sequence_length": 2 + V("length_label", shape=(3,)), "use_sequence_length": True}
QKV = {"num_hidden": 24, "flatten": False, "name": "qkv"}
PROPOSED = {"scales": (1,), "ratios": (1,), "feature_stride": 1, "rpn_min_size": 0}
PROPOSED |= {"rpn_pre_nms_top_n": 6, "rpn_post_nms_top_n": 3}
SQUARE_PAD = (0, 0, 0, 0, 1, 1, 1, 1)

ON_IMAGES: dict[str, Call] = {
    "prelu": lambda x: S.LeakyReLU(x, V("slope"), act_type="prelu"),
    "convolution": lambda x: S.Convolution(x, kernel=(3, 3), num_filter=3),
    "grouped": lambda x: S.Convolution(
        x, kernel=(3, 3), dilate=(2, 2), num_filter=4, num_group=2, no_bias=True
    ),
    "depthwise": lambda x: S.Convolution(x, kernel=(3, 3), num_filter=4, num_group=4),
    "pointwise": lambda x: S.Convolution(x, kernel=(1, 1), stride=(2, 2), num_filter=4),
    "deconvolution": lambda x: S.Deconvolution(x, kernel=(3, 3), stride=(2, 2), num_filter=3),
    "fully connected": lambda x: S.FullyConnected(x, num_hidden=5),
    "dense": lambda x: S.FullyConnected(x, num_hidden=5, no_bias=True, flatten=False),
    "batch norm": lambda x: S.BatchNorm(x, fix_gamma=False),
    "batch norm, fixed gamma": lambda x: S.BatchNorm(x, fix_gamma=True),
    "batch norm, global": lambda x: S.BatchNorm(x, fix_gamma=False, use_global_stats=True),
    "batch norm, axis": lambda x: S.BatchNorm(x, fix_gamma=False, axis=2),
    "batch norm, outputs": lambda x: S.broadcast_add(
        *S.BatchNorm(x, axis=3, output_mean_var=True)[:2]
    ),
    "instance norm": lambda x: S.InstanceNorm(x, V("gamma"), V("beta")),
    "lrn": lambda x: S.LRN(x, nsize=3),
    "concat": lambda x: S.Concat(x, S.cos(x), dim=1),
    "stack": lambda x: S.stack(x, S.cos(x), axis=1),
    "add_n": lambda x: S.add_n(x, S.sin(x), S.cos(x)),
    "slice channel": lambda x: product(S.SliceChannel(x, num_outputs=2)),
    "split": lambda x: product(S.split(x, num_outputs=4, squeeze_axis=True)),
    "slice": lambda x: S.slice(x, begin=(0, 1), end=(2, 3)),
    "slice_axis": lambda x: S.slice_axis(x, axis=2, begin=1, end=5),
    "slice_like": lambda x: S.slice_like(x, S.BlockGrad(half(x))),
    "transpose": lambda x: S.transpose(x, axes=(0, 2, 3, 1)),
    "swap axes": lambda x: S.SwapAxis(x, dim1=1, dim2=2),
    "reshape": lambda x: S.Reshape(x, shape=(0, -1)),
    "reshape_like": lambda x: S.reshape_like(x, S.sin(x)),
    "flatten": S.Flatten,
    "squeeze": lambda x: S.squeeze(S.expand_dims(x, axis=1), axis=1),
    "tile": lambda x: S.tile(x, reps=(1, 2, 1, 1)),
    "repeat": lambda x: S.repeat(x, repeats=2, axis=1),
    "flip": lambda x: S.flip(x, axis=1),
    "pad": lambda x: S.Pad(x, mode="constant", pad_width=SQUARE_PAD),
    "pad, edge": lambda x: S.Pad(x, mode="edge", pad_width=SQUARE_PAD),
    "pad, reflect": lambda x: S.Pad(x, mode="reflect", pad_width=SQUARE_PAD),
    "depth_to_space": lambda x: S.depth_to_space(x, block_size=2),
    "space_to_depth": lambda x: S.space_to_depth(x, block_size=2),
    "broadcast_to": lambda x: S.broadcast_to(S.sum(x, axis=1, keepdims=True), shape=IMAGE),
    "broadcast_axis": lambda x: S.broadcast_axis(
        S.sum(x, axis=(1,), keepdims=True), axis=1, size=4
    ),
    "broadcast_like": lambda x: S.broadcast_like(S.sum(x, axis=1, keepdims=True), x),
    "broadcast_add": lambda x: S.broadcast_add(x, vector("other")),
    "broadcast_sub": lambda x: S.broadcast_sub(x, vector("other")),
    "broadcast_mul": lambda x: S.broadcast_mul(x, vector("other")),
    "broadcast_div": lambda x: S.broadcast_div(x, vector("other_positive")),
    "broadcast_power": lambda x: S.broadcast_power(S.exp(x), vector("other")),
    "broadcast_maximum": lambda x: S.broadcast_maximum(x, vector("other")),
    "broadcast_minimum": lambda x: S.broadcast_minimum(x, vector("other")),
    "broadcast_hypot": lambda x: S.broadcast_hypot(x, vector("other")),
    "broadcast_mod": lambda x: S.broadcast_mod(x, vector("other_positive")),
    "softmax": lambda x: S.softmax(x, axis=1),
    "softmax, warm": lambda x: S.softmax(x, temperature=2.0),
    "softmin": lambda x: S.softmin(x),
    "log_softmax": lambda x: S.log_softmax(x),
    "softmax activation": lambda x: S.SoftmaxActivation(x),
    "softmax activation, channel": lambda x: S.SoftmaxActivation(x, mode="channel"),
    "softmax output": lambda x: S.SoftmaxOutput(S.Flatten(x), V("label", shape=(2,))),
    "softmax output, multi": lambda x: S.SoftmaxOutput(
        x, V("label", shape=(2, 8, 8)), multi_output=True, use_ignore=True, ignore_label=1
    ),
    "svm output": lambda x: S.SVMOutput(S.Flatten(x), V("label", shape=(2,))),
    "linear output": lambda x: S.LinearRegressionOutput(x, V("label")),
    "logistic output": lambda x: S.LogisticRegressionOutput(x, V("label")),
    "absolute output": lambda x: S.MAERegressionOutput(x, V("label")),
    "MakeLoss": lambda x: S.MakeLoss(S.square(x)),
    "make_loss": lambda x: S.make_loss(S.square(x)),
    "BlockGrad": lambda x: x * S.BlockGrad(x),
    "sum": lambda x: S.sum(x, axis=(2, 3)),
    "mean": lambda x: S.mean(x, axis=1),
    "max": lambda x: S.max(x, axis=1),
    "min": lambda x: S.min(x, axis=(1, 2)),
    "prod": lambda x: S.prod(x, axis=1),
    "nansum": lambda x: S.nansum(x, axis=1),
    "nanprod": lambda x: S.nanprod(x, axis=1),
    "norm": lambda x: S.norm(x, axis=1),
    "norm, 1": lambda x: S.norm(x, ord=1, axis=1),
    "norm, all": lambda x: S.norm(x),
    "cumsum": lambda x: S.cumsum(x, axis=1),
    "clip": lambda x: S.clip(x, -0.3, 0.3),
    "smooth_l1": lambda x: S.smooth_l1(x, scalar=1.0),
    "where": lambda x: S.where(S.BlockGrad(x) > 0, x, S.cos(x)),
    "cast": lambda x: S.Cast(S.Cast(x, dtype="float64"), dtype="float32"),
    "amp_cast": lambda x: S.amp_cast(S.amp_cast(x, dtype="float16"), dtype="float32"),
    "identity": S.identity,
    "topk": lambda x: S.topk(x, k=2, ret_typ="value"),
    "topk, mask": lambda x: x * S.topk(x, k=2, ret_typ="mask"),
    "argsort": lambda x: x * S.BlockGrad(S.argsort(x)),
    "argmax": lambda x: S.broadcast_mul(x, S.argmax(x, axis=1, keepdims=True)),
    "argmin": lambda x: S.broadcast_mul(x, S.argmin(x, axis=1, keepdims=True)),
    "zeros_like": lambda x: x + S.zeros_like(x),
    "ones_like": lambda x: x + S.ones_like(x),
    "shape_array": lambda x: S.broadcast_mul(x, S.Cast(S.sum(S.shape_array(x)), dtype="float32")),
    "upsampling": lambda x: S.UpSampling(x, scale=2, sample_type="nearest"),
    "im2col": lambda x: S.im2col(x, kernel=(2, 2)),
    "col2im": lambda x: S.col2im(S.im2col(x, kernel=(2, 2)), kernel=(2, 2), output_size=(8, 8)),
    "adaptive pooling": lambda x: CONTRIB.AdaptiveAvgPooling2D(x, output_size=3),
    "bilinear resize": lambda x: CONTRIB.BilinearResize2D(x, height=5, width=6),
    "roi align": lambda x: CONTRIB.ROIAlign(
        x, V("roi_label", shape=(2, 5)), pooled_size=(2, 2), spatial_scale=1.0
    ),
    "quadratic": lambda x: CONTRIB.quadratic(x, a=1, b=2, c=3),
    "div_sqrt_dim": lambda x: CONTRIB.div_sqrt_dim(x),
    "gradientmultiplier": lambda x: CONTRIB.gradientmultiplier(x, scalar=2.0),
    "round_ste": lambda x: CONTRIB.round_ste(3 * x),
    "sign_ste": lambda x: CONTRIB.sign_ste(x),
    "arange_like": lambda x: S.broadcast_mul(x, CONTRIB.arange_like(x, axis=3)),
    # More than one output, not in operators._SEVERAL_OUTPUTS_SAFE: kept, and so are neighbours.
    "split_v2": lambda x: product(S.split_v2(x, 2, axis=1)),
    "moments": lambda x: product(S.moments(x, axes=(2, 3))),
    "topk, both": lambda x: S.topk(x, k=2, ret_typ="both")[0] * 1.0,
    "anchors": lambda x: anchors(x),
    "anchors' targets": lambda x: product(
        CONTRIB.MultiBoxTarget(anchors(x), V("box_label", shape=(2, 2, 5)), class_scores(x))
    ),
    "detection": lambda x: CONTRIB.MultiBoxDetection(class_scores(x), S.flatten(x), anchors(x)),
    "proposal": lambda x: CONTRIB.Proposal(
        half(S.sigmoid(half(x, 0, 1))),
        half(x, 0, 1),
        V("info_label", shape=(1, 3)),
        **PROPOSED,
    ),
    "proposal, batch": lambda x: CONTRIB.MultiProposal(
        half(S.sigmoid(x)), x, V("info_label", shape=(2, 3)), **PROPOSED
    ),
    "roi pooling": lambda x: S.ROIPooling(
        x, V("roi_label", shape=(2, 5)), pooled_size=(2, 2), spatial_scale=1.0
    ),
    "bilinear sampler": lambda x: S.BilinearSampler(x, half(x)),
    "warp grid": lambda x: S.GridGenerator(half(x), transform_type="warp"),
    "affine grid": lambda x: S.GridGenerator(
        affine(x), transform_type="affine", target_shape=(4, 4)
    ),
    "spatial transformer": lambda x: S.SpatialTransformer(
        x, affine(x), target_shape=(4, 4), transform_type="affine", sampler_type="bilinear"
    ),
    "correlation": lambda x: S.Correlation(x, S.sin(x), max_displacement=2, pad_size=2),
    "batch norm with relu": lambda x: CONTRIB.BatchNormWithReLU(x, fix_gamma=False),
    **{
        f"activation {kind}": lambda x, kind=kind: S.Activation(x, act_type=kind)
        for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    },
    **{
        f"activation {kind}": lambda x, kind=kind: S.LeakyReLU(x, act_type=kind)
        for kind in ("leaky", "elu", "selu", "gelu")
    },
    **{
        f"{pool} pooling, {convention}": lambda x, pool=pool, convention=convention: S.Pooling(
            x,
            kernel=(3, 3),
            stride=(2, 2),
            pool_type=pool,
            pooling_convention=convention,
            p_value=2,
        )
        for pool in ("max", "avg", "sum", "lp")
        for convention in ("valid", "full")
    },
    **{
        f"global {pool} pooling": lambda x, pool=pool: S.Pooling(
            x, pool_type=pool, global_pool=True, p_value=2
        )
        for pool in ("max", "avg", "sum", "lp")
    },
    **{
        f"l2 norm, {mode}": lambda x, mode=mode: S.L2Normalization(x, mode=mode)
        for mode in ("instance", "channel", "spatial")
    },
    **{
        name: lambda x, name=name: getattr(S, name)(0.2 + 0.6 * S.sigmoid(x))
        for name in """abs arccos arcsin arcsinh arctan arctanh cbrt ceil cos cosh degrees erf
        erfinv exp expm1 fix floor gamma gammaln log log10 log1p log2 negative radians rcbrt
        reciprocal relu rint round rsqrt sigmoid sign sin sinh softsign sqrt square tan tanh
        trunc""".split()
    },
    "arccosh": lambda x: S.arccosh(1.1 + S.sigmoid(x)),
    **{
        name: lambda x, name=name: getattr(INTERNAL, name)(S.exp(x), 0.5 + S.sigmoid(x))
        for name in "_plus _minus _mul _div _maximum _minimum _power _hypot _mod".split()
    },
    **{
        name: lambda x, name=name: x * getattr(INTERNAL, name)(x, S.sin(x))
        for name in "_equal _not_equal _greater _lesser _logical_and _logical_xor".split()
    },
    **{
        name: lambda x, name=name: getattr(INTERNAL, name)(0.5 + S.sigmoid(x), scalar=1.2)
        for name in """_plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar
        _rdiv_scalar _power_scalar _rpower_scalar _maximum_scalar _minimum_scalar _mod_scalar
        _rmod_scalar _hypot_scalar""".split()
    },
}
ON_MATRICES: dict[str, Call] = {
    "dot": lambda x: S.dot(x, V("weight", shape=(6, 3))),
    "dot, itself": lambda x: S.dot(x, x, transpose_b=True),
    "batch norm, matrix": lambda x: S.BatchNorm(x, fix_gamma=False),
    "gemm2": lambda x: S.linalg_gemm2(x, x, transpose_b=True),
    "gemm": lambda x: S.linalg_gemm(x, x, S.linalg_syrk(x), transpose_b=True),
    "syrk": S.linalg_syrk,
    "potrf": lambda x: S.linalg_potrf(definite(x)),
    "potri": lambda x: S.linalg_potri(S.linalg_potrf(definite(x))),
    "trmm": lambda x: S.linalg_trmm(S.linalg_syrk(x), x),
    "trsm": lambda x: S.linalg_trsm(S.linalg_potrf(definite(x)), x),
    "sumlogdiag": lambda x: S.linalg_sumlogdiag(definite(x)),
    "inverse": lambda x: S.linalg_inverse(definite(x)),
    "det": lambda x: S.linalg_det(definite(x)),
    "slogdet": lambda x: S.linalg_slogdet(definite(x))[1],
    "gelqf": lambda x: S.linalg_gemm2(*reversed(list(S.linalg_gelqf(x)))),
    "extractdiag": lambda x: S.linalg_extractdiag(S.linalg_syrk(x)),
    "makediag": lambda x: S.linalg_makediag(x),
    "extracttrian": lambda x: S.linalg_extracttrian(S.linalg_syrk(x)),
    "maketrian": lambda x: S.linalg_maketrian(x),
    "multicast, second output": lambda x: multicast(S.cos(x), S.tanh(x))[1],
    "multicast, ends": lambda x: product(multicast(S.cos(x), S.exp(x), S.tanh(x))[0:3:2]),
    "multicast, variable first": lambda x: product(multicast(V("w", shape=MATRIX), S.tanh(x))),
    "multicast, no first gradient": lambda x: product(multicast(S.BlockGrad(x), S.tanh(x))),
    "density": lambda x: S.random_pdf_normal(x, S.sum(x, axis=1), S.exp(S.sum(x, axis=1))),
    **{
        f"np.{name}": numpy(call)
        for name, call in {
            "sum": lambda x: NP.sum(x, axis=1),
            "mean": lambda x: NP.mean(x, axis=1),
            "max": lambda x: NP.max(x, axis=1),
            "prod": lambda x: NP.prod(x, axis=1),
            "std": lambda x: NP.std(x, axis=1),
            "var": lambda x: NP.var(x, axis=1),
            "average": lambda x: NP.average(x, axis=1, weights=NP.exp(x)),
            "dot": lambda x: NP.dot(x, x.T),
            "matmul": lambda x: NP.matmul(x, x.T),
            "tensordot": lambda x: NP.tensordot(x, x, axes=([1], [1])),
            "tensordot, count": lambda x: NP.tensordot(x, x.T, axes=1),
            "einsum": lambda x: NP.einsum("ij,kj,kl->il", x, x, x),
            "einsum, optimized": lambda x: NP.einsum("ij,kj,kl->il", x, x, x, optimize=True),
            "where": lambda x: NP.where(x > 0, x, -x),
            "maximum": lambda x: NP.maximum(x, -x),
            "power": lambda x: NP.power(NP.exp(x), x),
            "true_divide": lambda x: NP.true_divide(x, NP.exp(x)),
            "arctan2": lambda x: NP.arctan2(x, NP.exp(x)),
            "concatenate": lambda x: NP.concatenate([x, -x], axis=0),
            "stack": lambda x: NP.stack([x, -x]),
            "vstack": lambda x: NP.vstack([x, -x]),
            "column_stack": lambda x: NP.column_stack([x, -x]),
            "split": lambda x: product(NP.split(x, 2, axis=0)),
            "reshape": lambda x: NP.reshape(x, (-1,)),
            "transpose": lambda x: NP.transpose(x),
            "swapaxes": lambda x: NP.swapaxes(x, 0, 1),
            "squeeze": lambda x: NP.squeeze(NP.expand_dims(x, 0)),
            "broadcast_to": lambda x: NP.broadcast_to(x, (2, 4, 6)),
            "tile": lambda x: NP.tile(x, (2, 1)),
            "repeat": lambda x: NP.repeat(x, 2),
            "roll": lambda x: NP.roll(x, 1),
            "flip": lambda x: NP.flip(x, 0),
            "cumsum": lambda x: NP.cumsum(x),
            "clip": lambda x: NP.clip(x, -0.3, 0.3),
            "tril": lambda x: NP.tril(x),
            "diff": lambda x: NP.diff(x),
            "ediff1d": lambda x: NP.ediff1d(x),
            "getitem": lambda x: x[1:3],
            "svd": lambda x: NP.linalg.svd(x)[1],
            "cholesky": lambda x: NP.linalg.cholesky(NP.dot(x, x.T) + NP.eye(4)),
            "inv": lambda x: NP.linalg.inv(NP.dot(x, x.T) + NP.eye(4)),
            "solve": lambda x: NP.linalg.solve(NP.dot(x, x.T) + NP.eye(4), x),
            "random.gamma": lambda x: x * NP.random.gamma(2.0, 1.0, size=(4, 6)),
            "random.gamma, array": lambda x: x * NP.random.gamma(2.0, NP.exp(x)),
            "random.gamma, arrays": lambda x: x * NP.random.gamma(NP.exp(x), NP.exp(-x)),
            "relu": lambda x: NPX.relu(x),
            "sigmoid": lambda x: NPX.sigmoid(x),
            "softmax": lambda x: NPX.softmax(x),
            "log_softmax": lambda x: NPX.log_softmax(x),
            "leaky_relu": lambda x: NPX.leaky_relu(x),
            "reshape, extended": lambda x: NPX.reshape(x, (-1,)),
            "smooth_l1": lambda x: NPX.smooth_l1(x),
        }.items()
    },
}
ON_SEQUENCES: dict[str, Call] = {
    "batch_dot": lambda x: S.batch_dot(x, x, transpose_b=True),
    "sequence mask": lambda x: S.SequenceMask(x, **LENGTHS),
    "sequence last": lambda x: S.SequenceLast(x, **LENGTHS),
    "sequence reverse": lambda x: S.SequenceReverse(x, **LENGTHS),
    "convolution, 1D": lambda x: S.Convolution(x, kernel=(3,), num_filter=3),
    "deconvolution, 1D": lambda x: S.Deconvolution(x, kernel=(3,), num_filter=3),
    "pooling, 1D": lambda x: S.Pooling(x, kernel=(2,), stride=(2,), pool_type="max"),
    "self attention, scores": lambda x: CONTRIB.interleaved_matmul_selfatt_qk(
        S.FullyConnected(x, **QKV), heads=2
    ),
    "self attention": lambda x: self_attention(S.FullyConnected(x, **QKV)),
}
ON_VIDEOS: dict[str, Call] = {
    "convolution, 3D": lambda x: S.Convolution(x, kernel=(2, 2, 2), num_filter=3),
    "pooling, 3D": lambda x: S.Pooling(x, kernel=(2, 2, 2), stride=(2, 2, 2), pool_type="max"),
}
TABLE: dict[str, tuple[Call, tuple[int, ...]]] = {
    name: (call, shape)
    for shape, calls in {
        IMAGE: ON_IMAGES,
        MATRIX: ON_MATRICES,
        SEQUENCE: ON_SEQUENCES,
        (2, 2, 4, 4, 4): ON_VIDEOS,
    }.items()
    for name, call in calls.items()
}
