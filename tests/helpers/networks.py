"""Small networks for tests: each function gives a symbol and the shapes of its inputs."""

from __future__ import annotations

from typing import Any

import mxnet as mx

Network = tuple[mx.sym.Symbol, dict[str, tuple[int, ...]]]


def residual_net(batch: int = 4, size: int = 16, units: int = 3, filters: int = 8) -> Network:
    """A residual network of pre-activated units with BatchNorm."""
    body = _conv(mx.sym.Variable("data"), "first", filters)
    for unit in range(units):
        name = f"unit{unit}"
        branch = _batch_norm_relu(body, f"{name}_a")
        branch = _conv(branch, f"{name}_conv1", filters)
        branch = _batch_norm_relu(branch, f"{name}_b")
        branch = _conv(branch, f"{name}_conv2", filters)
        body = mx.sym.elemwise_add(body, branch, name=f"{name}_add")
    body = _batch_norm_relu(body, "last")
    return _classifier(body), {"data": (batch, 3, size, size)}


def hinted_resnet(
    batch: int = 2, size: int = 16, units: tuple[int, ...] = (2, 3), filters: int = 8
) -> Network:
    """In the manner of memonger's ResNet example: LeakyReLU, and a hint at the end of each unit.

    The hints are ``mirror_stage`` attributes on the sums. The first unit of every stage but the
    first halves the picture and doubles the filters.
    """
    body = _conv(mx.sym.Variable("data"), "first", filters)
    for stage, nunits in enumerate(units):
        width = filters << stage
        for unit in range(nunits):
            name = f"stage{stage}_unit{unit}"
            stride = 2 if stage and not unit else 1
            branch = _batch_norm_leaky(body, f"{name}_a")
            shortcut = body
            if stride == 2:
                shortcut = _conv(branch, f"{name}_shortcut", width, kernel=1, stride=2)
            branch = _conv(branch, f"{name}_conv1", width, stride=stride)
            branch = _batch_norm_leaky(branch, f"{name}_b")
            branch = _conv(branch, f"{name}_conv2", width)
            body = shortcut + branch
            body._set_attr(mirror_stage="True")
    body = _batch_norm_leaky(body, "last")
    return _classifier(body), {"data": (batch, 3, size, size)}


def dropout_net(batch: int = 8, features: int = 20, layers: int = 3) -> Network:
    """Fully connected layers, each followed by ReLU and Dropout."""
    body = mx.sym.Variable("data")
    for layer in range(layers):
        body = mx.sym.FullyConnected(body, num_hidden=32, name=f"fc{layer}")
        body = mx.sym.Activation(body, act_type="relu", name=f"relu{layer}")
        body = mx.sym.Dropout(body, p=0.5, name=f"dropout{layer}")
    return _classifier(body), {"data": (batch, features)}


def dropout_of_pictures() -> Network:
    """Dropout between convolutions, of as many channels as oneDNN lays out in blocks."""
    body = conv(var(), "first", 16)
    body = mx.sym.Dropout(mx.sym.tanh(body), p=0.3, name="dropout")
    return loss(mx.sym.tanh(conv(body, "second", 16))), {"data": (4, 3, 8, 8)}


def two_headed_net(batch: int = 4, size: int = 8) -> Network:
    """A shared body with two losses, one of them early, and a head that is no loss."""
    body = _batch_norm_relu(_conv(mx.sym.Variable("data"), "first", 8), "first")
    early = mx.sym.FullyConnected(body, num_hidden=2, name="early_fc")
    early = mx.sym.LinearRegressionOutput(early, name="early")
    body = _batch_norm_relu(_conv(body, "second", 8), "second")
    features = mx.sym.Pooling(body, pool_type="avg", global_pool=True, name="features")
    late = mx.sym.FullyConnected(features, num_hidden=10, name="late_fc")
    late = mx.sym.SoftmaxOutput(late, name="late")
    return mx.sym.Group([early, late, features]), {"data": (batch, 3, size, size)}


