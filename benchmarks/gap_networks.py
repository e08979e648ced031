"""Networks by name for benchmarks/gaps.py: twenty of 70 to 1,300 ops, and five of thousands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mxnet as mx

import networks
import process_networks
from memplan.errors import ArgumentError
from memplan.mxnet.load import load_network
from memplan.util.files import read_json
from process_networks import Shapes, Symbol, conv

Made = tuple[Symbol, Shapes]


def of_zoo(name: str, size: int = 224, batch: int = 32) -> Made:
    """A network of benchmarks/networks.py."""
    return networks.network(name), {"data": (batch, 3, size, size)}


def ssd() -> Made:
    """Residual stages, then classes and boxes at six resolutions, after Liu et al. 2016."""
    out = conv(conv(mx.sym.Variable("data"), 32, 3, 2), 64, 3, 2)
    heads = []
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            branch = conv(conv(out, width, 3, stride), width)
            out = branch + (out if block else conv(out, width, 1, stride))
        if stage >= 2:
            heads.append(out)
    for width in (256, 256, 128, 128):
        out = conv(conv(out, width // 2, 1), width, 3, 2)
        heads.append(out)
    outputs: list[list[Symbol]] = [[], []]
    for head in heads:
        for parts, nfilter in zip(outputs, (4 * 21, 4 * 4), strict=True):
            part = mx.sym.Convolution(head, kernel=(3, 3), pad=(1, 1), num_filter=nfilter)
            parts.append(mx.sym.Flatten(mx.sym.transpose(part, axes=(0, 2, 3, 1))))
    scores = mx.sym.reshape(mx.sym.Concat(*outputs[0], dim=1), shape=(-1, 21))
    scores = mx.sym.SoftmaxOutput(scores, name="softmax")
    box_loss = mx.sym.MakeLoss(mx.sym.smooth_l1(mx.sym.Concat(*outputs[1], dim=1), scalar=1.0))
    return mx.sym.Group([scores, box_loss]), {"data": (8, 3, 512, 512)}


def tree_lstm(depth: int = 6) -> Made:
    """A binary TreeLSTM over 2**depth leaves, after Tai et al. 2015."""
    width, nleaves = 128, 2**depth
    tokens = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=1000, output_dim=width)
    leaves = mx.sym.split(tokens, num_outputs=nleaves, axis=1, squeeze_axis=True)
    weight, bias = mx.sym.Variable("gates_weight"), mx.sym.Variable("gates_bias")
    level = [(leaf, mx.sym.tanh(leaf)) for leaf in leaves]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [_joined(*pair, weight, bias, width) for pair in pairs]
    out = mx.sym.FullyConnected(level[0][1], num_hidden=10)
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (32, nleaves)}


def _joined(
    left: tuple[Symbol, Symbol],
    right: tuple[Symbol, Symbol],
    weight: Symbol,
    bias: Symbol,
    width: int,
) -> tuple[Symbol, Symbol]:
    """Cell and output of a node of the tree from those of its children."""
    both = mx.sym.Concat(left[1], right[1], dim=1)
    gates = mx.sym.FullyConnected(both, weight=weight, bias=bias, num_hidden=5 * width)
    parts = mx.sym.split(gates, num_outputs=5, axis=1)
    memory = mx.sym.sigmoid(parts[0]) * left[0] + mx.sym.sigmoid(parts[1]) * right[0]
    cell = memory + mx.sym.sigmoid(parts[2]) * mx.sym.tanh(parts[3])
    return cell, mx.sym.sigmoid(parts[4]) * mx.sym.tanh(cell)


def unrolled(nsteps: int = 60) -> Made:
    """A generator trained through the updates of its critic, after Metz et al. 2017.

    The critic is a perceptron; its gradients are written out, so that its weights are activations.
    """
    batch, width = 128, 256
    noise, real = mx.sym.Variable("data"), mx.sym.Variable("real")
    hidden = mx.sym.relu(mx.sym.FullyConnected(noise, num_hidden=width))
    fake = mx.sym.FullyConnected(hidden, num_hidden=width)
    inner = mx.sym.Variable("critic_inner", shape=(width, width))
    outer = mx.sym.Variable("critic_outer", shape=(width, 1))
    for _ in range(nsteps):
        changes = []
        for picture, sign in ((fake, 1.0), (real, -1.0)):
            before = mx.sym.dot(picture, inner)
            active = mx.sym.tanh(before)
            score = mx.sym.tanh(mx.sym.dot(active, outer))
            slope = sign * (1.0 - score * score) / batch
            back = mx.sym.dot(slope, outer, transpose_b=True) * (1.0 - active * active)
            of_outer = mx.sym.dot(active, slope, transpose_a=True)
            changes.append((mx.sym.dot(picture, back, transpose_a=True), of_outer))
        inner = inner - 0.1 * (changes[0][0] + changes[1][0])
        outer = outer - 0.1 * (changes[0][1] + changes[1][1])
    score = mx.sym.dot(mx.sym.tanh(mx.sym.dot(fake, inner)), outer)
    return mx.sym.MakeLoss(mx.sym.mean(score)), {"data": (batch, 64), "real": (batch, width)}


def deep_residual() -> Made:
    """Many equal modules, at batch 1."""
    return networks.memonger_resnet((24,) * 4), {"data": (1, 3, 224, 224)}


# Half of these were looked at while bounds and searches were made; the others check them.
TUNED: dict[str, Callable[[], Made]] = {
    "resnet50_v1": lambda: of_zoo("resnet50_v1"),
    "densenet121": lambda: of_zoo("densenet121"),
    "mobilenet1_0": lambda: of_zoo("mobilenet1_0"),
    "vgg16": lambda: of_zoo("vgg16"),
    "unet": lambda: of_zoo("unet"),
    "high_resolution": process_networks.high_resolution,
    "transformer": process_networks.transformer,
    "lstm": process_networks.lstm,
    "detector": process_networks.detector,
    "dense_blocks": process_networks.dense_blocks,
}
HELD_OUT: dict[str, Callable[[], Made]] = {
    "resnet152_v2": lambda: of_zoo("resnet152_v2"),
    "resnet34_v2": lambda: of_zoo("resnet34_v2"),
    "mobilenet_v2_1_0": lambda: of_zoo("mobilenet_v2_1_0"),
    "squeezenet1_1": lambda: of_zoo("squeezenet1_1"),
    "inception_v3": lambda: of_zoo("inception_v3", 299),
    "ssd": ssd,
    "deep_high_resolution": lambda: process_networks.high_resolution(nmodules=6),
    "deep_transformer": lambda: process_networks.transformer(nlayers=12),
    "resnext": process_networks.resnext,
    "small_unet": process_networks.unet,
}
LONG: dict[str, Callable[[], Made]] = {
    "long_lstm": lambda: process_networks.lstm(nsteps=150),
    "tree_lstm": tree_lstm,
    "unrolled": unrolled,
    "deep_dense_blocks": lambda: process_networks.dense_blocks(nlayers=48),
    "deep_residual": deep_residual,
}
NETWORKS = TUNED | HELD_OUT
SETS = {"tuned": TUNED, "held-out": HELD_OUT, "long": LONG}


def load(path: str, shapes: str) -> Made:
    """A symbol file with shapes such as "data=32,3,224,224;label=32"; or ArgumentError."""
    pairs = (part.split("=") for part in shapes.split(";"))
    try:
        sizes = {name: tuple(map(int, n.split(","))) for name, n in pairs}
    except ValueError as error:
        raise ArgumentError(
            f"the shapes behind a network are such as data=32,3,224,224;label=32, got {shapes!r}"
        ) from error
    return load_network(path, shapes=sizes).symbol, sizes


def is_symbol(path: Path) -> bool:
    """Is the JSON at ``path`` a network of MXNet? ArgumentError if it is no JSON."""
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"it is no JSON that can be read: {error}") from error
    return isinstance(data, dict) and "nodes" in data
