"""Small networks with operators, sharing and gradients that are easily handled wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mxnet as mx

from helpers.networks import Network, conv, dense, loss, var


def unet(filters: int = 8, bias: bool = True, **options: Any) -> Network:
    """Two levels down, two up by Deconvolution, with concatenated shortcuts."""

    def block(data: mx.sym.Symbol, name: str, width: int) -> mx.sym.Symbol:
        body = mx.sym.BatchNorm(conv(data, f"{name}_conv", width), name=f"{name}_bn")
        return mx.sym.Activation(body, act_type="relu", name=f"{name}_relu")

    body = var()
    shortcuts = []
    for level in range(2):
        body = block(body, f"down{level}", filters << level)
        shortcuts.append(body)
        body = mx.sym.Pooling(body, kernel=(2, 2), stride=(2, 2), pool_type="max")
    body = block(body, "bottom", filters << 2)
    for level in reversed(range(2)):
        body = mx.sym.Deconvolution(
            body,
            num_filter=filters << level,
            no_bias=not bias,
            name=f"up{level}_deconv",
            **(options or {"kernel": (2, 2), "stride": (2, 2)}),
        )
        body = block(mx.sym.concat(body, shortcuts[level], dim=1), f"up{level}", filters << level)
    out = conv(body, "out", 1)
    return mx.sym.LogisticRegressionOutput(out, name="mask"), {"data": (2, 3, 16, 16)}


def unet_of_few_tensors(width: int = 32) -> Network:
    """A U-Net of few, large tensors: two levels down, two up to the nearest pixels."""
    convolved = 0

    def block(data: mx.sym.Symbol, filters: int) -> mx.sym.Symbol:
        nonlocal convolved
        convolved += 1
        return mx.sym.relu(conv(data, f"conv{convolved}", filters))

    first = block(block(var(), width), width)
    pooling = {"kernel": (2, 2), "stride": (2, 2), "pool_type": "max"}
    second = block(mx.sym.Pooling(first, **pooling), 2 * width)
    body = block(mx.sym.Pooling(second, **pooling), 4 * width)
    for shortcut, filters in ((second, 2 * width), (first, width)):
        body = mx.sym.UpSampling(body, scale=2, sample_type="nearest")
        body = block(mx.sym.concat(body, shortcut, dim=1), filters)
    out = conv(body, "out", 2)
    return mx.sym.LogisticRegressionOutput(out, name="mask"), {"data": (8, 3, 64, 64)}


def unet_to_target() -> Network:
    """The upward Deconvolutions know their output's shape instead of their padding."""
    body = var()
    for i, size in enumerate(((14, 10), (28, 20))):
        body = mx.sym.Deconvolution(
            body,
            num_filter=6,
            kernel=(2, 2),
            stride=(2, 2),
            target_shape=size,
            name=f"deconv{i}",
        )
        body = mx.sym.relu(body)
    return mx.sym.LinearRegressionOutput(body, name="out"), {"data": (2, 4, 7, 5)}


def shared_deconvolution() -> Network:
    """One weight for two: its gradient is a sum, in memory of the executor's."""
    weight = var("weight")
    body = var()
    for i in range(2):
        body = mx.sym.Deconvolution(
            body, weight, num_filter=4, kernel=(2, 2), stride=(2, 2), name=f"deconv{i}"
        )
        body = mx.sym.tanh(body)
    return mx.sym.MakeLoss(mx.sym.sum(body)), {"data": (2, 4, 5, 5)}


def layer_norm_net() -> Network:
    body = dense(var(), name="first")
    for i in range(3):
        branch = mx.sym.LayerNorm(body, name=f"norm{i}")
        branch = mx.sym.LeakyReLU(dense(branch, name=f"fc{i}"), act_type="gelu")
        body = body + branch
    return loss(body), {"data": (6, 12)}


def group_norm_net() -> Network:
    body = conv(var(), "first")
    for i in range(3):
        norm = mx.sym.GroupNorm(
            body, var(f"norm{i}_gamma"), var(f"norm{i}_beta"), num_groups=2, name=f"norm{i}"
        )
        body = body + conv(mx.sym.relu(norm), f"conv{i}")
    return loss(body), {"data": (2, 3, 8, 8)}