def unrolled_lstm(
    steps: int = 12, layers: int = 2, batch: int = 4, features: int = 6, hidden: int = 8
) -> Network:
    """In the manner of memonger's LSTM example: unrolled, one set of weights for all steps.

    A softmax head per step, and the last states behind BlockGrad.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    weights = [
        {
            part: mx.sym.Variable(f"layer{layer}_{part}")
            for part in ("i2h_weight", "i2h_bias", "h2h_weight", "h2h_bias")
        }
        for layer in range(layers)
    ]
    states = []
    for layer in range(layers):
        states.append(tuple(mx.sym.Variable(f"layer{layer}_init_{part}") for part in "ch"))
        for part in "ch":
            shapes[f"layer{layer}_init_{part}"] = (batch, hidden)
    classes_weight, classes_bias = mx.sym.Variable("cls_weight"), mx.sym.Variable("cls_bias")
    losses = []
    for step in range(steps):
        below = mx.sym.Variable(f"step{step}_data")
        shapes[f"step{step}_data"] = (batch, features)
        for layer in range(layers):
            name = f"step{step}_layer{layer}"
            states[layer] = _lstm_cell(below, states[layer], weights[layer], hidden, name)
            below = states[layer][1]
        scores = mx.sym.FullyConnected(
            below, classes_weight, classes_bias, num_hidden=5, name=f"step{step}_cls"
        )
        losses.append(mx.sym.SoftmaxOutput(scores, name=f"step{step}_softmax"))
    last = [
        mx.sym.BlockGrad(state, name=f"layer{layer}_last_{part}")
        for layer in range(layers)
        for part, state in zip("ch", states[layer], strict=True)
    ]
    return mx.sym.Group(losses + last), shapes


def _lstm_cell(
    below: mx.sym.Symbol,
    state: tuple[mx.sym.Symbol, mx.sym.Symbol],
    weights: dict[str, mx.sym.Symbol],
    hidden: int,
    name: str,
) -> tuple[mx.sym.Symbol, mx.sym.Symbol]:
    cell, out = state
    gates = mx.sym.FullyConnected(
        below,
        weights["i2h_weight"],
        weights["i2h_bias"],
        num_hidden=4 * hidden,
        name=f"{name}_i2h",
    ) + mx.sym.FullyConnected(
        out,
        weights["h2h_weight"],
        weights["h2h_bias"],
        num_hidden=4 * hidden,
        name=f"{name}_h2h",
    )
    parts = mx.sym.SliceChannel(gates, num_outputs=4, name=f"{name}_slice")
    write = mx.sym.sigmoid(parts[0]) * mx.sym.tanh(parts[1])
    cell = mx.sym.sigmoid(parts[2]) * cell + write
    return cell, mx.sym.sigmoid(parts[3]) * mx.sym.tanh(cell)


def _conv(
    data: mx.sym.Symbol, name: str, filters: int, kernel: int = 3, stride: int = 1
) -> mx.sym.Symbol:
    return mx.sym.Convolution(
        data,
        num_filter=filters,
        kernel=(kernel, kernel),
        stride=(stride, stride),
        pad=(kernel // 2, kernel // 2),
        no_bias=True,
        name=name,
    )


def _batch_norm_relu(data: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    body = mx.sym.BatchNorm(data, fix_gamma=False, name=f"{name}_bn")
    return mx.sym.Activation(body, act_type="relu", name=f"{name}_relu")


def _batch_norm_leaky(data: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    body = mx.sym.BatchNorm(data, fix_gamma=False, name=f"{name}_bn")
    return mx.sym.LeakyReLU(body, act_type="leaky", slope=0.2, name=f"{name}_leaky")


def _classifier(body: mx.sym.Symbol) -> mx.sym.Symbol:
    scores = mx.sym.FullyConnected(
        mx.sym.Flatten(body, name="flatten"), num_hidden=10, name="scores"
    )
    return mx.sym.SoftmaxOutput(scores, name="softmax")


def var(name: str = "data", **options: Any) -> mx.sym.Symbol:
    return mx.sym.Variable(name, **options)


def conv(data: mx.sym.Symbol, name: str, filters: int = 8, **options: Any) -> mx.sym.Symbol:
    return mx.sym.Convolution(
        data, num_filter=filters, kernel=(3, 3), pad=(1, 1), name=name, **options
    )


def dense(data: mx.sym.Symbol, units: int = 16, **options: Any) -> mx.sym.Symbol:
    return mx.sym.FullyConnected(data, num_hidden=units, **options)


def loss(data: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.SoftmaxOutput(dense(data, 10, name="scores"), name="softmax")
