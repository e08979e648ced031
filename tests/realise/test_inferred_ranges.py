"""A range whose end MXNet infers from what reads it, which it does in graphs only."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest

from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.planning.realisation import trace


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize(
    "options",
    [
        {"start": 0},
        {"start": 3, "step": 0.1},
        {"start": 2, "step": -0.5, "repeat": 3},
        {"start": 1e6, "step": 7},
    ],
)
def test_it_is_that_of_the_graph(options: dict[str, Any], realisation: str) -> None:
    data = mx.sym.Variable("data")
    places = mx.sym.arange(stop=None, infer_range=True, **options)
    net = mx.sym.MakeLoss(mx.sym.sum(mx.sym.tanh(data) * mx.sym.sin(data + places)))
    traced = trace(net, shapes={"data": (6,)}, grad_req="write", realisation=realisation)
    values = random_values(traced)
    steps = planned_steps(bound(traced, random_schedule(traced.graph, 1), values), 1)
    assert not differences(stock_steps(traced, values, 1), steps)