def norms() -> Network:
    """Every other normalisation, one after the other."""
    body = mx.sym.BatchNorm_v1(conv(var(), "first"), name="batch_norm_v1")
    body = mx.sym.InstanceNorm(body, var("in_gamma"), var("in_beta"), name="instance_norm")
    body = mx.sym.L2Normalization(mx.sym.LRN(conv(body, "second"), nsize=3), mode="channel")
    body = mx.sym.Pooling(body, kernel=(3, 3), stride=(2, 2), pool_type="max")
    parts = mx.sym.split(body, num_outputs=4, axis=1)
    body = mx.sym.concat(mx.sym.swapaxes(parts[3], 2, 3), parts[1], parts[2], dim=1)
    return loss(mx.sym.pad(body, mode="edge", pad_width=(0, 0, 0, 0, 1, 1, 1, 1))), {
        "data": (2, 3, 8, 8)
    }


def transformer(hidden: int = 16, nheads: int = 4, wide: int = 32) -> Network:
    """A block of a transformer, after an Embedding of integers."""
    words = mx.sym.Embedding(var(), input_dim=30, output_dim=hidden, name="embedding")
    body = mx.sym.Dropout(words, p=0.1, name="drop")
    heads = [
        mx.sym.reshape(dense(body, hidden, flatten=False, name=n), shape=(0, 0, -4, nheads, -1))
        for n in ("query", "key", "value")
    ]
    query, key, value = (
        mx.sym.reshape(mx.sym.transpose(h, axes=(0, 2, 1, 3)), shape=(-3, 0, 0)) for h in heads
    )
    scores = mx.sym.batch_dot(query, key, transpose_b=True) / math.sqrt(hidden / nheads)
    scores = mx.sym.Dropout(mx.sym.softmax(scores, axis=-1), p=0.1, name="attention_drop")
    joined = mx.sym.batch_dot(scores, value)
    joined = mx.sym.reshape(joined, shape=(-4, -1, nheads, 0, 0))
    joined = mx.sym.reshape(mx.sym.transpose(joined, axes=(0, 2, 1, 3)), shape=(0, 0, -3))
    joined = dense(joined, hidden, flatten=False, name="out")
    body = mx.sym.LayerNorm(body + joined, name="norm1")
    between = mx.sym.LeakyReLU(dense(body, wide, flatten=False, name="wide"), act_type="gelu")
    narrow = dense(between, hidden, flatten=False, name="narrow")
    narrow = mx.sym.Dropout(narrow, p=0.1, name="last_drop")
    body = mx.sym.LayerNorm(body + narrow, name="norm2")
    return loss(body), {"data": (3, 7)}


def attention_layers(count: int) -> Network:
    """Layers of attention with a head each."""
    body = var()
    for layer in range(count):
        query, key, value, passed = (
            dense(body, 32, flatten=False, name=f"{name}{layer}")
            for name in ("query", "key", "value", "passed")
        )
        weights = mx.sym.softmax(mx.sym.batch_dot(query, key, transpose_b=True) / 5.0)
        attended = mx.sym.batch_dot(weights, value)
        body = mx.sym.LayerNorm(attended + passed, name=f"norm{layer}")
    return mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(body))), {"data": (4, 64, 32)}


def embedding() -> Network:
    words = mx.sym.Embedding(var(), input_dim=30, output_dim=8, name="embedding")
    picked = mx.sym.pick(mx.sym.tanh(words), var("places"), axis=-1, name="picked")
    return loss(mx.sym.concat(picked, mx.sym.sum(mx.sym.relu(words), axis=2), dim=1)), {
        "data": (4, 5),
        "places": (4, 5),
    }


def fused_rnn(mode: str = "lstm", p: float = 0.0) -> Network:
    """The inputs of a fused RNN are themselves computed; begin states have unknown shapes."""
    states = [mx.sym.zeros(shape=(2, 0, 8)) for _ in range(2 if mode == "lstm" else 1)]
    names = ("state", "state_cell")[: len(states)]
    body = mx.sym.tanh(dense(var(), 6, flatten=False, name="first"))
    for i in range(2):
        body = mx.sym.RNN(
            mx.sym.relu(body) + 1.0,
            var(f"rnn{i}_parameters"),
            **dict(zip(names, states, strict=True)),
            state_size=8,
            num_layers=2,
            mode=mode,
            p=p,
            name=f"rnn{i}",
        )
    return loss(mx.sym.sum(body, axis=0)), {"data": (5, 3, 4)}


