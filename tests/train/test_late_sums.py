"""grad_req="add" of what an operator reads that MXNet adds in parts, and a step behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise.late_sums import gradients_added_late
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

S, V, CONTRIB = mx.sym, mx.sym.Variable, mx.sym.contrib
AROUND = (0, 0, 0, 0, 1, 1, 1, 1)
BOTH, EXPLICIT, NONE = ("explicit", "packed"), ("explicit",), ()


def pooled(kind: str, **options: Any) -> Callable[[mx.sym.Symbol], mx.sym.Symbol]:
    return lambda x: S.Pooling(x, kernel=(3, 3), pool_type=kind, p_value=2, **options)


# What reads the data; which steps add behind them with oneDNN, and which without.
READERS: dict[str, tuple[Callable[..., mx.sym.Symbol], tuple[str, ...], tuple[str, ...]]] = {
    "layer norm": (lambda x: S.LayerNorm(x, V("gamma"), V("beta")), BOTH, BOTH),
    "group norm": (lambda x: S.GroupNorm(x, V("gamma"), V("beta"), num_groups=2), BOTH, BOTH),
    "instance norm": (lambda x: S.InstanceNorm(x, V("gamma"), V("beta")), NONE, NONE),
    "adaptive": (lambda x: CONTRIB.AdaptiveAvgPooling2D(x, output_size=(3, 3)), BOTH, BOTH),
    "im2col": (lambda x: S.im2col(x, kernel=(3, 3)), BOTH, BOTH),
    "sum": (pooled("sum"), BOTH, BOTH),
    "norm": (pooled("lp"), BOTH, BOTH),
    "max": (pooled("max"), NONE, BOTH),
    "average": (pooled("avg"), NONE, BOTH),
    "channels last": (pooled("max", layout="NHWC"), BOTH, BOTH),
    "past the end": (pooled("avg", stride=(2, 2), pooling_convention="full"), BOTH, BOTH),
    "apart": (pooled("sum", stride=(3, 3)), NONE, NONE),
    "whole": (pooled("sum", global_pool=True), NONE, NONE),
    "zeros around": (lambda x: S.Pad(x, mode="constant", pad_width=AROUND), NONE, NONE),
    "swapped": (lambda x: S.SwapAxis(x, dim1=1, dim2=2), NONE, NONE),
    "channels": (lambda x: S.SliceChannel(x, num_outputs=2)[0], NONE, NONE),
    "loss": (S.MakeLoss, NONE, NONE),
    "mirrored": (lambda x: S.Pad(x, mode="reflect", pad_width=AROUND), EXPLICIT, EXPLICIT),
    "sampler": (
        lambda x: S.BilinearSampler(x, S.tanh(V("grid", shape=(2, 2, 5, 5)))),
        EXPLICIT,
        EXPLICIT,
    ),
    "correlation": (
        lambda x: S.Correlation(x, V("other", shape=(2, 4, 9, 9)), max_displacement=2),
        EXPLICIT,
        EXPLICIT,
    ),
    "convolution": (lambda x: S.Convolution(x, kernel=(3, 3), num_filter=4), NONE, BOTH),
}


def run(executor: Any, values: dict[str, np.ndarray]) -> np.ndarray:
    """The gradient of the data that three steps leave, which differ."""
    executor.grad_dict["data"][:] = 0
    for step in range(3):
        for name, value in values.items():
            executor.arg_dict[name][:] = mx.nd.array(value * (step + 0.7))
        executor.forward(is_train=True)
        executor.backward()
    return executor.grad_dict["data"].asnumpy()


def network(reader: str) -> tuple[mx.sym.Symbol, dict[str, Any]]:
    """A network of which the gradient of the data is wanted, and how to trace it."""
    output = READERS[reader][0](V("data"))
    shapes = {"data": (2, 4, 9, 9)}
    shapes["factor"] = output.infer_shape(data=shapes["data"])[1][0]
    net = S.MakeLoss(output * V("factor"))
    requests = dict.fromkeys(net.list_arguments(), "null") | {"data": "add"}
    return net, {"shapes": shapes, "grad_req": requests}


@pytest.mark.parametrize("realisation", BOTH)
@pytest.mark.parametrize("reader", READERS)
def test_a_step_says_that_it_adds_behind(
    reader: str, realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, options = network(reader)
    for enabled, late in zip(("1", "0"), READERS[reader][1:], strict=True):
        monkeypatch.setenv("MXNET_MKLDNN_ENABLED", enabled)
        traced = trace(net, realisation=realisation, **options)
        told = gradients_added_late(traced, "cpu")
        assert told == (["data"] if realisation in late else [])


@pytest.mark.parametrize(
    ("reader", "realisation"),
    [(reader, name) for reader in READERS for name in BOTH if name not in READERS[reader][1]],
)
def test_other_sums_have_the_bits_of_mxnet(reader: str, realisation: str) -> None:
    net, options = network(reader)
    traced = trace(net, realisation=realisation, **options)
    random = np.random.default_rng(1)
    values = {name: random.normal(size=traced.shapes[name]) for name in net.list_arguments()}
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph), ctx=mx.cpu(0))
    stock = net.simple_bind(mx.cpu(), grad_req=options["grad_req"], **options["shapes"])
    assert np.array_equal(run(executor, values), run(stock, values))


@pytest.mark.parametrize("realisation", BOTH)
def test_a_step_says_that_it_adds_the_weight_of_an_upsampling_behind(realisation: str) -> None:
    options = {"scale": 2, "sample_type": "bilinear", "num_filter": 4, "num_args": 2}
    net = S.MakeLoss(S.UpSampling(V("data"), V("weight", shape=(4, 1, 4, 4)), **options))
    requests = {"data": "null", "weight": "add"}
    shapes = {"data": (2, 4, 6, 6)}
    traced = trace(net, realisation=realisation, shapes=shapes, grad_req=requests)
    assert gradients_added_late(traced, "cpu") == ["weight"]
