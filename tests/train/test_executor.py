"""The executor of explicit plans: under which match range it binds."""

from __future__ import annotations

import dataclasses
import os
import threading
from functools import lru_cache
from typing import Any

import mxnet as mx
import pytest

import memplan
import memplan.mxnet
import memplan.mxnet.gluon
from helpers.networks import Network
from helpers.schedules import random_schedule
from memplan.errors import ArgumentError
from memplan.memory.blocks import allocate
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise.explicit import training_symbol
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.measure import reported_mib
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import match_range, variable
from memplan.mxnet.trace.probe import allocated_mib
from memplan.mxnet.train.pool import training_need
from memplan.planning.plan import Plan
from memplan.planning.realisation import trace
from memplan.planning.shapes import ShapePlanner
from memplan.step.schedule import Schedule

RANGES = (0, 1, 2, 3, 16)


def pyramid() -> Network:
    """Layers of many sizes: what a block can be taken for depends on the range."""
    body = mx.sym.Variable("data")
    for i, width in enumerate((4, 24, 3, 20, 9, 13, 2, 17, 40, 6)):
        dense = mx.sym.FullyConnected(body, num_hidden=64 * width, no_bias=True, name=f"fc{i}")
        body = mx.sym.tanh(dense * 2, name=f"tanh{i}")
    return mx.sym.MakeLoss(mx.sym.sum(body), name="loss"), {"data": (4096, 8)}


@lru_cache(1)
def network() -> tuple[Trace, Schedule]:
    """The pyramid and a schedule of it."""
    symbol, shapes = pyramid()
    traced = trace(symbol, shapes=shapes, realisation="explicit")
    return traced, random_schedule(traced.graph, 1)


@lru_cache(1)
def expected() -> dict[int, int]:
    """MiB under each range, by the model."""
    lowered = lower(*network()).schedule
    found = {n: allocate(lowered, match_range=n).reported_nbytes >> 20 for n in RANGES}
    assert len(set(found.values())) == len(RANGES), "not different enough to tell"
    return found


@pytest.mark.parametrize("value", RANGES)
@pytest.mark.parametrize("users", ["16", "1", None])
def test_the_range_of_a_bind(value: int, users: str | None, monkeypatch: Any) -> None:
    monkeypatch.delenv("NNVM_EXEC_MATCH_RANGE", raising=False)
    if users is not None:
        monkeypatch.setenv("NNVM_EXEC_MATCH_RANGE", users)
    before = dict(os.environ)
    executor = TrainExecutor(*network(), match_range=value)
    assert allocated_mib(executor.debug_str()) == expected()[value]
    assert reported_mib(training_symbol(*network()), network()[0], value) == expected()[value]
    assert allocated_mib(TrainExecutor(*network()).debug_str()) == expected()[int(users or 16)]
    assert dict(os.environ) == before


def test_a_users_search_over_ranges_is_off(monkeypatch: Any) -> None:
    """MXNet would end at another range than that asked for."""
    monkeypatch.setenv("NNVM_AUTO_SEARCH_MATCH_RANGE", "1")
    best = allocated_mib(TrainExecutor(*network()).debug_str())
    assert best < expected()[16]
    assert allocated_mib(TrainExecutor(*network(), match_range=16).debug_str()) == expected()[16]
    assert os.environ["NNVM_AUTO_SEARCH_MATCH_RANGE"] == "1"


def test_the_range_of_mxnets_own_binds() -> None:
    """Of a network that MXNet differentiates itself."""
    symbol, shapes = pyramid()
    traced = trace(symbol, shapes=shapes)
    schedule = Schedule.unplanned(traced.graph)
    found = {n: reported_mib(symbol, traced, n) for n in RANGES}
    assert len(set(found.values())) > 2
    assert found == {n: allocate(schedule, match_range=n).reported_nbytes >> 20 for n in RANGES}


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_range_that_is_none(value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"match_range.*{value!r}"):
        TrainExecutor(*network(), match_range=value)