def shared_weights() -> Network:
    weight, bias = var("weight"), var("bias")
    body = dense(var(), name="first")
    for i in range(5):
        body = mx.sym.tanh(
            mx.sym.FullyConnected(body, weight, bias, num_hidden=16, name=f"layer{i}")
        )
    return loss(body), {"data": (4, 7)}


def statistics(name: str) -> dict[str, mx.sym.Symbol]:
    """The states of a BatchNorm."""
    return {part: var(f"{name}_{part}", shape=(7,)) for part in ("moving_mean", "moving_var")}


def normalized_in_two_branches() -> Network:
    """What both calls of a layer read has a third reader: its gradient is a sum of three terms."""
    layer = {"gamma": var("gamma"), "beta": var("beta"), **statistics("norm")}
    data = dense(var(), 4, name="first")
    parts = [mx.sym.BatchNorm(data, **layer, name=f"norm{k}") for k in range(2)]
    return loss(mx.sym.tanh(parts[0] * data) * parts[1]), {"data": (3, 5)}


def twice_normalized() -> Network:
    """By one layer: of two steps by which its statistics are updated, either could be the first.

    MXNet's executor runs so few ops in one bundle, and so in its order.
    """
    layer = {"gamma": var("gamma"), "beta": var("beta"), **statistics("norm")}
    data = var()
    parts = [mx.sym.BatchNorm(part, **layer) for part in (mx.sym.cos(data), mx.sym.sin(data))]
    return loss(mx.sym.sin(parts[0]) * mx.sym.sin(parts[1])), {"data": (5, 7)}


def normalized_by_what_it_reads() -> Network:
    """A layer reads the statistics of another, which are newer when it runs again."""
    states = statistics("norm")
    body = dense(var(), 7, weight=var("weight"), bias=states["moving_mean"], name="reader")
    body = dense(mx.sym.sin(body, name="wave"), 7)
    return loss(mx.sym.BatchNorm(body, **states, momentum=0.5, name="norm")), {"data": (5, 7)}


def repeated_heads() -> Network:
    body = mx.sym.relu(dense(var(), name="first"))
    return mx.sym.Group([body, body, mx.sym.tanh(body), body]), {"data": (4, 7)}


def head_that_is_an_argument() -> Network:
    inputs = var()
    return mx.sym.Group([inputs, mx.sym.relu(dense(inputs))]), {"data": (4, 7)}


def multi_head(batch: int = 2) -> Network:
    """In the manner of SSD: a prediction from every scale, joined, and two losses."""
    body, classes, boxes = var(), [], []
    for scale in range(3):
        body = mx.sym.BatchNorm(conv(body, f"conv{scale}", stride=(2, 2)), name=f"bn{scale}")
        body = mx.sym.Activation(body, act_type="relu")
        for found, name, width in ((classes, "class", 4), (boxes, "box", 4)):
            head = mx.sym.transpose(conv(body, f"{name}{scale}", width), axes=(0, 2, 3, 1))
            found.append(mx.sym.Flatten(head))
    scores = mx.sym.reshape(mx.sym.concat(*classes, dim=1), shape=(0, -1, 4))
    scores = mx.sym.SoftmaxOutput(mx.sym.transpose(scores, axes=(0, 2, 1)), multi_output=True)
    located = mx.sym.smooth_l1(mx.sym.concat(*boxes, dim=1) - var("box_label"), scalar=1.0)
    return mx.sym.Group([scores, mx.sym.MakeLoss(located, grad_scale=0.5)]), {
        "data": (batch, 3, 16, 16),
        "box_label": (batch, 4 * (64 + 16 + 4)),
    }


def heads_of_trunk(nheads: int = 3, filters: int = 32, batch: int = 4) -> Network:
    """Heads with losses of their own on one trunk, whose gradient is the sum of theirs."""
    trunk = mx.sym.Activation(conv(var(), "trunk", 4), act_type="relu", name="trunk_relu")
    losses = []
    for head in range(nheads):
        x = trunk
        for layer in range(2):
            x = mx.sym.BatchNorm(conv(x, f"head{head}_{layer}", filters), fix_gamma=False)
            x = mx.sym.Dropout(mx.sym.sigmoid(x), p=0.3)
        losses.append(mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(x)), name=f"loss{head}"))
    return mx.sym.Group(losses), {"data": (batch, 3, 16, 16)}


