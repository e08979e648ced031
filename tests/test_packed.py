"""Steps in packed memory: within the bytes of the packing, and as in MXNet, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memplan.errors import TraceError
from memplan.mxnet.trace import trace
from memplan.schedule import Schedule
from networks import Network
from schedules import random_schedule
from test_explicit import CALLS, CASES
from test_explicit_conditions import sparse_dot, sparse_embedding
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


REFUSED = ("Custom 0", "_foreach 0", "_contrib_SyncBatchNorm 0", "IdentityAttachKLSparseReg 0")


@pytest.mark.parametrize("name", REFUSED)
def test_user_code_and_kept_states_are_refused(name: str) -> None:
    symbol, shapes = shelled(*CALLS[name])
    with pytest.raises(TraceError, match="realisation="):
        trace(symbol, shapes=shapes, realisation="packed")


@pytest.mark.parametrize("network", [sparse_embedding, sparse_dot])
def test_sparse_arrays_are_refused(network: Callable[[], Network]) -> None:
    symbol, shapes = network()
    with pytest.raises(TraceError, match="sparse arrays"):
        trace(symbol, shapes=shapes, realisation="packed")


@pytest.mark.parametrize("name", [name for name in CALLS if name not in REFUSED])
def test_ops_compute_the_same(name: str) -> None:
    symbol, shapes = shelled(*CALLS[name])
    traced = trace(symbol, shapes=shapes, realisation="packed")
    values = {n: array.asnumpy() for n, array in arrays(traced, list(traced.shapes)).items()}
    schedules = [random_schedule(traced.graph, 1, repeated=0.7)]
    assert not differences_by_turns(traced, schedules, values, steps=2)
