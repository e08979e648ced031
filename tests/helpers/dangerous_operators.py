"""Operators that mirroring must never run twice, in the middle of a small network."""

from __future__ import annotations

import mxnet as mx

from helpers.operator_calls import (
    CONTRIB,
    IMAGE,
    MATRIX,
    NP,
    NPX,
    SEQUENCE,
    TABLE,
    Call,
    S,
    Symbol,
    V,
    numpy,
)


class _Counting(mx.operator.CustomOp):
    """Its output tells how often it ran, and its backward pass relies on the latest run."""

    runs = 0

    def forward(self, is_train, req, in_data, out_data, aux):
        type(self).runs += 1
        self.factor = float(self.runs)
        self.assign(out_data[0], req[0], in_data[0] * self.factor)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * self.factor)


@mx.operator.register("memplan_counting")
class _CountingProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        _Counting.runs = 0
        return _Counting()


def states(*names: str, layers: int = 1) -> list[Symbol]:
    return [V(name, shape=(layers, 3, 5)) for name in names]


def foreach(x: Symbol) -> Symbol:
    def step(data: Symbol, state: Symbol) -> tuple[Symbol, Symbol]:
        state = S.Dropout(S.tanh(data + state), p=0.5)
        return S.sin(state), state

    return CONTRIB.foreach(step, x, V("first", shape=(3, 4)))[0]


def label(*shape: int) -> Symbol:
    return V("index_label", shape=shape)


# Operator -> networks with it, none of whose copies may run.
DANGEROUS: dict[str, list[tuple[Call, tuple[int, ...]]]] = {
    # a copy computes nothing, or aborts, where its main output is not read
    "LayerNorm": [(lambda x: S.LayerNorm(x), IMAGE), (lambda x: S.LayerNorm(x, axis=1), IMAGE)],
    "GroupNorm": [(lambda x: S.GroupNorm(x, V("gamma"), V("beta"), num_groups=2), IMAGE)],
    "Embedding": [
        (
            lambda x: S.Embedding(
                S.BlockGrad(S.round(S.abs(x))), V("weight"), input_dim=5, output_dim=3
            ),
            MATRIX,
        )
    ],
    "pick": [(lambda x: S.pick(x, label(2, 8, 8), axis=1), IMAGE)],
    "take": [(lambda x: S.take(x, label(3), axis=1), IMAGE)],
    "gather_nd": [(lambda x: S.gather_nd(x, label(2, 3)), IMAGE)],
    "one_hot": [(lambda x: S.broadcast_mul(x, S.one_hot(label(2, 4, 8), depth=8)), IMAGE)],
    "Crop": [(lambda x: S.Crop(x, h_w=(4, 4), num_args=1), IMAGE)],
    "Convolution_v1": [(lambda x: S.Convolution_v1(x, kernel=(3, 3), num_filter=3), IMAGE)],
    "_contrib_DeformableConvolution": [
        (
            lambda x: CONTRIB.DeformableConvolution(
                x,
                S.Convolution(x, kernel=(3, 3), num_filter=18, name="offset"),
                kernel=(3, 3),
                num_filter=3,
            ),
            IMAGE,
        )
    ],
    "UpSampling": [
        (
            lambda x: S.UpSampling(
                x, V("weight"), scale=2, sample_type="bilinear", num_filter=4, num_args=2
            ),
            IMAGE,
        )
    ],
    "diag": [(lambda x: S.diag(x), MATRIX)],
    "hard_sigmoid": [(lambda x: S.hard_sigmoid(x), MATRIX)],
    "_np_diag": [(numpy(lambda x: NP.diag(x)), MATRIX)],
    "_np_diagonal": [(numpy(lambda x: NP.diagonal(x)), MATRIX)],
    "_np_moveaxis": [(numpy(lambda x: NP.moveaxis(x, 0, 1)), MATRIX)],
    "_npi_pad": [(numpy(lambda x: NP.pad(x, ((1, 1), (1, 1)), "constant")), MATRIX)],
    # a copy, or the op where its input is computed again, may write over that input
    "_npi_ediff1d": [
        (numpy(lambda x: NP.ediff1d(x, to_begin=0.5)), MATRIX),
        (numpy(lambda x: NP.ediff1d(x, to_end=0.5)), MATRIX),
        (numpy(lambda x: NP.ediff1d(x, to_begin=V("first", shape=(1,)).as_np_ndarray())), MATRIX),
    ],
    # random numbers
    "Dropout": [
        (lambda x: S.Dropout(x, p=0.5), IMAGE),
        (lambda x: S.Dropout(S.exp(S.Dropout(x, p=0.3)), p=0.5, axes=(2,)), IMAGE),
        (numpy(lambda x: NPX.dropout(x, p=0.5)), MATRIX),
    ],
    "_random_normal": [(lambda x: x + S.random.normal(shape=IMAGE), IMAGE)],
    "_random_normal_like": [(lambda x: x * S.random.normal_like(x), IMAGE)],
    "_random_uniform_like": [(lambda x: x * S.random.uniform_like(x), IMAGE)],
    "_sample_normal": [(lambda x: x * S.sample_normal(x, S.exp(x)), IMAGE)],
    "_sample_multinomial": [
        (
            lambda x: S.broadcast_mul(
                x, S.Cast(S.sum(S.sample_multinomial(S.softmax(S.BlockGrad(x)))), dtype="float32")
            ),
            MATRIX,
        )
    ],
    "_npi_normal": [(numpy(lambda x: x * NP.random.normal(x, 1.0)), MATRIX)],
    # state, or the user's code
    "RNN": [
        (
            lambda x: S.RNN(
                x,
                V("weights"),
                *states("hidden", "cell", layers=2),
                mode="lstm",
                state_size=5,
                num_layers=2,
                p=0.5,
            ),
            SEQUENCE,
        ),
        (
            lambda x: S.RNN(
                x, V("weights"), *states("hidden"), mode="gru", state_size=5, num_layers=1
            ),
            SEQUENCE,
        ),
    ],
    "Custom": [(lambda x: S.Custom(x, op_type="memplan_counting"), IMAGE)],
    "_foreach": [(foreach, SEQUENCE)],
    "_contrib_SyncBatchNorm": [
        (lambda x: CONTRIB.SyncBatchNorm(x, key="only", fix_gamma=False), IMAGE)
    ],
    "BatchNorm_v1": [(lambda x: S.BatchNorm_v1(x, fix_gamma=False), IMAGE)],
    "IdentityAttachKLSparseReg": [
        (lambda x: S.IdentityAttachKLSparseReg(S.Flatten(S.sigmoid(x))), IMAGE)
    ],
    "CTCLoss": [(lambda x: S.CTCLoss(S.expand_dims(x, axis=1), 1 + label(1, 2)), MATRIX)],
}

# The operators that may run twice under mirroring, and those that may not.
CALLS = TABLE | {
    f"{op} {i}": call for op, calls in DANGEROUS.items() for i, call in enumerate(calls)
}
