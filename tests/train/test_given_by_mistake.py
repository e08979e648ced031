"""What a TrainStep or a Module is given by mistake is refused with what was probably meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from memplan.errors import ArgumentError, MemplanError
from memplan.mxnet import BucketingModule, Module
from memplan.mxnet.gluon import TrainStep

X, Y = mx.nd.ones((4, 3)), mx.nd.zeros(4)
LOSS = mx.gluon.loss.SoftmaxCrossEntropyLoss()
NET = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="s")


def step(loss: Any = LOSS, **options: Any) -> TrainStep:
    block = mx.gluon.nn.Dense(2, in_units=3)
    block.initialize()
    return TrainStep(block, loss, strategy="store_all", **options)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: step()(X), r"if it takes a label, call the step with one: step\(x, y\)"),
        (lambda: step(lambda o, y: LOSS(o, y))(X), r"call the step with one: step\(x, y\)"),
        (lambda: step()(X, [Y, Y]), r"the 2 labels arrive as one argument"),
        (lambda: step(None)(X, Y), r"has no loss.* give it that, TrainStep\(block, loss\)"),
        (lambda: step()(X, X, Y), r"got 3 arguments; .* step\(\(x1, x2\), y\)"),
        (lambda: step(budgt="60%"), r"TrainStep has no option 'budgt'; it has block, .*budget,"),
        (lambda: Module(NET, budgt="60%"), r"Module has no option 'budgt'; it has .*budget,"),
        (lambda: BucketingModule(None, budgt=1), r"BucketingModule has no option 'budgt'"),
        (lambda: Module(NET, "60%"), r"data_names cannot be '60%'.* budget='60%'"),
        (lambda: Module(NET, 0.6), r"data_names cannot be 0\.6"),
        (lambda: BucketingModule(lambda key: NET, 4, "60%"), r"logger cannot be '60%'.* budget="),
        (lambda: Module(NET, ("data",), "60%"), r"label_names cannot be '60%'.* budget="),
    ],
)
def test_what_was_meant_is_said(run: Callable[[], Any], said: str) -> None:
    with pytest.raises(MemplanError, match=said):
        run()


@pytest.mark.parametrize("names", ["x", "xy", "yx"])
def test_names_of_a_letter_each_may_be_text_as_for_mxnet(names: str) -> None:
    net = mx.sym.SoftmaxOutput(mx.sym.Variable("x") * mx.sym.Variable("y"), name="softmax")
    assert Module(net, names).data_names == mx.mod.Module(net, names).data_names


@pytest.mark.parametrize("loss", [None, [], mx.nd.ones(4), "detached"])
def test_a_loss_that_was_not_recorded_is_refused_without_mxnets_sources(loss: Any) -> None:
    trained = step(None)
    with mx.autograd.record():
        output = trained.forward(X)
        detached = output.detach().sum()
    with pytest.raises(ArgumentError, match=r"under autograd\.record\(\)") as caught:
        trained.backward(detached if isinstance(loss, str) else loss)
    assert "imperative.cc" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda **o: step(**o), lambda **o: Module(NET, **o)])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("time_limit", 0, "time_limit must be a positive"),
        ("time_limit", float("nan"), "time_limit must be a positive"),
        ("reserve", "lots", "the reserve 'lots' cannot be used"),
        ("costs", "nope", "costs must be a Roofline"),
        ("costs", "roofline:nope", "there is no roofline 'nope'"),
    ],
)
def test_options_are_looked_at_before_the_first_step(
    make: Callable[..., Any], option: str, value: Any, said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        make(**{option: value})
