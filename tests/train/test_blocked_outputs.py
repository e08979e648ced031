"""Outputs of planned blocks by which no parameter gets a gradient: losses may read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import assert_equal, gradients
from helpers.blocks import CPU
from helpers.training_runs import Values
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned

QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt"}


class Blocked(gluon.HybridBlock):
    """Its outputs but for the first are behind BlockGrad, integers in effect, and the input."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.features, self.scores = nn.Dense(8, activation="tanh"), nn.Dense(4)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        h = self.features(x)
        shown = [F.BlockGrad(h), F.argmax(h, axis=1)]
        return self.scores(h), shown, x


def beside(o: Any, h: Any, k: Any, x: Any) -> list[Any]:
    return [(o * o).mean(), (h * h).mean(), k.sum()]


def together(o: Any, h: Any, k: Any, x: Any) -> list[Any]:
    return [o.sum() * h.sum() + k.sum(), (h * k.reshape((-1, 1))).sum()]


def blocked_alone(o: Any, h: Any, k: Any, x: Any) -> list[Any]:
    return [(h * h).mean(), (k * 2).sum()]


def outputs_themselves(o: Any, h: Any, k: Any, x: Any) -> list[Any]:
    return [o, h, k]


def blocked_itself(o: Any, h: Any, k: Any, x: Any) -> list[Any]:
    return [h]


def handed_through(o: Any, h: Any, k: Any, x: Any) -> list[Any]:
    return [(o * o).sum(), (x * x).sum()]


Heads = Callable[..., list[Any]]
HEADS: list[Heads] = [
    beside,
    together,
    blocked_alone,
    outputs_themselves,
    blocked_itself,
    handed_through,
]


def begun(hybrid: bool, block: Any = Blocked, width: int = 5) -> Any:
    mx.random.seed(3)
    net = block()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net(mx.nd.ones((3, width), ctx=CPU))
    if hybrid:
        net.hybridize()
    return net


def inputs() -> list[Any]:
    return [mx.nd.arange(15, ctx=CPU).reshape((3, 5)) / n for n in (7, 9)]


def by_mxnet(net: Any, heads: Heads) -> list[Values]:
    results = []
    for x in inputs():
        with autograd.record():
            o, [h, k], x_out = net(x)
            losses = heads(o, h, k, x_out)
        autograd.backward(losses, [mx.nd.ones_like(loss) * 2 for loss in losses])
        results.append(gradients(net))
    return results


def by_halves(net: Any, heads: Heads, **options: Any) -> list[Values]:
    step, results = TrainStep(net, **QUICKLY, **options), []
    for x in inputs():
        with autograd.record():
            o, [h, k], x_out = step.forward(x)
            losses = heads(o, h, k, x_out)
        step.backward(losses, [mx.nd.ones_like(loss) * 2 for loss in losses])
        results.append(gradients(net))
    return results


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_losses_may_be_made_of_them(heads: Heads, hybrid: bool) -> None:
    expected = by_mxnet(begun(hybrid), heads)
    for realisation in ("packed", "explicit"):
        options = {**QUICKLY, "realisation": realisation}
        found = by_mxnet(planned(begun(hybrid), **options), heads)
        found += by_halves(begun(hybrid), heads, realisation=realisation)
        for place, values in enumerate(found):
            assert_equal(expected[place % 2], values)


def test_an_input_may_be_computed_of_what_a_loss_has_read() -> None:
    """Autograd has a graph of it then, in which nothing has a gradient."""
    results = []
    for plan in (False, True):
        net, other = begun(False), begun(False, lambda: nn.Dense(4, prefix="other_"), 4)
        if plan:
            net, other = planned(net, **QUICKLY), planned(other, **QUICKLY)
        [x, _] = inputs()
        target = mx.nd.ones((3, 4), ctx=CPU)
        with autograd.record():
            o, *_ = net(x)
            loss = (o * target).sum() + (other(target * 2) ** 2).sum()
        loss.backward()
        results.append([gradients(net), gradients(other)])
    for found in zip(*results, strict=True):
        assert_equal(*found)


def test_the_input_is_no_loss_of_a_block_that_is_not_hybridized() -> None:
    for net in (begun(False), planned(begun(False), **QUICKLY)):
        with pytest.raises(mx.MXNetError, match="no inputs in computation graph that require"):
            by_mxnet(net, lambda o, h, k, x: [(x * x).sum()])


def test_frozen_features_leave_the_step_to_the_loss() -> None:
    """Autograd knows nothing of them, unless the block is hybridized."""
    results = []
    for plan in (False, True):
        net, head = begun(False), nn.Dense(1, in_units=8)
        head.initialize(ctx=CPU)
        net.features.collect_params().setattr("grad_req", "null")
        if plan:
            net = planned(net, **QUICKLY)
        for x in inputs():
            with autograd.record():
                o, [h, _], _ = net(x)
                losses = [head(h * h).sum(), (o * o).sum()]
            for loss in losses:
                loss.backward()
        results.append(gradients(net))
    assert_equal(*results)


@pytest.mark.parametrize("hybrid", [False, True])
def test_another_planned_block_may_read_them(hybrid: bool) -> None:
    results, read = [], mx.nd.ones((3, 8), ctx=CPU)
    for plan in (False, True):
        net, head = begun(hybrid), begun(hybrid, lambda: nn.Dense(4, prefix="head_"), 8)
        if plan:
            net, head = planned(net, **QUICKLY), planned(head, **QUICKLY)
        for x in inputs():
            with autograd.record():
                o, [h, _], _ = net(x)
                losses = [(o * o).sum(), head(h * 2 + read).sum()]
            autograd.backward(losses)
        results.append(gradients(net) | gradients(head))
    assert_equal(*results)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_backward_through_them_ends_the_step(hybrid: bool) -> None:
    net = planned(begun(hybrid), **QUICKLY)
    with autograd.record():
        o, [h, _], _ = net(inputs()[0])
        losses = [(h * h).sum(), (o * o).sum()]
    losses[0].backward()
    with pytest.raises(UsageError, match="second time"):  # MXNet: "The any container is empty"
        losses[1].backward()


def test_a_loss_beside_them_must_have_a_graph() -> None:
    net = planned(begun(True), **QUICKLY)
    with autograd.record():
        _, [h, _], _ = net(inputs()[0])
        loss = (h * h).sum()
    with pytest.raises(mx.MXNetError, match="not in a computational graph"):
        autograd.backward([loss, mx.nd.ones((1,), ctx=CPU)])
