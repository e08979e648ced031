"""What autograd computes beside a planned step: the same as without a plan, or refused."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned

SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss()


def network() -> tuple[Any, Any]:
    """A network, and its first layers as a block by themselves."""
    net, features = nn.HybridSequential(), nn.HybridSequential()
    net.add(nn.Dense(6), nn.BatchNorm(), nn.Activation("tanh"), nn.Dense(3))
    features.add(*list(net._children.values())[:3])
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((2, 4)))
    return net, features


def trained(net: Any) -> list[Any]:
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def penalty_of(net: Any) -> Any:
    return sum((p.data() ** 2).sum() for p in trained(net))


def batch() -> Any:
    return mx.nd.random.normal(shape=(5, 4))


def values(net: Any) -> list[np.ndarray[Any, Any]]:
    return [p.data().asnumpy() for p in net.collect_params().values()]


def arrays(net: Any) -> list[np.ndarray[Any, Any]]:
    return values(net) + [p.grad().asnumpy() for p in trained(net)]


Loop = Callable[[Any, Any], list[Any]]


def left_by(loop: Loop, realisation: str | None) -> list[np.ndarray[Any, Any]]:
    """What a loop of three steps leaves; planned, unless ``realisation`` is None."""
    mx.random.seed(5)
    net, features = network()
    net.hybridize()
    if realisation is not None:
        planned(net, strategy="chen_sqrt", realisation=realisation)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    seen = []
    for _ in range(3):
        extra = loop(net, features)
        seen += [array.asnumpy() for array in extra] + arrays(net)
        trainer.step(5)
    return seen + arrays(net)


def check_equal(loop: Loop, realisation: str) -> None:
    expected, found = left_by(loop, None), left_by(loop, realisation)
    assert len(expected) == len(found)
    assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


def penalty_behind(net: Any, features: Any) -> list[Any]:
    with autograd.record():
        loss, penalty = SOFTMAX(net(batch()), mx.nd.zeros(5)), penalty_of(net)
    loss.backward()
    penalty.backward()
    return [loss, penalty]


def two_penalties_behind(net: Any, features: Any) -> list[Any]:
    """One of which was recorded before the step was finished, and the other one behind it."""
    with autograd.record():
        loss, penalty = SOFTMAX(net(batch()), mx.nd.zeros(5)), penalty_of(net)
    loss.backward()
    with autograd.record():
        both = penalty + 3 * (net[0].weight.data() ** 2).sum()
    both.backward()
    return [loss, both]


def penalty_in_and_behind(net: Any, features: Any) -> list[Any]:
    with autograd.record():
        loss, penalty = SOFTMAX(net(batch()), mx.nd.zeros(5)), penalty_of(net)
        other = (net[0].weight.data() ** 3).sum()
        total = loss + penalty
    total.backward()
    other.backward()
    return [loss, other]


def features_by_themselves(net: Any, features: Any) -> list[Any]:
    """Two backward, each of which updates the statistics, in this order: as the error advises."""
    for parameter in trained(net):
        parameter.grad_req = "add"
    net.collect_params().zero_grad()
    with autograd.record():
        other = features(3 + batch()).square().mean()
    other.backward()
    with autograd.record():
        loss = SOFTMAX(net(batch()), mx.nd.zeros(5))
    loss.backward()
    return [loss, other]


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize(
    "loop", [penalty_behind, two_penalties_behind, penalty_in_and_behind, features_by_themselves]
)
def test_what_is_recorded_between_the_halves(loop: Loop, realisation: str) -> None:
    check_equal(loop, realisation)


def test_a_backward_behind_the_step_that_fails_leaves_its_gradients() -> None:
    net, _ = network()
    planned(net, strategy="chen_sqrt")
    with autograd.record():
        loss, penalty = SOFTMAX(net(batch()), mx.nd.zeros(5)), penalty_of(net)
    loss.backward()
    before = arrays(net)
    with pytest.raises((mx.MXNetError, AssertionError)):
        autograd.backward([penalty], [mx.nd.ones(1), mx.nd.ones(1)])
    assert all(p.data()._fresh_grad for p in trained(net))
    assert all(np.array_equal(a, b) for a, b in zip(before, arrays(net), strict=True))


def test_gradients_that_were_asked_for_before_the_loop() -> None:
    """The arrays stay the gradients, through steps of several shapes, whole ones and halves."""

    def steps(net: Any, step: Any, gradients: list[Any]) -> list[Any]:
        norms = []
        for size in (5, 3, 5, 5):
            x, y = mx.nd.random.normal(shape=(size, 4)), mx.nd.zeros(size)
            for whole in (False, True):
                if whole and step is not None:
                    step(x, y)
                else:
                    with autograd.record():
                        loss = SOFTMAX(net(x), y)
                    loss.backward()
                norms.append(gluon.utils.clip_global_norm(gradients, 0.1))
        return norms

    results = []
    for plan in (False, True):
        mx.random.seed(5)
        net, _ = network()
        net.hybridize()
        gradients = [p.grad() for p in trained(net)]
        step = TrainStep(net, SOFTMAX, strategy="chen_sqrt") if plan else None
        if plan:
            planned(net, strategy="chen_sqrt")
        norms = steps(net, step, gradients)
        assert all(p.grad() is array for p, array in zip(trained(net), gradients, strict=True))
        results.append([*norms, *arrays(net)])
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def features_too(net: Any, features: Any) -> list[Any]:
    x, z = batch(), 3 + batch()
    with autograd.record():
        loss = SOFTMAX(net(x), mx.nd.zeros(5)) + features(z).square().mean()
    loss.backward()
    return [loss]


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("static", [False, True])
def test_a_layer_with_statistics_called_past_the_block(static: bool, request_: str) -> None:
    """MXNet updates them in the order of the graph; nothing is changed where that is refused."""
    net, features = network()
    net.collect_params().setattr("grad_req", request_)
    features.hybridize(static_alloc=static, static_shape=static, inline_limit=2 * (not static))
    planned(net, strategy="chen_sqrt")
    before = values(net)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"batchnorm\d+_running_.*differentiate the two"):
            features_too(net, features)
    assert all(np.array_equal(a, b) for a, b in zip(before, values(net), strict=True))
    features_by_themselves(net, features)


def test_a_layer_without_statistics_called_past_the_block() -> None:
    def loop(net: Any, features: Any) -> list[Any]:
        with autograd.record():
            loss = SOFTMAX(net(batch()), mx.nd.zeros(5)) + net[0](batch()).square().mean()
        loss.backward()
        return [loss]

    check_equal(loop, "packed")


def warned_of_sums(penalty: Callable[[Any], Any], request: str) -> bool:
    """Does a planned step with a ``penalty`` on a weight warn? Without, its gradients are equal."""
    found = []
    for plan in (False, True):
        mx.random.seed(5)
        net, _ = network()
        net.collect_params().setattr("grad_req", request)
        net.hybridize()
        if plan:
            planned(net, strategy="chen_sqrt")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                with autograd.record():
                    loss = SOFTMAX(net(batch()), mx.nd.zeros(5)) + penalty(net[0].weight.data())
                loss.backward()
        found.append(arrays(net))
    is_warned = any("added up before that of the block" in str(w.message) for w in caught)
    assert is_warned or all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    return is_warned


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "reads once": lambda w: (w**2).sum(),
    "reads twice": lambda w: (w * w).sum(),
    "reads four times": lambda w: (w * w).sum() + w.abs().sum() + w.sin().sum(),
    "reads six times": lambda w: (w * w).sum() + (w.sin() * w.abs()).sum() + (w.exp() * w).sum(),
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_sums_of_gradients_that_mxnet_adds_in_another_order_are_warned_of(penalty: str) -> None:
    rounds = penalty in ("reads twice", "reads four times")
    assert warned_of_sums(PENALTIES[penalty], "write") == rounds
    assert warned_of_sums(PENALTIES[penalty], "add")


@pytest.mark.parametrize("steps_before", [0, 1, 2])
@pytest.mark.parametrize("in_one", [False, True])
def test_parameters_that_were_read_before_the_block(steps_before: int, in_one: bool) -> None:
    """Autograd would write where the step has its activations."""
    net, _ = network()
    planned(net, strategy="chen_sqrt")
    for size in range(steps_before):
        with autograd.record():
            loss = net(mx.nd.ones((5 + size, 4))).sum()
        loss.backward()
    with autograd.record():
        penalty = penalty_of(net)
        loss = SOFTMAX(net(batch()), mx.nd.zeros(5))
        total = loss + penalty
    if not in_one:
        loss.backward()
    with pytest.raises(UsageError, match="call the block first"):
        (total if in_one else penalty).backward()
    with autograd.record():
        loss = SOFTMAX(net(batch()), mx.nd.zeros(5))
        total = loss + penalty_of(net)
    total.backward()


@pytest.mark.parametrize("kind", [lambda heads: dict(enumerate(heads)).values(), deque])
def test_losses_may_be_in_whatever_mxnet_goes_through(kind: Callable[[Any], Any]) -> None:
    net, _ = network()
    planned(net, strategy="chen_sqrt")
    with autograd.record():
        penalty = penalty_of(net)
        loss = SOFTMAX(net(batch()), mx.nd.zeros(5))
    with pytest.raises(UsageError, match="call the block first"):
        autograd.backward(kind([loss, penalty]))


def test_a_penalty_in_a_view_is_differentiated_after_the_step() -> None:
    def differentiated_in_a_view(net: Any, _: Any) -> list[Any]:
        with autograd.record():
            loss = SOFTMAX(net(batch()), mx.nd.zeros(5))
            penalty = penalty_of(net)
        loss.backward()
        autograd.backward({"penalty": penalty}.values())
        return []

    check_equal(differentiated_in_a_view, "packed")


def test_parameters_that_were_read_before_the_first_half() -> None:
    net, _ = network()
    step = TrainStep(net, strategy="chen_sqrt")
    with autograd.record():
        penalty = penalty_of(net)
        loss = step.forward(batch()).sum() + penalty
    with pytest.raises(UsageError, match="call the block first"):
        step.backward(loss)


@pytest.mark.parametrize("strategy", ["store_all", "chen_sqrt"])
def test_parameters_that_are_updated_before_backward(strategy: str) -> None:
    """What is computed again would be computed by them, and MXNet computes nothing again."""

    def run(is_planned: bool) -> list[np.ndarray[Any, Any]]:
        mx.random.seed(5)
        net = nn.HybridSequential()
        for _ in range(6):
            net.add(nn.Conv2D(6, 3, padding=1), nn.BatchNorm(), nn.Activation("tanh"))
        net.add(nn.Dense(3))
        net.initialize(mx.init.Xavier())
        images = mx.nd.random.normal(shape=(5, 3, 8, 8))
        net(images)
        if is_planned:
            planned(net, strategy=strategy)
        else:
            net.hybridize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        for number in range(3):
            with autograd.record():
                loss = SOFTMAX(net(images), mx.nd.zeros(5))
                penalty = penalty_of(net)
            if number == 1:
                penalty.backward()
                trainer.step(1, ignore_stale_grad=True)
            loss.backward()
            trainer.step(5)
        return arrays(net)

    if strategy == "store_all":
        assert all(map(np.array_equal, run(False), run(True)))
    else:
        with pytest.raises(UsageError, match="was updated by a trainer between"):
            run(True)
