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


@mx.operator.register("growing_by_runs")
class GrowingProp(mx.operator.CustomOpProp):  # type: ignore[misc]
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Growing:
        return Growing()


class Layer(gluon.HybridBlock):  # type: ignore[misc]
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.Custom(F.Custom(x, op_type="growing_by_runs"), op_type="growing_by_runs")


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


def static_part(prefix: str, dense: Any = None) -> Any:
    part = nn.HybridSequential(prefix=prefix)
    with part.name_scope():
        part.add(nn.Dense(5, in_units=5) if dense is None else dense, Layer())
    part.hybridize(**STATIC)
    return part


class Parts(gluon.HybridBlock):  # type: ignore[misc]
    """Static parts, called in turn, and behind them a layer that is in no graph of theirs."""

    def __init__(self, prefixes: list[str], turns: list[int], behind: str) -> None:
        super().__init__(prefix="parts_")
        self.turns = turns
        for number, prefix in enumerate(prefixes):
            setattr(self, f"part{number}", static_part(prefix))
        with self.name_scope():
            self.behind = Layer(prefix=behind)
            self.last = nn.Dense(3, in_units=5)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        for number in self.turns:
            x = F.tanh(getattr(self, f"part{number}")(x))
        return self.last(self.behind(x))


def run_beside(calls: str, *parts: Any) -> list[list[np.ndarray]]:
    """What loops of ``calls`` compute, without a plan and with one.

    Digits stand for inference of a part alone. For "s" the first part is replaced by one of its
    name, with its dense layer.
    """
    runs = []
    for is_planned in (False, True):
        mx.random.seed(1)
        net = Parts(*parts)
        net.initialize(mx.init.Normal(0.5))
        net = planned(net, **PLAN) if is_planned else net
        found: list[np.ndarray] = []
        for call in calls:
            if call == "s":
                net.part0 = static_part(net.part0.prefix, net.part0[0])
            elif call.isdigit():
                found.append(getattr(net, f"part{call}")(inputs(4)).asnumpy())
            else:
                found += left_by(net, call, STATIC)
        runs.append(found)
    return runs


@pytest.mark.parametrize(
    ("prefix", "behind"), [("", "elsewhere_"), ("a_", "a_b_"), ("c_", "parts_c_"), ("a_", "a_")]
)
def test_what_is_in_no_static_graph_has_new_ones(prefix: str, behind: str) -> None:
    """Whatever its name is: it is not a part of a block whose prefix that begins with."""
    expected, found = run_beside("ttittTt", [prefix], [0], behind)
    assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize("turns", [[0], [0, 1], [0, 0], [0, 1, 0]])
@pytest.mark.parametrize("calls", ["tt0tt", "tti0tT0t", "tTt0Tttt"])
def test_each_call_of_a_static_graph_has_its_own(calls: str, turns: list[int]) -> None:
    """Inference of one graph leaves those of others, and uses those of its first call only."""
    prefixes = ["a_", "b_"][: max(turns) + 1]
    expected, found = run_beside(calls, prefixes, turns, "behind_")
    assert all(map(np.array_equal, expected, found))


def test_a_graph_in_the_place_of_another_has_new_ones() -> None:
    expected, found = run_beside("ttst0tstti", ["a_", "b_"], [0, 1], "behind_")
    assert all(map(np.array_equal, expected, found))