def gathered() -> Network:
    body, places = mx.sym.relu(dense(var(), name="first")), var("places")
    picked = mx.sym.gather_nd(body, places, name="gathered")
    spread = mx.sym.scatter_nd(picked * 2, places, shape=(6, 16), name="scattered")
    known = mx.sym.gather_nd(var("table"), places, name="looked_up")
    found = loss(mx.sym.concat(body + spread, mx.sym.tanh(spread), dim=1))
    return mx.sym.Group([found, mx.sym.BlockGrad(known)]), {
        "data": (6, 7),
        "places": (2, 9),
        "table": (6, 16),
    }


def many_terms(count: int) -> Callable[[], Network]:
    """``count`` gradients of one tensor, and of one weight; the tensor is read elsewhere too."""

    def network() -> Network:
        weight = var("weight")
        body = mx.sym.tanh(dense(var(), name="first"))
        parts = [
            mx.sym.FullyConnected(body * (i + 2.0), weight, no_bias=True, num_hidden=16)
            for i in range(count)
        ]
        return loss(sum(map(mx.sym.tanh, parts)) + body), {"data": (4, 7)}

    return network


def one_term_many_times() -> Network:
    whole = part = mx.sym.relu(dense(var(), name="first"))
    for _ in range(9):
        whole = whole + part
    return mx.sym.Group([whole, part]), {"data": (4, 7)}


def duplicates() -> Network:
    body = mx.sym.relu(dense(var(), name="first"))
    twins = [mx.sym.exp(mx.sym.tanh(body)) for _ in range(3)]
    return loss(twins[0] * twins[1] + twins[2]), {"data": (4, 7)}


def constants() -> Network:
    body = dense(var(), name="first")
    ones = mx.sym.zeros(shape=(4, 16)) + mx.sym.ones_like(body)
    return loss(body + ones + mx.sym.zeros_like(body) * body + mx.sym.BlockGrad(body)), {
        "data": (4, 7)
    }


def only_shown() -> Network:
    """Operators whose backward ops keep a state, but whose gradients are zero."""
    body = mx.sym.relu(dense(var(), 5, name="first"))
    scores = dense(mx.sym.BlockGrad(body), 3, name="shown")
    places = var("places")
    entropy = mx.sym.softmax_cross_entropy(scores, places)
    words = mx.sym.Embedding(places, input_dim=3, output_dim=5, name="words")
    product = mx.sym.np.einsum(
        "ij,ij->ij", mx.sym.sin(words).as_np_ndarray(), mx.sym.cos(body).as_np_ndarray()
    )
    shown = mx.sym.Group([mx.sym.BlockGrad(entropy), mx.sym.BlockGrad(product.as_nd_ndarray())])
    return mx.sym.Group([loss(body), *shown]), {"data": (4, 7), "places": (4,)}


def random_numbers() -> Network:
    body = dense(var(), name="first")
    noise = mx.sym.random.normal(shape=(4, 16)) + mx.sym.random.uniform(shape=(4, 16))
    body = body + noise
    return loss(mx.sym.Dropout(body, name="one") + mx.sym.Dropout(body, name="two")), {
        "data": (4, 7)
    }


def half_precision() -> Network:
    body = mx.sym.Cast(var(), dtype="float16")
    body = mx.sym.relu(mx.sym.broadcast_mul(body, mx.sym.Cast(var("scale"), dtype="float16")))
    body = mx.sym.tanh(body) * mx.sym.sigmoid(body)
    return loss(mx.sym.Cast(body, dtype="float32")), {"data": (4, 7), "scale": (1, 7)}


def numpy_operators() -> Network:
    inputs = [var(name).as_np_ndarray() for name in ("data", "weight", "bias")]
    body = mx.sym.npx.fully_connected(mx.sym.np.tanh(inputs[0]), *inputs[1:], num_hidden=8)
    return mx.sym.np.tanh(body * body), {"data": (4, 7)}
