"""Parameters of which a ``cond`` in Python reads some in one branch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import ArgumentError, TraceError
from memplan.mxnet.gluon import TrainStep, planned

QUICKLY: dict[str, Any] = {"strategy": "store_all", "realisation": "packed"}
SIGNS = (1, -1, -1, 1)

Block = Any


def chosen(F: Any, then: Callable[[], Any], other: Callable[[], Any], x: Any) -> Any:  # noqa: N803
    return F.contrib.cond(F.sum(x) > 0, then, other)


def by_layer(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    return chosen(F, lambda: net.a(x), lambda: net.b(x), x)


def behind_a_layer(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    before = net.a(x)
    return net.b(chosen(F, lambda: before * 2, lambda: x * 3, x))


def by_condition(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    return F.contrib.cond(F.sum(net.a(x)) > 0, lambda: net.b(x), lambda: F.tanh(net.b(x)))


def of_two_outputs(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    def both(scale: int) -> list[Any]:
        return [net.a(x * scale), net.b(x)]

    return F.tanh(chosen(F, lambda: both(1), lambda: both(2), x)[1])


def one_of_two_outputs(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    def both(scale: int) -> list[Any]:
        return [net.a(x * scale), net.b(x)]

    return chosen(F, lambda: both(1), lambda: both(2), x)[1]


def in_both(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    return chosen(F, lambda: net.b(net.a(x)), lambda: F.tanh(net.a(net.b(x))), x)


def behind_both(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    before, other = net.a(x), net.b(x)
    return chosen(F, lambda: before, lambda: other, x) + F.tanh(before) * F.tanh(other)


def by_two_ways(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    before = net.b(net.a(x))
    other = F.relu(before)
    return chosen(F, lambda: other, lambda: before * 2, x)


def beside(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    return chosen(F, lambda: net.a(x), lambda: net.b(x), x) + net.b(net.a(x))


def in_both_outputs(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    return F.concat(
        *chosen(F, lambda: [net.a(x), net.b(x)], lambda: [net.b(x), net.a(x)], x), dim=1
    )


def by_where(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    """What the refusal advises."""
    a, b = net.a(x), net.b(x)
    return F.where(F.broadcast_mul(F.ones_like(a), F.sum(x) > 0), a, b)


Computes = Callable[[Any, Block, Any], Any]


class Net(gluon.HybridBlock):
    """Two layers, by which ``computes`` computes."""

    def __init__(self, computes: Computes) -> None:
        super().__init__(prefix="net_")
        self.computes = computes
        with self.name_scope():
            self.a, self.b = nn.Dense(4, in_units=4), nn.Dense(4, in_units=4)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.computes(F, self, x)


def made(computes: Computes) -> Block:
    mx.random.seed(3)
    net = Net(computes)
    net.initialize(mx.init.Xavier())
    return net


def trained(net: Block, *, from_zeros: bool = False) -> list[np.ndarray]:
    """Its parameters after some steps by Adam, whose gradients may all be zeros before."""
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1, "wd": 0.1})
    for sign in SIGNS:
        if from_zeros:
            net.collect_params().zero_grad()
        with autograd.record():
            loss = (net(sign * mx.nd.ones((2, 4))) ** 2).sum()
        loss.backward()
        trainer.step(2)
    return [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize(
    ("computes", "parameter"),
    [
        (by_layer, "net_dense0_weight"),
        (behind_a_layer, "net_dense0_weight"),
        (by_condition, "net_dense0_weight"),
        (of_two_outputs, "net_dense0_weight"),
        (one_of_two_outputs, "net_dense0_weight"),
    ],
)
def test_what_one_branch_trains_is_refused(computes: Computes, parameter: str) -> None:
    """MXNet leaves its gradient alone, and ``trainer.step`` the parameter, or raises."""
    net = made(computes)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trained(net)
    planned(net, **QUICKLY)
    with autograd.record(), pytest.raises(TraceError, match=f"leaves parameter '{parameter}'"):
        net(mx.nd.ones((2, 4)))


def test_so_it_is_in_a_train_step() -> None:
    x = mx.nd.ones((2, 4))
    step = TrainStep(made(by_layer), gluon.loss.L2Loss(), **QUICKLY)
    with pytest.raises(TraceError, match=r"block 'net' runs the cond 'net__cond0' in Python"):
        step(x, x)


@pytest.mark.parametrize(
    "computes", [in_both, behind_both, by_two_ways, beside, in_both_outputs, by_where]
)
def test_what_is_always_trained_equals_mxnet(computes: Computes) -> None:
    found = trained(planned(made(computes), **QUICKLY))
    for own, other in zip(trained(made(computes)), found, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5)


def test_what_only_the_condition_reads_can_be_frozen() -> None:
    results = []
    for plan in (False, True):
        net = made(by_condition)
        net.a.collect_params().setattr("grad_req", "null")
        results.append(trained(planned(net, **QUICKLY) if plan else net))
    for own, found in zip(*results, strict=True):
        assert np.array_equal(own, found)


class Flagged(gluon.HybridBlock):
    """A graph of a cond alone, which MXNet runs as an operator."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.a = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F: Any, x: Any, flag: Any) -> Any:  # noqa: N803
        return F.contrib.cond(flag, lambda: self.a(x), lambda: x * 2)


