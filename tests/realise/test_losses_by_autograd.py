"""Losses that autograd calls: they read no gradient of what they return, and none is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers import odd_blocks  # noqa: F401  # registers Custom ops
from helpers.networks import dense, var
from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.realise import imperative
from memplan.mxnet.realise.imperative import RecordedCall
from memplan.mxnet.realise.own_autograd import backward_of_mxnet
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace

ROWS, CLASSES = 8, 5


def margins(scores: mx.sym.Symbol, **options: Any) -> mx.sym.Symbol:
    return mx.sym.SVMOutput(scores, var("label", shape=(ROWS,)), **options)


def of_squares(scores: mx.sym.Symbol, **options: Any) -> mx.sym.Symbol:
    return mx.sym.MakeLoss(mx.sym.square(scores), grad_scale=0.5, **options)


LOSSES: dict[str, Callable[[mx.sym.Symbol], mx.sym.Symbol]] = {
    "squared_margins": margins,
    "margins": lambda scores: margins(scores, use_linear=True, regularization_coefficient=0.5),
    "squares": of_squares,
    "squares_of_batch": lambda scores: of_squares(scores, normalization="batch"),
    "valid_squares": lambda scores: of_squares(scores, normalization="valid", valid_thresh=0.1),
    "of_user": lambda scores: mx.sym.Custom(scores, op_type="odd_squares")[0],
}

# Of the others, which are MakeLoss's, the state is kept.
BY_AUTOGRAD = ("squared_margins", "margins", "of_user")


def traced_loss(name: str, *, is_read: bool = False) -> Trace:
    with mx.name.NameManager():
        body = mx.sym.Dropout(mx.sym.sin(dense(var(), 16)), p=0.5)
        net = LOSSES[name](dense(body, CLASSES))
        if is_read:  # what follows has a gradient, which the loss ignores
            net = mx.sym.MakeLoss(mx.sym.sum(mx.sym.exp(net)))
    return trace(net, shapes={"data": (ROWS, 7)}, realisation="packed")


@pytest.mark.parametrize("name", LOSSES)
def test_no_ones_are_made_for_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet would make an array as large as the output, which no plan counts."""
    given: list[tuple[Any, Any]] = []

    def backward(heads: Any, gradients: Any) -> None:
        given.extend(zip(heads, gradients or (None,), strict=True))
        backward_of_mxnet(heads, gradients)

    monkeypatch.setattr(imperative, "backward_of_mxnet", backward)
    traced = traced_loss(name)
    values = random_values(traced, {"label": CLASSES})
    planned_steps(bound(traced, random_schedule(traced.graph, 1), values), steps=1)
    assert bool(given) == (name in BY_AUTOGRAD)
    assert all(gradient is not None and gradient.shape == head.shape for head, gradient in given)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_nobody_reads_what_they_are_given(name: str, is_read: bool) -> None:
    """Numbers are MXNet's, and stay so with no numbers in these arrays."""
    traced = traced_loss(name, is_read=is_read)
    values = random_values(traced, {"label": CLASSES})
    stock = stock_steps(traced, values)
    schedule = random_schedule(traced.graph, 1)
    assert not differences(stock, planned_steps(bound(traced, schedule, values)))
    executor = bound(traced, schedule, values)
    calls = executor._training._calls
    losses = [call for call in calls if isinstance(call, RecordedCall) and not call.backward.used]
    assert bool(losses) == (name in BY_AUTOGRAD)
    for call in losses:
        call.backward.used.append(mx.nd.full(call.outputs[0].shape, float("nan")))
    assert not differences(stock, planned_steps(executor))
