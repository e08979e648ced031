"""Networks on which nothing in memplan was tuned, each with shapes that a CPU trains in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mxnet as mx

Symbol: TypeAlias = Any  # MXNet has no types
Shapes: TypeAlias = dict[str, Any]  # tuples of integers, handed on as keywords


def conv(
    data: Symbol,
    nfilter: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
) -> Symbol:
    """Convolution, BatchNorm, ReLU; padded."""
    out = mx.sym.Convolution(
        data,
        num_filter=nfilter,
        kernel=(kernel, kernel),
        pad=(dilation * (kernel // 2),) * 2,
        stride=(stride, stride),
        dilate=(dilation, dilation),
        num_group=groups,
        no_bias=True,
    )
    return mx.sym.relu(mx.sym.BatchNorm(out, fix_gamma=False))


def classified(data: Symbol, classes: int = 10) -> Symbol:
    """The mean over the picture, a dense layer, a softmax."""
    out = mx.sym.Pooling(data, global_pool=True, pool_type="avg", kernel=(1, 1))
    out = mx.sym.FullyConnected(mx.sym.Flatten(out), num_hidden=classes)
    return mx.sym.SoftmaxOutput(out, name="softmax")


def resnext() -> tuple[Symbol, Shapes]:
    """Residual blocks with grouped convolutions, after Xie et al. 2017."""
    out = conv(mx.sym.Variable("data"), 64, 7, 2)
    for stage, width in enumerate((64, 128, 256)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            branch = conv(conv(out, width, 1), width, 3, stride, groups=8)
            branch = conv(branch, 2 * width, 1)
            out = branch + (out if block else conv(out, 2 * width, 1, stride))
    return classified(out), {"data": (4, 3, 192, 192)}


def resnet() -> tuple[Symbol, Shapes]:
    """Plain residual blocks, whose channels suit oneDNN."""
    out = conv(mx.sym.Variable("data"), 64, 7, 2)
    for stage, width in enumerate((64, 128, 256)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            branch = conv(conv(out, width, 3, stride), width)
            out = branch + (out if block else conv(out, width, 1, stride))
    return classified(out), {"data": (4, 3, 192, 192)}


def high_resolution(nmodules: int = 2) -> tuple[Symbol, Shapes]:
    """Branches of three resolutions that exchange sums, after Wang et al. 2019."""
    widths = (18, 36, 72)
    stem = conv(conv(mx.sym.Variable("data"), 32, 3, 2), 18)
    branches = [stem, conv(stem, 36, 3, 2), conv(conv(stem, 36, 3, 2), 72, 3, 2)]
    for _ in range(nmodules):
        branches = [
            conv(conv(out, width), width) + out for out, width in zip(branches, widths, strict=True)
        ]
        branches = [_exchanged(branches, place, widths) for place in range(3)]
    return classified(branches[0]), {"data": (4, 3, 128, 128)}


def _exchanged(branches: list[Symbol], place: int, widths: tuple[int, ...]) -> Symbol:
    """What the branch at ``place`` gets of all."""
    total = branches[place]
    for source, out in enumerate(branches):
        if source > place:
            out = mx.sym.UpSampling(
                conv(out, widths[place], 1), scale=2 ** (source - place), sample_type="nearest"
            )
        for step in range(source + 1, place + 1):
            out = conv(out, widths[step], 3, 2)
        if source != place:
            total = total + out
    return mx.sym.relu(total)


def depthwise() -> tuple[Symbol, Shapes]:
    """Depthwise separable convolutions, after Howard et al. 2017."""
    out = conv(mx.sym.Variable("data"), 32, 3, 2)
    before = 32
    for width, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        out = conv(conv(out, before, 3, stride, groups=before), width, 1)
        before = width
    return classified(out), {"data": (8, 3, 160, 160)}


def dense_blocks(nlayers: int = 6) -> tuple[Symbol, Shapes]:
    """Layers that read all before them, 12 channels each, after Huang et al. 2017."""
    out = conv(mx.sym.Variable("data"), 24)
    for _ in range(2):
        for _ in range(nlayers):
            out = mx.sym.Concat(out, conv(conv(out, 48, 1), 12), dim=1)
        out = mx.sym.Pooling(conv(out, 36, 1), kernel=(2, 2), stride=(2, 2), pool_type="avg")
    return classified(out), {"data": (8, 3, 64, 64)}


def transformer(nlayers: int = 4) -> tuple[Symbol, Shapes]:
    """Encoder layers of four heads, after Vaswani et al. 2017."""
    batch, length, width, heads = 8, 128, 192, 4
    tokens = mx.sym.Variable("data")
    out = mx.sym.Embedding(tokens, input_dim=1000, output_dim=width)
    for _ in range(nlayers):
        parts = mx.sym.FullyConnected(mx.sym.LayerNorm(out), num_hidden=3 * width, flatten=False)
        query, key, value = (_by_head(part, heads) for part in _thirds(parts))
        weights = mx.sym.softmax(
            mx.sym.batch_dot(query, key, transpose_b=True) * (heads / width) ** 0.5
        )
        mixed = mx.sym.batch_dot(mx.sym.Dropout(weights, p=0.1), value)
        mixed = mx.sym.reshape(mixed, shape=(-4, -1, heads, 0, 0))
        mixed = mx.sym.reshape(mx.sym.transpose(mixed, axes=(0, 2, 1, 3)), shape=(0, 0, -1))
        out = out + mx.sym.FullyConnected(mixed, num_hidden=width, flatten=False)
        inner = mx.sym.FullyConnected(mx.sym.LayerNorm(out), num_hidden=4 * width, flatten=False)
        inner = mx.sym.LeakyReLU(inner, act_type="gelu")
        out = out + mx.sym.FullyConnected(inner, num_hidden=width, flatten=False)
    out = mx.sym.FullyConnected(mx.sym.mean(out, axis=1), num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (batch, length)}


def _thirds(parts: Symbol) -> Symbol:
    return mx.sym.split(parts, num_outputs=3, axis=2)


def _by_head(part: Symbol, heads: int) -> Symbol:
    """(batch, length, width) as (batch * heads, length, width / heads)."""
    part = mx.sym.transpose(mx.sym.reshape(part, shape=(0, 0, -4, heads, -1)), axes=(0, 2, 1, 3))
    return mx.sym.reshape(part, shape=(-3, 0, 0))


def lstm(nsteps: int = 40) -> tuple[Symbol, Shapes]:
    """An LSTM cell unrolled over ``nsteps`` steps."""
    data = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=1000, output_dim=128)
    cell = mx.rnn.LSTMCell(num_hidden=256)
    outputs, _ = cell.unroll(nsteps, inputs=data, merge_outputs=True, layout="NTC")
    out = mx.sym.FullyConnected(mx.sym.mean(outputs, axis=1), num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (32, nsteps)}


def unet() -> tuple[Symbol, Shapes]:
    """Down and up again with skips, after Ronneberger et al. 2015."""
    out, skipped = mx.sym.Variable("data"), []
    for width in (16, 32, 64):
        out = conv(conv(out, width), width)
        skipped.append(out)
        out = mx.sym.Pooling(out, pool_type="max", kernel=(2, 2), stride=(2, 2))
    out = conv(out, 128)
    for width in (64, 32, 16):
        out = mx.sym.Deconvolution(out, kernel=(2, 2), stride=(2, 2), num_filter=width)
        out = conv(conv(mx.sym.Concat(skipped.pop(), out, dim=1), width), width)
    out = mx.sym.Convolution(out, kernel=(1, 1), num_filter=2)
    return mx.sym.SoftmaxOutput(out, multi_output=True, name="softmax"), {"data": (4, 3, 128, 128)}


def detector() -> tuple[Symbol, Shapes]:
    """Classes and boxes at three resolutions, after SSD of Liu et al. 2016."""
    out = conv(conv(mx.sym.Variable("data"), 32, 3, 2), 64, 3, 2)
    classes: list[Symbol] = []
    boxes: list[Symbol] = []
    for width in (64, 128, 128):
        out = conv(conv(out, width), width, 3, 2)
        for outputs, nfilter in ((classes, 4 * 21), (boxes, 4 * 4)):
            head = mx.sym.Convolution(out, kernel=(3, 3), pad=(1, 1), num_filter=nfilter)
            outputs.append(mx.sym.Flatten(mx.sym.transpose(head, axes=(0, 2, 3, 1))))
    scores = mx.sym.reshape(mx.sym.Concat(*classes, dim=1), shape=(-1, 21))
    scores = mx.sym.SoftmaxOutput(scores, name="softmax")
    box_loss = mx.sym.MakeLoss(mx.sym.smooth_l1(mx.sym.Concat(*boxes, dim=1), scalar=1.0))
    return mx.sym.Group([scores, box_loss]), {"data": (4, 3, 192, 192)}


def inception() -> tuple[Symbol, Shapes]:
    """Branches of several kernels, joined, all of oneDNN's operators, after Szegedy et al. 2015."""

    def part(data: Symbol, nfilter: int, kernel: int) -> Symbol:
        out = mx.sym.Convolution(
            data, num_filter=nfilter, kernel=(kernel, kernel), pad=(kernel // 2, kernel // 2)
        )
        return mx.sym.Activation(mx.sym.BatchNorm(out, fix_gamma=False), act_type="relu")

    pooling = {"kernel": (3, 3), "pad": (1, 1)}
    out = mx.sym.Pooling(part(mx.sym.Variable("data"), 64, 5), stride=(2, 2), **pooling)
    for width in (32, 48, 64):
        for _ in range(2):
            pooled = mx.sym.Pooling(out, stride=(1, 1), pool_type="avg", **pooling)
            out = mx.sym.Concat(
                part(out, width, 1),
                part(part(out, width, 1), 2 * width, 3),
                part(part(out, width // 2, 1), width, 5),
                part(pooled, width, 1),
                dim=1,
            )
        out = mx.sym.Pooling(out, stride=(2, 2), **pooling)
    return classified(out), {"data": (4, 3, 128, 128)}


def shuffled() -> tuple[Symbol, Shapes]:
    """Shuffled groups of channels, and channels that are weighed, after Zhang et al. 2018 and Hu
    et al. 2018.
    """
    out, groups = conv(mx.sym.Variable("data"), 24, 3, 2), 4
    for width in (48, 96, 192):
        for block in range(2):
            stride = 1 if block else 2
            branch = conv(out, width, 1, groups=1 if width == 48 else groups)
            branch = mx.sym.reshape(branch, shape=(0, -4, groups, -1, -2))
            branch = mx.sym.reshape(mx.sym.SwapAxis(branch, dim1=1, dim2=2), shape=(0, -3, -2))
            branch = conv(conv(branch, width, 3, stride, groups=width), width, 1)
            weights = mx.sym.Pooling(branch, global_pool=True, pool_type="avg", kernel=(1, 1))
            weights = mx.sym.relu(mx.sym.FullyConnected(weights, num_hidden=width // 4))
            weights = mx.sym.sigmoid(mx.sym.FullyConnected(weights, num_hidden=width))
            branch = mx.sym.broadcast_mul(branch, mx.sym.reshape(weights, shape=(0, 0, 1, 1)))
            out = branch + (out if block else conv(out, width, 1, stride))
    return classified(out), {"data": (8, 3, 160, 160)}


def video() -> tuple[Symbol, Shapes]:
    """Convolutions over three dimensions, after Tran et al. 2015."""
    out = mx.sym.Variable("data")
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for _ in range(2):
            out = mx.sym.Convolution(out, num_filter=width, kernel=(3, 3, 3), pad=(1, 1, 1))
            out = mx.sym.relu(out)
        out = mx.sym.Pooling(out, kernel=(stride, 2, 2), stride=(stride, 2, 2), pool_type="max")
    out = mx.sym.FullyConnected(mx.sym.mean(out, axis=(2, 3, 4)), num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (2, 3, 8, 64, 64)}


def dilated() -> tuple[Symbol, Shapes]:
    """Dilated convolutions at one resolution, after Yu and Koltun 2016."""
    out = conv(mx.sym.Variable("data"), 32, 3, 2)
    for width, dilation in ((32, 1), (32, 2), (64, 4), (64, 8)):
        for _ in range(2):
            out = conv(out, width, dilation=dilation)
    return classified(out), {"data": (4, 3, 160, 160)}


def recurrent() -> tuple[Symbol, Shapes]:
    """Two layers of LSTM in one operator, after Zaremba et al. 2014."""
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=2000, output_dim=256)
    states = [mx.sym.BlockGrad(mx.sym.Variable(n, shape=(2, 32, 256))) for n in ("state", "cell")]
    out = mx.sym.RNN(
        mx.sym.transpose(words, axes=(1, 0, 2)),
        mx.sym.Variable("parameters"),
        *states,
        state_size=256,
        num_layers=2,
        mode="lstm",
    )
    out = mx.sym.FullyConnected(mx.sym.reshape(out, shape=(-1, 256)), num_hidden=50)
    labels = mx.sym.reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    return mx.sym.SoftmaxOutput(out, labels, name="softmax"), {
        "data": (32, 60),
        "softmax_label": (32, 60),
    }


def perceptron() -> tuple[Symbol, Shapes]:
    """Dense layers: a step of a millisecond."""
    out = mx.sym.Variable("data")
    for _ in range(4):
        out = mx.sym.relu(mx.sym.FullyConnected(out, num_hidden=256))
    out = mx.sym.FullyConnected(out, num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (64, 256)}


def lenet() -> tuple[Symbol, Shapes]:
    """After LeCun et al. 1998."""
    out = mx.sym.Variable("data")
    for nfilter in (20, 50):
        out = mx.sym.Convolution(out, num_filter=nfilter, kernel=(5, 5))
        out = mx.sym.Activation(out, act_type="tanh")
        out = mx.sym.Pooling(out, kernel=(2, 2), stride=(2, 2), pool_type="max")
    out = mx.sym.Activation(mx.sym.FullyConnected(out, num_hidden=500), act_type="tanh")
    out = mx.sym.FullyConnected(out, num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (32, 1, 28, 28)}


def small_resnet() -> tuple[Symbol, Shapes]:
    """Residual blocks for small pictures, after He et al. 2016."""
    out = conv(mx.sym.Variable("data"), 16)
    for stage, width in enumerate((16, 32, 64)):
        for block in range(3):
            stride = 2 if stage and not block else 1
            branch = conv(conv(out, width, 3, stride), width)
            out = branch + (conv(out, width, 1, stride) if stage and not block else out)
    return classified(out), {"data": (8, 3, 32, 32)}


NETWORKS: dict[str, Callable[[], tuple[Symbol, Shapes]]] = {
    made.__name__: made
    for made in (
        resnet,
        resnext,
        high_resolution,
        depthwise,
        dense_blocks,
        transformer,
        lstm,
        unet,
        detector,
        inception,
        shuffled,
        video,
        dilated,
        recurrent,
    )
}

# Steps of milliseconds, of which little can be saved.
SMALL: dict[str, Callable[[], tuple[Symbol, Shapes]]] = {
    made.__name__: made for made in (perceptron, lenet, small_resnet)
}
