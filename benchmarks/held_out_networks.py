"""Networks of other kinds than those of process_networks.py, on which no estimate was set."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx

from process_networks import Shapes, Symbol, classified, conv


def text() -> tuple[Symbol, Shapes]:
    """Convolutions as wide as a word, the largest value over the text, after Kim 2014."""
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=2000, output_dim=128)
    rows, parts = mx.sym.expand_dims(words, axis=1), []
    for length in (3, 4, 5):
        out = mx.sym.relu(mx.sym.Convolution(rows, num_filter=100, kernel=(length, 128)))
        parts.append(mx.sym.Pooling(out, global_pool=True, pool_type="max", kernel=(1, 1)))
    out = mx.sym.Dropout(mx.sym.Flatten(mx.sym.Concat(*parts, dim=1)), p=0.5)
    out = mx.sym.FullyConnected(out, num_hidden=5)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (64, 200)}


def halves() -> tuple[Symbol, Shapes]:
    """Half of the channels convolved, and shuffled, of 58 and of 116, after Ma et al. 2018."""
    out = conv(mx.sym.Variable("data"), 24, 3, 2)
    out = mx.sym.Pooling(out, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
    for width, nblocks in ((58, 3), (116, 4)):
        for block in range(nblocks):
            kept, branch, stride = out, out, 1
            if block:
                kept, branch = mx.sym.split(out, num_outputs=2, axis=1)
            else:
                kept, stride = conv(out, width, 3, 2), 2
            branch = conv(conv(branch, width, 1), width, 3, stride, groups=width)
            out = mx.sym.Concat(kept, conv(branch, width, 1), dim=1)
            out = mx.sym.SwapAxis(mx.sym.reshape(out, shape=(0, -4, 2, -1, -2)), dim1=1, dim2=2)
            out = mx.sym.reshape(out, shape=(0, -3, -2))
    return classified(out), {"data": (8, 3, 192, 192)}


def recurrent_pictures(nsteps: int = 6, width: int = 24) -> tuple[Symbol, Shapes]:
    """An LSTM whose products are convolutions, after Shi et al. 2015."""
    steps = mx.sym.split(
        mx.sym.Variable("data"), num_outputs=nsteps, axis=1, squeeze_axis=nsteps > 1
    )
    options = {"num_filter": 4 * width, "kernel": (3, 3), "pad": (1, 1)}
    weight, bias = mx.sym.Variable("input_weight"), mx.sym.Variable("input_bias")
    of_state = mx.sym.Variable("state_weight")
    state = cell = None
    for step in steps:
        gates = mx.sym.Convolution(step, weight, bias, **options)
        if state is not None:
            gates = gates + mx.sym.Convolution(state, of_state, no_bias=True, **options)
        *opened, new = mx.sym.split(gates, num_outputs=4, axis=1)
        taken, kept, shown = map(mx.sym.sigmoid, opened)
        added = taken * mx.sym.tanh(new)
        cell = added if cell is None else kept * cell + added
        state = shown * mx.sym.tanh(cell)
    out = mx.sym.Convolution(state, num_filter=1, kernel=(1, 1))
    out = mx.sym.LinearRegressionOutput(out, mx.sym.Variable("label"), name="loss")
    return out, {"data": (4, nsteps, 3, 64, 64), "label": (4, 1, 64, 64)}


def generator() -> tuple[Symbol, Shapes]:
    """Deconvolutions from a vector to a picture, after Radford et al. 2016."""
    out = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=256 * 4 * 4)
    out = mx.sym.reshape(out, shape=(-1, 256, 4, 4))
    options = {"kernel": (4, 4), "stride": (2, 2), "pad": (1, 1)}
    for width in (128, 64, 32, 16):
        out = mx.sym.relu(mx.sym.BatchNorm(out, fix_gamma=False))
        out = mx.sym.Deconvolution(out, num_filter=width, no_bias=True, **options)
    out = mx.sym.tanh(mx.sym.Deconvolution(mx.sym.relu(out), num_filter=3, **options))
    out = mx.sym.LinearRegressionOutput(out, mx.sym.Variable("label"), name="loss")
    return out, {"data": (16, 64), "label": (16, 3, 128, 128)}


def points() -> tuple[Symbol, Shapes]:
    """Each point by itself, and with the largest values of all, after Qi et al. 2017."""
    out = mx.sym.Variable("data")
    for width in (64, 64, 128, 256):
        out = mx.sym.relu(mx.sym.Convolution(out, num_filter=width, kernel=(1,)))
    largest = mx.sym.max(out, axis=2, keepdims=True)
    out = mx.sym.Concat(out, mx.sym.broadcast_like(largest, out, lhs_axes=(2,), rhs_axes=(2,)))
    for width in (128, 64):
        out = mx.sym.relu(mx.sym.Convolution(out, num_filter=width, kernel=(1,)))
    out = mx.sym.Convolution(out, num_filter=8, kernel=(1,))
    return mx.sym.SoftmaxOutput(out, multi_output=True, name="softmax"), {"data": (16, 3, 1024)}


def waves(nlayers: int = 8, width: int = 32) -> tuple[Symbol, Shapes]:
    """Gated convolutions of a signal, dilated ever further, after van den Oord et al. 2016."""
    out, skipped = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=width, kernel=(1,)), []
    for layer in range(nlayers):
        far = (2**layer,)
        both = mx.sym.Convolution(out, num_filter=2 * width, kernel=(2,), dilate=far, pad=far)
        both = mx.sym.slice_axis(both, axis=2, begin=0, end=2048)
        value, gate = mx.sym.split(both, num_outputs=2, axis=1)
        gated = mx.sym.tanh(value) * mx.sym.sigmoid(gate)
        skipped.append(mx.sym.Convolution(gated, num_filter=64, kernel=(1,)))
        out = out + mx.sym.Convolution(gated, num_filter=width, kernel=(1,))
    out = mx.sym.Convolution(mx.sym.relu(mx.sym.add_n(*skipped)), num_filter=64, kernel=(1,))
    return mx.sym.SoftmaxOutput(out, multi_output=True, name="softmax"), {"data": (8, 1, 2048)}


def norms() -> tuple[Symbol, Shapes]:
    """Convolutions behind norms of groups of channels, after Wu and He 2018."""
    out = mx.sym.Variable("data")
    for width, stride in ((32, 2), (64, 1), (64, 2), (128, 1), (128, 2)):
        options = {"kernel": (3, 3), "pad": (1, 1), "stride": (stride, stride)}
        out = mx.sym.Convolution(out, num_filter=width, no_bias=True, **options)
        out = mx.sym.relu(mx.sym.GroupNorm(out, num_groups=8))
    return classified(out), {"data": (8, 3, 128, 128)}


def pyramid() -> tuple[Symbol, Shapes]:
    """Sums of resized pictures, after Lin et al. 2017."""
    resize = mx.sym.contrib.BilinearResize2D
    levels = [conv(conv(mx.sym.Variable("data"), 32, 3, 2), 64, 3, 2)]
    for width in (128, 256):
        levels.append(conv(conv(levels[-1], width, 3, 2), width))
    sums = [mx.sym.Convolution(level, num_filter=64, kernel=(1, 1)) for level in levels]
    for place, size in ((1, 24), (0, 48)):
        sums[place] = sums[place] + resize(sums[place + 1], height=size, width=size)
    out = mx.sym.Concat(*(resize(conv(each, 64), height=48, width=48) for each in sums), dim=1)
    out = mx.sym.Convolution(conv(out, 64), num_filter=5, kernel=(1, 1))
    out = resize(out, height=192, width=192)
    return mx.sym.SoftmaxOutput(out, multi_output=True, name="softmax"), {"data": (4, 3, 192, 192)}


HELD_OUT: dict[str, Callable[[], tuple[Symbol, Shapes]]] = {
    made.__name__: made
    for made in (text, halves, recurrent_pictures, generator, points, waves, norms, pyramid)
}
