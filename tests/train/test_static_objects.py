"""Objects of Custom ops in a block that MXNet would run as a static graph, which keeps them."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep, planned

LOSS = gluon.loss.L2Loss()
STATIC = {"static_alloc": True, "static_shape": True}
PLAN: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Growing(mx.operator.CustomOp):  # type: ignore[misc]
    """Multiplies by how often this very object has run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.count += 1
        self.assign(out_data[0], req[0], in_data[0] * self.count)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * self.count)


@mx.operator.register("growing")
class GrowingProp(mx.operator.CustomOpProp):  # type: ignore[misc]
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Growing:
        return Growing()


class Layer(gluon.HybridBlock):  # type: ignore[misc]
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.Custom(F.Custom(x, op_type="growing"), op_type="growing")


def network(flags: dict[str, Any], *, within: bool) -> Any:
    """Dense layers and what grows, hybridized as a whole, or only a part ``within``."""
    mx.random.seed(1)
    net, part = nn.HybridSequential(prefix="net_"), nn.HybridSequential(prefix="net_part_")
    part.add(nn.Dense(6, in_units=5), Layer(prefix="net_part_grows_"))
    net.add(part, nn.Dense(3, in_units=6), Layer(prefix="net_grows_"))
    net.initialize(mx.init.Normal(0.5))
    (part if within else net).hybridize(**flags)
    return net


def inputs(size: int) -> Any:
    return mx.nd.array(np.linspace(-1, 1, 5 * size).reshape(5, size).T)


def left_by(net: Any, calls: str, flags: dict[str, Any], step: Any = None) -> list[np.ndarray]:
    """What a loop of these ``calls`` computes, and the gradients."""
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    params, found = net.collect_params().values(), []
    for call in calls:
        x = inputs(8 if call == "T" else 4)
        y = mx.nd.ones((len(x), 3))
        if call == "h":
            net.hybridize(**flags)
        elif call == "i":
            found.append(net(x))
        elif step is not None:
            found.append(step(x, y))
        else:
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            found.append(loss)
        if call in "tT":
            found += [p.grad().copy() for p in params]
            trainer.step(len(x))
    return [array.asnumpy() for array in found]


@pytest.mark.parametrize("flags", [{}, {"static_alloc": True}, STATIC])
@pytest.mark.parametrize("within", [False, True])
def test_training_and_inference_in_turn(flags: dict[str, Any], within: bool) -> None:
    """An inference begins anew, and what trains after one, and so does each change of shapes."""
    calls = "ittiittTTtit"
    expected = left_by(network(flags, within=within), calls, flags)
    net = planned(network(flags, within=within), **PLAN)
    found = left_by(net, calls, flags)
    assert all(map(np.array_equal, expected, found))
    assert len(net.planned_step.plans) == 2
    assert len(expected) == len(found)


def test_a_graph_that_is_made_anew_has_new_ones() -> None:
    expected, found = (
        left_by(planned(net, **PLAN) if plan else net, "tthtti", STATIC)
        for plan, net in ((plan, network(STATIC, within=False)) for plan in (False, True))
    )
    assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize("flags", [{}, STATIC])
def test_steps_with_the_loss(flags: dict[str, Any]) -> None:
    expected = left_by(network(flags, within=False), "tttiTt", flags)
    net = network(flags, within=False)
    found = left_by(net, "tttiTt", flags, TrainStep(net, LOSS, **PLAN))
    assert all(map(np.array_equal, expected, found))