def by_child(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    return net.b(net.a(x)) + net.child(x, F.sum(x) > 0)


@pytest.mark.parametrize("kind", ["block", "child"])
def test_a_graph_trains_as_in_mxnet_from_zeros(kind: str) -> None:
    """Also one of so few operators that MXNet calls them one by one. No gradient is stale."""

    def network() -> Block:
        net = made(by_child if kind == "child" else by_layer)
        if kind == "child":
            net.child = Flagged()
            net.child.initialize()
            net.child.hybridize()
        else:
            net.hybridize()
        return net

    # MXNet leaves the gradients of the branch that it does not take as they were.
    expected = trained(network(), from_zeros=True)
    for own, other in zip(expected, trained(planned(network(), **QUICKLY)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5)


class Deferred(gluon.HybridBlock):
    """Layers in branches whose shapes MXNet infers where these run, and in no graph."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        with self.name_scope():
            self.a, self.b = nn.Dense(4, **sizes), nn.Dense(4, **sizes)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return by_layer(F, self, x)


@pytest.mark.parametrize("advice", [None, "in_units", "call"])
def test_a_layer_of_unknown_size_in_a_branch(advice: str | None) -> None:
    net = Deferred(in_units=5) if advice == "in_units" else Deferred()
    net.initialize()
    x = mx.nd.ones((3, 5))
    if advice == "call":
        net(x), net(-x)
    net.hybridize()
    planned(net, **QUICKLY)
    with autograd.record():
        if advice is None:
            with pytest.raises(ArgumentError, match=r"dense0_weight', .* their in_units"):
                net(x)
            return
        loss = net(x).sum()
    loss.backward()
    assert np.array_equal(net.a.weight.grad().asnumpy(), 3 * np.ones((4, 5)))


def again_and_again(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    """Three conds that read one layer in both branches."""
    for _ in range(3):
        value = x
        x = net.b(chosen(F, lambda x=value: net.a(x), lambda x=value: F.tanh(net.a(x)), x))
    return x


def where_again_and_again(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    """The same, as the refusal advises."""
    for _ in range(3):
        a = net.a(x)
        x = net.b(F.where(F.broadcast_mul(F.ones_like(a), F.sum(x) > 0), a, F.tanh(a)))
    return x


def test_several_conds_of_one_layer_are_refused_by_name() -> None:
    """There is no loop, and nothing to rename."""
    message = (
        r"both named 'net_dense0_weight': op 'net__cond\d' \(_cond\) makes one of its own .*"
        r"; compute a and b, .*F\.where"
    )
    net = planned(made(again_and_again), **QUICKLY)
    with autograd.record(), pytest.raises(TraceError, match=message):
        net(mx.nd.ones((2, 4)))


def test_what_is_advised_for_several_conds_equals_mxnet() -> None:
    found = trained(planned(made(where_again_and_again), **QUICKLY))
    stock = [trained(made(each)) for each in (where_again_and_again, again_and_again)]
    for own, cond, other in zip(*stock, found, strict=True):
        np.testing.assert_allclose(other, own, rtol=1e-5)
        np.testing.assert_allclose(other, cond, rtol=1e-4)


def in_a_loop_and_twice(F: Any, net: Block, x: Any) -> Any:  # noqa: N803
    found, _ = F.contrib.foreach(lambda part, state: (net.a(part), state), F.stack(x, x), x)
    return F.sum(found, axis=0) + net.b(net.a(net.a(x)))


@pytest.mark.filterwarnings("ignore:.*runs its loop .* as an operator")
def test_a_loop_beside_other_readers_is_named() -> None:
    net = planned(made(in_a_loop_and_twice), **QUICKLY)
    message = r"'net__foreach\d' \(_foreach\) makes one of its own .*; let one loop read"
    with autograd.record(), pytest.raises(TraceError, match=message):
        net(mx.nd.ones((2, 4)))
