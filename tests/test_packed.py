"""Steps in packed memory: within the bytes of the packing, and as in MXNet, bit for bit."""

from __future__ import annotations

import pytest

from memplan.mxnet.trace import trace
from memplan.schedule import Schedule
from schedules import random_schedule
from test_explicit import CALLS, CASES
from test_mirror import arrays, shelled
from training_runs import (
    bound,
    differences,
    differences_by_turns,
    planned_steps,
    random_values,
    stock_steps,
)


@pytest.mark.parametrize("name", CASES)
def test_identical_to_mxnet(name: str) -> None:
    case = CASES[name]
    traced = case.trace("packed")
    values = random_values(traced, case.integers)
    stock = stock_steps(traced, values)
    for seed in range(3):
        schedule = random_schedule(traced.graph, seed) if seed else Schedule.unplanned(traced.graph)
        executor = bound(traced, schedule, values)
        assert not differences(stock, planned_steps(executor)), f"seed {seed}"


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("Custom 0", "_foreach 0")])
def test_ops_compute_the_same(name: str) -> None:
    symbol, shapes = shelled(*CALLS[name])
    traced = trace(symbol, shapes=shapes, realisation="packed")
    values = {n: array.asnumpy() for n, array in arrays(traced, list(traced.shapes)).items()}
    schedules = [random_schedule(traced.graph, 1, repeated=0.7)]
    assert not differences_by_turns(traced, schedules, values, steps=2)
