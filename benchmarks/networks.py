"""The networks of the benchmarks, with memonger's hints where its authors would set them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mxnet as mx
from mxnet.gluon.model_zoo import vision

from process_networks import NETWORKS, SMALL, Shapes, Symbol

SHAPE = (32, 3, 224, 224)

# memonger's own code on these networks (CPU wheel of MXNet 1.9.1, MB of MXNet's total for
# activations), measured by running dmlc/mxnet-memonger with its context changed to the CPU.
MEMONGER_MB = {
    "memonger-resnet": 2520,
    "resnet50_v1": 894,
    "densenet121": 1836,
    "mobilenet1_0": 686,
    "vgg16": 1868,
    "resnet152_v2": 1347,
}

_ADD = ("elemwise_add", "_Plus", "_plus", "broadcast_add")
_HINTED_OPS = {
    "resnet50_v1": _ADD,
    "densenet121": ("Concat",),
    "mobilenet1_0": ("Activation",),
    "vgg16": ("Activation",),
    "resnet152_v2": _ADD,
}


def network(name: str) -> Symbol:
    """A named network ending in a softmax, hints set."""
    if name == "memonger-resnet":
        return memonger_resnet((3, 24, 36, 3))
    if name == "unet":
        return unet()
    block = getattr(vision, name)()
    block.initialize()
    net = mx.sym.SoftmaxOutput(block(mx.sym.Variable("data")), name="softmax")
    hints = _HINTED_OPS.get(name, ())
    return with_hints(net, lambda node: node["op"] in hints)


def network_and_shapes(name: str, shape: tuple[int, ...]) -> tuple[Symbol, Shapes]:
    """A network for inputs of ``shape``, or one that has its own."""
    builders = NETWORKS | SMALL
    return builders[name]() if name in builders else (network(name), {"data": shape})


def with_hints(net: Symbol, is_stage: Callable[[dict[str, Any]], bool]) -> Symbol:
    """``net`` with ``mirror_stage`` on every op that ``is_stage`` picks."""
    data = json.loads(net.tojson())
    for node in data["nodes"]:
        if node["op"] != "null" and is_stage(node):
            node.setdefault("attrs", {})["__mirror_stage__"] = "True"
    return mx.sym.load_json(json.dumps(data))


def memonger_resnet(stages: tuple[int, ...]) -> Symbol:
    """The residual network of Chen et al. 2016: bottleneck modules, their inputs hinted."""

    def unit(
        data: Symbol,
        nfilter: int,
        kernel: tuple[int, int],
        pad: tuple[int, int] = (0, 0),
        stride: tuple[int, int] = (1, 1),
    ) -> Symbol:
        out = mx.sym.Convolution(data, kernel=kernel, stride=stride, pad=pad, num_filter=nfilter)
        out = mx.sym.BatchNorm(out, fix_gamma=True)
        return mx.sym.LeakyReLU(out, act_type="leaky")

    out = unit(mx.sym.Variable("data"), 64, (7, 7), (3, 3), (2, 2))
    out = mx.sym.Pooling(out, pool_type="max", kernel=(3, 3), stride=(2, 2))
    for stage, nmodules in enumerate(stages):
        nfilter = 64 * 2**stage
        for module in range(nmodules):
            stride = (2, 2) if stage and not module else (1, 1)
            branch = unit(out, nfilter, (1, 1))
            branch = unit(branch, nfilter, (3, 3), (1, 1), stride)
            branch = unit(branch, 4 * nfilter, (1, 1))
            trunk = out if module else unit(out, 4 * nfilter, (1, 1), stride=stride)
            # the hint goes on what enters the sum, as in memonger's example
            trunk._set_attr(mirror_stage="True")
            out = trunk + branch
    out = mx.sym.Pooling(out, kernel=(7, 7), stride=(1, 1), pool_type="avg", name="global_pool")
    out = mx.sym.FullyConnected(mx.sym.Flatten(out), num_hidden=1000, name="fc1")
    return mx.sym.SoftmaxOutput(out, name="softmax")


def unet(filters: int = 64, depth: int = 4, classes: int = 2) -> Symbol:
    """The U-Net of Ronneberger et al. 2015, padded: a picture's sides are multiples of 2**depth."""

    def block(data: Symbol, nfilter: int) -> Symbol:
        for _ in range(2):
            data = mx.sym.Convolution(data, kernel=(3, 3), pad=(1, 1), num_filter=nfilter)
            data = mx.sym.Activation(data, act_type="relu")
        return data

    out = block(mx.sym.Variable("data"), filters)
    skipped = []
    for level in range(depth):
        skipped.append(out)
        out = mx.sym.Pooling(out, pool_type="max", kernel=(2, 2), stride=(2, 2))
        out = block(out, filters << (level + 1))
    for level in reversed(range(depth)):
        nfilter = filters << level
        out = mx.sym.Deconvolution(out, kernel=(2, 2), stride=(2, 2), num_filter=nfilter)
        out = block(mx.sym.Concat(skipped[level], out, dim=1), nfilter)
    out = mx.sym.Convolution(out, kernel=(1, 1), num_filter=classes)
    return mx.sym.SoftmaxOutput(out, multi_output=True, name="softmax")