def test_what_is_no_trace_schedule_or_context() -> None:
    traced, schedule = network()
    with pytest.raises(ArgumentError, match=r"trace must be that of a plan \(plan\.trace\), got 3"):
        TrainExecutor(3, schedule)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="schedule must be that of a plan"):
        TrainExecutor(traced, 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"ctx must be a context .*'cpu'"):
        TrainExecutor(traced, schedule, ctx="cpu")


def test_threads_bind_under_their_own_range() -> None:
    totals: list[tuple[int | None, int]] = []
    network(), expected()

    def bind(value: int | None) -> None:
        for _ in range(3):
            executor = TrainExecutor(*network(), match_range=value)
            totals.append((value, allocated_mib(executor.debug_str())))

    threads = [threading.Thread(target=bind, args=(value,)) for value in (1, 2, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = int(os.environ.get("NNVM_EXEC_MATCH_RANGE", 16))
    assert sorted(totals, key=str) == sorted(
        ((v, expected()[own if v is None else v]) for v in (1, 2, None) for _ in range(3)), key=str
    )


def test_others_wait_while_the_environment_is_changed() -> None:
    """Even those that change nothing: they would bind under what is meant for another."""
    entered = threading.Event()

    def enter() -> None:
        with match_range(None):
            entered.set()

    thread = threading.Thread(target=enter)
    with variable("MEMPLAN_TEST", "1"):
        thread.start()
        assert not entered.wait(0.1)
    thread.join()
    assert entered.is_set()


def ranged(plan: Plan) -> Plan:
    """``plan`` for the match range 2."""
    return dataclasses.replace(plan, footprint=dataclasses.replace(plan.footprint, match_range=2))


def at_two(plan: Plan) -> int:
    """MiB of ``plan`` under its range, which are others than under MXNet's own."""
    lowered = lower(plan.trace, plan.schedule).schedule
    one, other = (allocate(lowered, match_range=n).reported_nbytes >> 20 for n in (2, 16))
    assert one != other
    return one


def test_module_binds_under_the_range_of_its_plan() -> None:
    symbol, shapes = pyramid()
    plan = ranged(memplan.plan(symbol, realisation="explicit", strategy="store_all", **shapes))
    module = memplan.mxnet.Module(symbol, label_names=None, plan=plan)
    module.bind(list(shapes.items()))
    assert allocated_mib(module._exec_group.execs[0].debug_str()) == at_two(plan)
    assert sum(training_need(plan).blocks) >> 20 == at_two(plan)


def test_train_step_binds_under_the_range_of_its_plan(monkeypatch: Any) -> None:
    made = ShapePlanner.plan
    monkeypatch.setattr(ShapePlanner, "plan", lambda *a, **k: ranged(made(*a, **k)))
    block = mx.gluon.SymbolBlock(pyramid()[0], mx.sym.Variable("data"))
    block.initialize()
    step = memplan.mxnet.gluon.TrainStep(block, strategy="store_all", realisation="explicit")
    step(mx.nd.ones((4096, 8)))
    (plan,), (bound,) = step.plans.values(), step._bound.values()
    assert allocated_mib(bound.executor.debug_str()) == at_two(plan)


@pytest.mark.long
def test_variances_are_inferred_where_nobody_reads_the_means() -> None:
    """MXNet computes them from the means, which an executor for inference leaves out."""
    x = mx.sym.tanh(mx.sym.Variable("x") * 2)
    symbol = mx.sym.MakeLoss(mx.sym.moments(x, axes=(0,))[1], name="loss")
    values = mx.nd.random.normal(shape=(64, 8))
    for realisation in ("explicit", "packed"):
        traced = trace(
            symbol, shapes={"x": (64, 8)}, realisation=realisation, grad_req={"x": "write"}
        )
        schedule = Schedule.unplanned(traced.graph)
        executor = TrainExecutor(traced, schedule, ctx=mx.cpu(0), args={"x": values}, aux_states={})
        [trained] = [output.asnumpy() for output in executor.forward(is_train=True)]
        for _ in range(3):
            [inferred] = [output.asnumpy() for output in executor.forward(is_train=False)]
            assert inferred.tobytes() == trained.tobytes()
        assert trained.all()
