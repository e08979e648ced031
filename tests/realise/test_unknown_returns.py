"""Loops and branches with whose results MXNet's executors cannot compute: packed steps can."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import memplan
from memplan.errors import TraceError, UsageError
from memplan.mxnet.gluon import planned
from memplan.mxnet.module import Module

KINDS = ["while_loop", "cond"]

REFUSAL = r"cannot bind .* use realisation='packed'\. MXNet says"


def returned(F: Any, kind: str, x: Any, weight: Any) -> Any:  # noqa: N803
    """What a loop or branch that reads ``weight`` makes of ``x``."""
    if kind == "cond":
        return F.contrib.cond(
            F.sum(x) > 0, lambda: F.tanh(F.dot(x, weight)), lambda: F.dot(x, weight) * 2
        )
    _, (_, last) = F.contrib.while_loop(
        lambda i, _: F.sum(i) < 2,
        lambda i, state: (state, [i + 1, F.tanh(F.dot(state, weight))]),
        [F.zeros((1,)), x],
        max_iterations=4,
    )
    return last


def summed(F: Any, kind: str, x: Any, weight: Any) -> Any:  # noqa: N803
    """A sum over an axis, of which MXNet does not know the shape, and of another array."""
    return F.sum(returned(F, kind, x, weight), axis=1) * 0.2 + F.sum(x, axis=1)


class Summing(gluon.HybridBlock):
    def __init__(self, kind: str, *, trains: bool = True) -> None:
        super().__init__(prefix="net_")
        self.kind, self.trains = kind, trains
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(4, 4), init=mx.init.Uniform(0.9))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        of_data = summed(F, self.kind, x, weight if self.trains else F.BlockGrad(weight))
        return of_data if self.trains else (of_data, F.dot(x, weight))


def steps(kind: str, **options: Any) -> list[np.ndarray]:
    """The output and the gradient of two steps, of which a cond takes either branch."""
    mx.random.seed(7)
    net = Summing(kind)
    net.initialize()
    if options:
        planned(net, **options)
    result = []
    for sign in (1, -1):
        with autograd.record():
            output = net(sign * mx.nd.arange(12).reshape((3, 4)) / 10)
        output.backward()
        result += [output.asnumpy(), net.weight.grad().asnumpy()]
    return result


@pytest.mark.parametrize("strategy", ["store_all", "chen_sqrt"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_steps_compute_with_what_a_loop_returns_as_mxnet_does(
    kind: str, strategy: str
) -> None:
    """As in a block that is not hybridized: MXNet leaves gradients of a hybridized cond unset."""
    found = steps(kind, realisation="packed", strategy=strategy)
    for own, other in zip(steps(kind), found, strict=True):
        assert np.array_equal(own, other)


@pytest.mark.parametrize("kind", KINDS)
def test_explicit_steps_that_mxnet_cannot_bind_are_refused(kind: str) -> None:
    net = Summing(kind, trains=False)
    net.initialize()
    planned(net, realisation="explicit", strategy="store_all")
    refused = pytest.raises(TraceError, match=REFUSAL)
    with refused, autograd.record():
        net(mx.nd.ones((3, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_mirror_plans_that_mxnet_cannot_bind_are_refused(kind: str) -> None:
    with pytest.raises(TraceError, match=REFUSAL):
        memplan.plan(network(kind), data=(3, 4))


def network(kind: str) -> mx.sym.Symbol:
    weight = mx.sym.Variable("weight", shape=(4, 4))
    return mx.sym.MakeLoss(summed(mx.sym, kind, mx.sym.Variable("data"), weight))


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_trains_a_network_by_which_it_cannot_infer(kind: str) -> None:
    batch = mx.io.DataBatch([mx.nd.ones((3, 4))])
    module = Module(network(kind), label_names=[], realisation="packed", strategy="store_all")
    module.bind(data_shapes=[("data", (3, 4))], for_training=True)
    module.init_params(mx.init.One())
    module.init_optimizer()
    module.forward_backward(batch)
    module.update()
    assert np.isfinite(module.get_params()[0]["weight"].asnumpy()).all()
    with pytest.raises(UsageError, match=r"to infer by it.* infer by mx.gluon.SymbolBlock"):
        module.forward(batch, is_train=False)
