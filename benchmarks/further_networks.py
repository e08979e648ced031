"""Networks of still other kinds, by which estimates were mended that others had not shown wrong."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx

from process_networks import Shapes, Symbol, classified, conv


def squeezed() -> tuple[Symbol, Shapes]:
    """Few channels, then two kinds of many, without norms, after Iandola et al. 2016."""

    def part(data: Symbol, nfilter: int, kernel: int) -> Symbol:
        pad = (kernel // 2,) * 2
        return mx.sym.relu(
            mx.sym.Convolution(data, num_filter=nfilter, kernel=(kernel,) * 2, pad=pad)
        )

    options = {"kernel": (3, 3), "stride": (2, 2), "pool_type": "max", "pooling_convention": "full"}
    out = mx.sym.Variable("data")
    out = mx.sym.relu(mx.sym.Convolution(out, num_filter=64, kernel=(3, 3), stride=(2, 2)))
    for squeezed_width, width in ((16, 64), (32, 128), (48, 192)):
        out = mx.sym.Pooling(out, **options)
        for _ in range(2):
            few = part(out, squeezed_width, 1)
            out = mx.sym.Concat(part(few, width, 1), part(few, width, 3), dim=1)
    out = mx.sym.Convolution(mx.sym.Dropout(out, p=0.5), num_filter=10, kernel=(1, 1))
    out = mx.sym.Pooling(mx.sym.relu(out), global_pool=True, pool_type="avg", kernel=(1, 1))
    return mx.sym.SoftmaxOutput(mx.sym.Flatten(out), name="softmax"), {"data": (8, 3, 192, 192)}


def ghosts() -> tuple[Symbol, Shapes]:
    """Half of the channels made of the other half by themselves, after Han et al. 2020."""

    def ghost(data: Symbol, width: int, is_active: bool = True) -> Symbol:
        few = mx.sym.Convolution(data, num_filter=width // 2, kernel=(1, 1), no_bias=True)
        few = mx.sym.BatchNorm(few, fix_gamma=False)
        few = mx.sym.relu(few) if is_active else few
        options = {"kernel": (3, 3), "pad": (1, 1), "num_group": width // 2, "no_bias": True}
        cheap = mx.sym.Convolution(few, num_filter=width // 2, **options)
        cheap = mx.sym.BatchNorm(cheap, fix_gamma=False)
        return mx.sym.Concat(few, mx.sym.relu(cheap) if is_active else cheap, dim=1)

    out = conv(mx.sym.Variable("data"), 16, 3, 2)
    for width, stride in ((32, 2), (32, 1), (64, 2), (64, 1), (96, 2), (96, 1)):
        branch = ghost(out, 3 * width)
        if stride == 2:
            options = {"kernel": (5, 5), "pad": (2, 2), "stride": (2, 2), "no_bias": True}
            groups = {"num_filter": 3 * width, "num_group": 3 * width}
            branch = mx.sym.BatchNorm(mx.sym.Convolution(branch, **groups, **options))
        weights = mx.sym.Pooling(branch, global_pool=True, pool_type="avg", kernel=(1, 1))
        weights = mx.sym.Convolution(weights, num_filter=width, kernel=(1, 1))
        weights = mx.sym.Convolution(mx.sym.relu(weights), num_filter=3 * width, kernel=(1, 1))
        branch = mx.sym.broadcast_mul(branch, mx.sym.hard_sigmoid(weights))
        branch = ghost(branch, width, is_active=False)
        out = branch + (out if stride == 1 else conv(out, width, 1, 2))
    return classified(out), {"data": (8, 3, 192, 192)}


def volumes() -> tuple[Symbol, Shapes]:
    """Down and up again in three dimensions, with learnt slopes, after Milletari et al. 2016."""
    out, skipped = mx.sym.Variable("data"), []
    options = {"kernel": (3, 3, 3), "pad": (1, 1, 1)}
    twice = {"kernel": (2, 2, 2), "stride": (2, 2, 2)}
    for width in (8, 16, 32):
        out = mx.sym.Convolution(out, num_filter=width, **options)
        out = mx.sym.LeakyReLU(out, act_type="prelu")
        skipped.append(out)
        out = mx.sym.Convolution(out, num_filter=width, **twice)
    for width in (32, 16, 8):
        out = mx.sym.Deconvolution(out, num_filter=width, **twice) + skipped.pop()
        out = mx.sym.Convolution(out, num_filter=width, **options)
        out = mx.sym.LeakyReLU(out, act_type="prelu")
    out = mx.sym.Convolution(out, num_filter=2, kernel=(1, 1, 1))
    shapes = {"data": (2, 1, 32, 64, 64)}
    return mx.sym.SoftmaxOutput(out, multi_output=True, name="softmax"), shapes


def patches(nlayers: int = 4) -> tuple[Symbol, Shapes]:
    """Attention of twelve heads between parts of a picture, after Dosovitskiy et al. 2021."""
    width, heads = 384, 12
    out = mx.sym.Convolution(
        mx.sym.Variable("data"), num_filter=width, kernel=(16, 16), stride=(16, 16)
    )
    out = mx.sym.transpose(mx.sym.reshape(out, shape=(0, 0, -1)), axes=(2, 0, 1))
    place = mx.sym.Variable("place", shape=(196, 1, width))
    out = mx.sym.broadcast_add(out, place)
    for _ in range(nlayers):
        parts = mx.sym.FullyConnected(mx.sym.LayerNorm(out), num_hidden=3 * width, flatten=False)
        weights = mx.sym.contrib.interleaved_matmul_selfatt_qk(parts, heads=heads)
        weights = mx.sym.Dropout(mx.sym.softmax(weights), p=0.1)
        mixed = mx.sym.contrib.interleaved_matmul_selfatt_valatt(parts, weights, heads=heads)
        out = out + mx.sym.FullyConnected(mixed, num_hidden=width, flatten=False)
        inner = mx.sym.FullyConnected(mx.sym.LayerNorm(out), num_hidden=4 * width, flatten=False)
        inner = mx.sym.LeakyReLU(inner, act_type="gelu")
        out = out + mx.sym.FullyConnected(inner, num_hidden=width, flatten=False)
    out = mx.sym.FullyConnected(mx.sym.mean(out, axis=0), num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (8, 3, 224, 224)}


def translator(nsteps: int = 20, width: int = 192) -> tuple[Symbol, Shapes]:
    """A GRU that reads, and one that writes and looks back, after Bahdanau et al. 2015."""
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=3000, output_dim=width)
    reader, writer = mx.rnn.GRUCell(width, prefix="r_"), mx.rnn.GRUCell(width, prefix="w_")
    read, _ = reader.unroll(nsteps, inputs=words, merge_outputs=True, layout="NTC")
    told = mx.sym.Embedding(mx.sym.Variable("told"), input_dim=3000, output_dim=width)
    written, _ = writer.unroll(nsteps, inputs=told, merge_outputs=True, layout="NTC")
    weights = mx.sym.softmax(mx.sym.batch_dot(written, read, transpose_b=True))
    out = mx.sym.Concat(mx.sym.batch_dot(weights, read), written, dim=2)
    out = mx.sym.tanh(mx.sym.FullyConnected(out, num_hidden=width, flatten=False))
    out = mx.sym.FullyConnected(mx.sym.reshape(out, shape=(-1, width)), num_hidden=3000)
    labels = mx.sym.reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    shapes = dict.fromkeys(("data", "told", "softmax_label"), (32, nsteps))
    return mx.sym.SoftmaxOutput(out, labels, name="softmax"), shapes


def recommender() -> tuple[Symbol, Shapes]:
    """Many embeddings, their products, and dense layers, after Naumov et al. 2019."""
    batch, width, out = 2048, 32, mx.sym.Variable("data")
    for nhidden in (256, 64, width):
        out = mx.sym.relu(mx.sym.FullyConnected(out, num_hidden=nhidden))
    parts = [mx.sym.expand_dims(out, axis=1)]
    shapes: Shapes = {"data": (batch, 13)}
    for number in range(8):
        name = f"kind{number}"
        taken = mx.sym.Embedding(mx.sym.Variable(name), input_dim=20000, output_dim=width)
        parts.append(mx.sym.expand_dims(taken, axis=1))
        shapes[name] = (batch,)
    rows = mx.sym.Concat(*parts, dim=1)
    products = mx.sym.Flatten(mx.sym.batch_dot(rows, rows, transpose_b=True))
    out = mx.sym.Concat(out, products, dim=1)
    for nhidden in (512, 256):
        out = mx.sym.relu(mx.sym.FullyConnected(out, num_hidden=nhidden))
    out = mx.sym.FullyConnected(out, num_hidden=1)
    return mx.sym.LogisticRegressionOutput(out, mx.sym.Variable("label"), name="loss"), shapes | {
        "label": (batch, 1)
    }


def styled() -> tuple[Symbol, Shapes]:
    """Norms of single pictures, mirrored edges, enlarged pictures, after Johnson et al. 2016."""

    def part(data: Symbol, width: int, kernel: int, stride: int = 1) -> Symbol:
        edge = (0, 0, 0, 0) + (kernel // 2,) * 4
        data = mx.sym.Pad(data, mode="reflect", pad_width=edge)
        options = {"kernel": (kernel, kernel), "stride": (stride, stride)}
        return mx.sym.InstanceNorm(mx.sym.Convolution(data, num_filter=width, **options))

    out = mx.sym.relu(part(mx.sym.Variable("data"), 16, 9))
    for width in (32, 64):
        out = mx.sym.relu(part(out, width, 3, 2))
    for _ in range(3):
        out = out + part(mx.sym.relu(part(out, 64, 3)), 64, 3)
    for width in (32, 16):
        out = mx.sym.UpSampling(out, scale=2, sample_type="nearest")
        out = mx.sym.relu(part(out, width, 3))
    edge = (0, 0, 0, 0, 4, 4, 4, 4)
    out = mx.sym.Pad(out, mode="reflect", pad_width=edge)
    out = mx.sym.tanh(mx.sym.Convolution(out, num_filter=3, kernel=(9, 9)))
    out = mx.sym.LinearRegressionOutput(out, mx.sym.Variable("label"), name="loss")
    return out, {"data": (4, 3, 128, 128), "label": (4, 3, 128, 128)}


def critic() -> tuple[Symbol, Shapes]:
    """Strides in place of pooling, and leaky slopes, after Radford et al. 2016."""
    out = mx.sym.Variable("data")
    for place, width in enumerate((32, 64, 128, 256)):
        options = {"kernel": (4, 4), "stride": (2, 2), "pad": (1, 1), "no_bias": True}
        out = mx.sym.Convolution(out, num_filter=width, **options)
        out = mx.sym.BatchNorm(out, fix_gamma=False) if place else out
        out = mx.sym.LeakyReLU(out, act_type="leaky", slope=0.2)
    out = mx.sym.FullyConnected(out, num_hidden=1)
    out = mx.sym.LogisticRegressionOutput(out, mx.sym.Variable("label"), name="loss")
    return out, {"data": (16, 3, 128, 128), "label": (16, 1)}


def normed() -> tuple[Symbol, Shapes]:
    """Large kernels, norms over channels, a wide dense layer, after Krizhevsky et al. 2012."""
    out = mx.sym.Variable("data")
    pooling = {"kernel": (3, 3), "stride": (2, 2), "pool_type": "max"}
    for width, kernel, stride in ((64, 11, 4), (192, 5, 1)):
        options = {"kernel": (kernel, kernel), "pad": (2, 2), "stride": (stride, stride)}
        out = mx.sym.relu(mx.sym.Convolution(out, num_filter=width, **options))
        out = mx.sym.Pooling(mx.sym.LRN(out, alpha=0.0001, beta=0.75, knorm=2, nsize=5), **pooling)
    for width in (256, 128):
        out = mx.sym.Convolution(out, num_filter=width, kernel=(3, 3), pad=(1, 1))
        out = mx.sym.relu(out)
    out = mx.sym.Flatten(mx.sym.Pooling(out, **pooling))
    out = mx.sym.Dropout(mx.sym.relu(mx.sym.FullyConnected(out, num_hidden=1024)), p=0.5)
    out = mx.sym.FullyConnected(out, num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (32, 3, 224, 224)}


def speech() -> tuple[Symbol, Shapes]:
    """Convolutions of a spectrum, a GRU in both directions, CTC, after Amodei et al. 2016."""
    batch, length, width = 8, 200, 128
    out = mx.sym.Variable("data")
    for stride in (2, 1):
        options = {"kernel": (11, 5), "pad": (5, 2), "stride": (stride, 2), "num_filter": 32}
        out = mx.sym.BatchNorm(mx.sym.Convolution(out, **options), fix_gamma=False)
        out = mx.sym.clip(out, a_min=0, a_max=20)
    out = mx.sym.reshape(mx.sym.transpose(out, axes=(2, 0, 1, 3)), shape=(0, 0, -1))
    start = mx.sym.BlockGrad(mx.sym.Variable("start", shape=(4, batch, width)))
    out = mx.sym.RNN(
        out,
        mx.sym.Variable("parameters"),
        start,
        state_size=width,
        num_layers=2,
        mode="gru",
        bidirectional=True,
    )
    out = mx.sym.FullyConnected(out, num_hidden=30, flatten=False)
    loss = mx.sym.ctc_loss(out, mx.sym.Variable("label"))
    shapes = {"data": (batch, 1, length, 80), "label": (batch, 20)}
    return mx.sym.MakeLoss(mx.sym.mean(loss)), shapes


FURTHER: dict[str, Callable[[], tuple[Symbol, Shapes]]] = {
    made.__name__: made
    for made in (
        squeezed,
        ghosts,
        volumes,
        patches,
        translator,
        recommender,
        styled,
        critic,
        normed,
        speech,
    )
}
