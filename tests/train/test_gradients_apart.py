"""Parameters whose gradients are equal have an array each, as in MXNet."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet import Module
from memplan.mxnet.gluon import TrainStep, planned

REALISATIONS = ("packed", "explicit")


class Sums(gluon.HybridBlock):
    """Adds parameters, as they are or in another shape, of which nothing else is computed."""

    def __init__(self, *, is_reshaped: bool) -> None:
        super().__init__(prefix="net_")
        self.is_reshaped = is_reshaped
        with self.name_scope():
            self.dense = nn.Dense(16, in_units=8)
            for name in ("one", "other"):
                options = {"shape": (8, 8), "init": mx.init.Uniform(1)}
                setattr(self, name, self.params.get(name, **options))

    def hybrid_forward(self, F: Any, x: Any, one: Any, other: Any) -> Any:  # noqa: N803
        if self.is_reshaped:
            hidden = self.dense(x) + one.reshape((4, 16)) + other.reshape((4, 16))
        else:
            hidden = self.dense(F.dot(x, one + other))
        return F.tanh(hidden)


def clipped(way: str, realisation: str, *, is_reshaped: bool) -> dict[str, np.ndarray]:
    """The gradients after a step, scaled by their norm."""
    mx.random.seed(3)
    net, x = Sums(is_reshaped=is_reshaped), mx.nd.arange(32).reshape((4, 8)) / 32
    net.initialize(mx.init.Xavier())
    options = {"realisation": realisation, "strategy": "chen_sqrt"}
    if way == "step":
        TrainStep(net, lambda outputs, _: (outputs * outputs).sum(), **options)(x, mx.nd.zeros(1))
    else:
        if way != "stock":
            planned(net, **options)
        with autograd.record():
            loss = (net(x) ** 2).sum()
            if way == "penalised":
                loss = loss + (net.one.data() ** 2).sum()
        loss.backward()
    params = net.collect_params()
    gluon.utils.clip_global_norm([p.grad() for p in params.values()], 0.1)
    return {name: p.grad().asnumpy() for name, p in params.items()}


@pytest.mark.parametrize("is_reshaped", [False, True])
@pytest.mark.parametrize("realisation", REALISATIONS)
@pytest.mark.parametrize("way", ["planned", "step"])
def test_whoever_scales_them_scales_each_once(
    way: str, realisation: str, *, is_reshaped: bool
) -> None:
    expected = clipped("stock", "", is_reshaped=is_reshaped)
    found = clipped(way, realisation, is_reshaped=is_reshaped)
    assert [name for name in expected if not np.array_equal(expected[name], found[name])] == []


@pytest.mark.parametrize("realisation", REALISATIONS)
def test_a_gradient_from_beside_the_block_is_that_of_one(realisation: str) -> None:
    alone = clipped("planned", realisation, is_reshaped=False)
    both = clipped("penalised", realisation, is_reshaped=False)
    ratio = both["net_other"] / alone["net_other"]
    assert np.allclose(ratio, ratio.flat[0], rtol=1e-4)
    assert not np.allclose(both["net_one"], ratio.flat[0] * alone["net_one"], rtol=1e-2)


@pytest.mark.parametrize("realisation", REALISATIONS)
def test_those_of_a_module(realisation: str) -> None:
    weight = mx.sym.Variable("one_weight", shape=(5, 8)) + mx.sym.Variable(
        "other_weight", shape=(5, 8)
    )
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), weight, num_hidden=5, no_bias=True)
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    found = []
    options = {"realisation": realisation, "strategy": "chen_sqrt"}
    for module in (mx.mod.Module(net), Module(net, **options)):
        mx.random.seed(3)
        module.bind([("data", (4, 8))], [("softmax_label", (4,))])
        module.init_params(mx.init.Uniform(1))
        module.init_optimizer(optimizer="adadelta")
        for _ in range(3):
            batch = mx.io.DataBatch([mx.nd.ones((4, 8))], [mx.nd.zeros((4,))])
            module.forward_backward(batch)
            module.update()
        found.append({name: array.asnumpy() for name, array in module.get_params()[0].items()})
    assert [name for name in found[0] if not np.array_equal(found[0][name], found[1][name])] == []
