"""Steps in packed memory: within the bytes of the packing, and as in MXNet, bit for bit."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers import block_runs
from helpers.around import AROUND
from helpers.attempts import answer
from helpers.cases import CASES
from helpers.held import held
from helpers.let_go import is_let_go
from helpers.module_runs import module_steps
from helpers.networks import Network, dense, loss, residual_net, var
from helpers.planning import NEVER_SECONDS
from helpers.schedules import random_schedule
from helpers.sparse import sparse_dot, sparse_embedding
from helpers.training_runs import (
    bound,
    differences,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan import strategies
from memplan.cli import main as cli
from memplan.errors import ArgumentError, BudgetError, TraceError, UsageError
from memplan.memory import packing
from memplan.memory.blocks import best_allocation
from memplan.memory.packing import ALIGNMENT
from memplan.mxnet import Module
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.plan_file import load_plan, plan_text
from memplan.mxnet.realise import packed_memory
from memplan.mxnet.realise.lowering import lower
from memplan.planning import least
from memplan.planning.plan import Plan
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.step.validate import validate


# The former has a sum of two sparse gradients.
@pytest.mark.parametrize("network", [sparse_embedding, sparse_dot])
def test_sparse_arrays_are_refused(network: Callable[[], Network]) -> None:
    symbol, shapes = network()
    with pytest.raises(TraceError, match="sparse arrays"):
        trace(symbol, shapes=shapes, realisation="packed")


def test_a_dense_array_may_be_cast_to_one() -> None:
    weight = mx.sym.cast_storage(var("weight", shape=(8, 6)), stype="default")
    body = mx.sym.tanh(mx.sym.dot(mx.sym.cast_storage(mx.sym.relu(var()), "default"), weight))
    symbol, shapes = loss(body), {"data": (4, 8)}
    traced = trace(symbol, shapes=shapes, realisation="packed")
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float64", "float16")])
def test_several_dtypes_for_amp_multicast_are_refused(
    dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = var()
    parts = [mx.sym.Cast(dense(data, 3, name=dtype), dtype=dtype) for dtype in dtypes]
    narrow = mx.sym.amp_multicast(*parts, num_outputs=2, cast_narrow=True)
    terms = [mx.sym.Cast(narrow[place], dtype="float32") for place in range(2)]
    symbol, shapes = mx.sym.MakeLoss(terms[0] * terms[1]), {"data": (2, 4)}
    with pytest.raises(TraceError, match=r"amp_multicast.*several dtypes.*realisation='explicit'"):
        trace(symbol, shapes=shapes, realisation="packed")
    trace(symbol, shapes=shapes, realisation="packed", device_type="gpu")
    traced = trace(symbol, shapes=shapes, realisation="explicit")
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values, 2), planned_steps(executor, 2))
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    trace(symbol, shapes=shapes, realisation="packed")


OPTIONS: dict[str, Any] = {
    "realisation": "packed",
    "costs": "roofline:v100",
    "time_limit": NEVER_SECONDS,
}
NET, SHAPES = residual_net(batch=16)


@pytest.fixture(autouse=True)
def _little_time_to_look_for_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least, "SEARCH_SECONDS", 0.2)


def planned(budget: Any, strategy: str = "auto:effort=0.2", **options: Any) -> Plan:
    return memplan.plan(NET, strategy=strategy, budget=budget, **(OPTIONS | options), **SHAPES)


def assert_true(plan: Plan) -> None:
    """The figures of ``plan`` are those of what it runs in, and it is within its budget."""
    assert plan.realisation == "packed"
    assert validate(plan.schedule).valid
    executor = TrainExecutor(plan.trace, plan.schedule)
    assert executor.memory.nbytes == plan.allocated_nbytes >= plan.peak_nbytes
    assert (
        plan.total_nbytes
        == plan.fixed_nbytes + plan.allocated_nbytes + plan.footprint.reserve_nbytes
    )
    assert plan.budget_nbytes is None or plan.total_nbytes <= plan.budget_nbytes


@pytest.mark.long
def test_plans_are_within_the_budget() -> None:
    everything = planned("64MiB")
    assert everything.overhead == 0
    less = planned(0.7, reserve="1KiB")
    least = planned(None)
    for plan in (everything, less, least):
        assert_true(plan)
    assert everything.total_nbytes > less.total_nbytes > least.total_nbytes
    assert 0 < less.overhead < least.overhead
    assert less.lower_bound_overhead <= less.overhead
    # MXNet's blocks would take more.
    quick = planned(None, "chen_greedy")
    blocks = best_allocation(lower(quick.trace, quick.schedule).schedule)
    assert quick.allocated_nbytes < blocks.nbytes
    with pytest.raises(BudgetError) as caught:
        planned(less.total_nbytes // 4)
    assert caught.value.proved


@pytest.mark.parametrize("name", strategies.names("packed"))
def test_every_strategy_makes_plans(name: str) -> None:
    hidden = mx.sym.tanh(dense(mx.sym.tanh(dense(var(), name="a")), name="b"))
    net = loss(hidden)
    everything = memplan.plan(net, strategy="store_all", **OPTIONS, data=(64, 16))
    for budget in (None, everything.total_nbytes):
        options = OPTIONS | {"max_overhead": math.inf, "data": (64, 16)}
        plan = memplan.plan(net, strategy=name, budget=budget, **options)
        assert_true(plan)
        assert plan.strategy == name
        assert plan.total_nbytes <= everything.total_nbytes


@pytest.mark.long
def test_searches_over_budgets_and_batches() -> None:
    names = ("store_all", "evict")
    rows = memplan.compare(NET, strategies=names, budgets=(0.7, None), **OPTIONS, **SHAPES).rows
    assert [row.plan is None for row in rows] == [True, False, False, False]
    curve = memplan.frontier(NET, strategy="evict", budgets=4, **OPTIONS, **SHAPES).plans
    assert len(curve) >= 2
    budget = planned(0.7, "evict").total_nbytes
    shapes = {"data": ("N", *SHAPES["data"][1:])}
    result = memplan.max_batch_size(NET, budget, strategy="evict", **OPTIONS, **shapes)
    assert result.batch_size >= 12
    for plan in (*(row.plan for row in rows if row.plan), *curve, result.plan):
        assert_true(plan)


@pytest.mark.long
def test_plans_are_made_in_other_processes() -> None:
    options = {"strategies": ("store_all", "chen_greedy"), "budgets": (0.8, None), **OPTIONS}
    here = memplan.compare(NET, **options, **SHAPES)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        there = memplan.compare(NET, executor=executor, **options, **SHAPES)
    assert [answer(row) for row in there.rows] == [answer(row) for row in here.rows]
    assert any(row.plan for row in there.rows)


def module(**options: Any) -> Callable[[Any], Module]:
    return lambda net: Module(net, **options)


def test_a_plan_from_a_file_trains(tmp_path: Path) -> None:
    net, shapes = residual_net()
    shapes = {"data": (16, *shapes["data"][1:])}
    plan = memplan.plan(net, strategy="chen_greedy:linear", budget=0.8, **OPTIONS, **shapes)
    assert plan.overhead > 0
    file = tmp_path / "plan.json"
    file.write_text(plan_text(plan), encoding="utf-8")
    read = load_plan(file)
    assert plan_text(read) == plan_text(plan)
    assert read.schedule == plan.schedule
    assert_true(read)
    held = []

    def note(module: Module) -> None:
        training = module._exec_group.execs[0]._training
        held.append(training and training.memory.nbytes)
        assert module.plan is read

    ours = module_steps(module(plan=read), (16, 16), note)
    # Inference does not fit beside it.
    assert held == [plan.allocated_nbytes, None] * 2
    stock = module_steps(mx.mod.Module, (16, 16), lambda _: None)
    assert not differences(stock, ours)


def test_a_monitor_of_inputs_is_refused_and_nothing_is_lost() -> None:
    size = iter((16, 16))

    def watch(module: Module) -> None:
        if next(size, None):
            with pytest.raises(UsageError, match="realisation='explicit'"):
                module.install_monitor(mx.mon.Monitor(1, monitor_all=True))

    ours = module_steps(module(realisation="packed", strategy="evict"), (16, 8), watch)
    stock = module_steps(mx.mod.Module, (16, 8), lambda _: None)
    assert not differences(stock, ours)


def test_other_cpu_contexts_are_refused() -> None:
    case = CASES["residual"]
    traced = case.trace("packed")
    with pytest.raises(ArgumentError, match=r"not on cpu\(1\); use realisation='explicit'"):
        TrainExecutor(traced, Schedule.unplanned(traced.graph), ctx=mx.cpu(1))


def test_gradients_outlive_their_step() -> None:
    net, step, _ = block_runs.trained(realisation="packed")
    [owner] = {id(b.executor.memory): b.executor.memory for b in step._bound.values()}.values()
    [memory] = owner._segments
    del owner
    expected = block_runs.gradients(net)
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    del step
    nparams = len(params)
    assert is_let_go(lambda: sys.getrefcount(memory) == 2 + nparams)
    # What is let go of would be taken for the next arrays of this size.
    others = [mx.nd.full(memory.shape, 255, dtype="int64") for _ in range(4)]
    block_runs.assert_equal(expected, block_runs.gradients(net))
    del others
    for parameter in params:
        parameter.grad_req = "null"
    assert is_let_go(lambda: sys.getrefcount(memory) == 2), "a leak"


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["residual", "dropout", "fused_dropout"])
def test_identical_in_what_surrounds_a_step(name: str, around: str, tmp_path: Path) -> None:
    case = CASES[name]
    traced = case.trace("packed")
    values = random_values(traced)
    executor = bound(traced, random_schedule(traced.graph, 1), values)
    forward = executor.forward

    def inside(**arguments: Any) -> Any:
        with AROUND[around](tmp_path):
            return forward(**arguments)

    executor.forward = inside  # type: ignore[method-assign]
    assert not differences(stock_steps(traced, values), planned_steps(executor))
    assert not mx.profiler.dumps()


@pytest.mark.parametrize("name", ["residual", "unet", "transformer", "lstm", "fused_lstm"])
def test_a_step_is_handed_over_without_a_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(array: Any) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(packed_memory, "WAITING", 64)  # more than the bundles of any step here
    traced = CASES[name].trace("packed")
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    calls = executor._training._calls
    assert name != "lstm" or len(set(map(id, calls))) < len(calls), "none are one object"
    forward = executor.forward
    monkeypatch.setattr(packed_memory, "wait_to_write", wait)

    def in_one_go(**arguments: Any) -> Any:
        with held():
            return forward(**arguments)

    executor.forward = in_one_go  # type: ignore[method-assign]
    assert not differences(stock_steps(traced, values), planned_steps(executor))


def test_gradients_of_parts_are_joined_without_autograd() -> None:
    """So that an array may be cut into parts again."""
    traced = CASES["lstm"].trace("packed")
    cuts = [op for op in traced.graph.ops if op.kind == "SliceChannel"]
    assert cuts
    assert all(op.recomputable for op in cuts)
    assert not any(node.forward.op == "SliceChannel" for node in traced.nodes if node.forward)


@pytest.mark.parametrize("place", range(6))
def test_the_next_step_waits_for_readers_of_the_last(place: int) -> None:
    symbol, shapes = residual_net(batch=64, units=8)
    traced = trace(symbol, shapes=shapes, realisation="packed")
    executor = bound(traced, Schedule.unplanned(traced.graph), random_values(traced))
    data = executor.arg_dict["data"]
    data[:] = 1
    found = [*executor.forward(is_train=True), *executor.grad_dict.values()][place]
    expected = found.asnumpy()
    slow = mx.nd.ones((500, 500)) / 500
    for _ in range(40):
        slow = mx.nd.dot(slow, slow)
    # One alone: of several, a call of the next step may wait for one, and all others with it.
    late = mx.nd.broadcast_add(found, (slow[0, :1] * 0).reshape((1,) * found.ndim))
    data[:] = 2
    executor.forward(is_train=True)
    assert np.array_equal(late.asnumpy(), expected)


def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    NET.save("net-symbol.json")
    shape = ",".join(map(str, SHAPES["data"]))
    network = ("net-symbol.json", "--shape", f"data={shape}", "--strategy", "chen_greedy")
    options = (*network, "--budget", "80%", "--realisation", "packed")
    assert cli.run(["plan", *options, "-o", "plan.json", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    read = load_plan("plan.json")
    assert_true(read)
    assert said["realisation"] == "packed"
    assert said["planned"]["allocated_nbytes"] == read.allocated_nbytes
    assert cli.run(["plan", *options, "-o", "plan.json"]) == 0
    assert "plan=load_plan('plan.json')" in capsys.readouterr().err
    assert cli.run(["explain", "plan.json"]) == 0
    assert cli.run(["strategies", "--realisation", "packed"]) == 0
    assert "evict" in capsys.readouterr().out


@pytest.mark.long
def test_memory_of_several_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = CASES["residual"].trace("packed")
    largest = max(tensor.nbytes for tensor in traced.graph.tensors)
    segment = ALIGNMENT * -(-largest // ALIGNMENT)
    several = functools.partial(packing.pack, segment_nbytes=segment)
    monkeypatch.setattr("memplan.mxnet.realise.packed_memory.SEGMENT_NBYTES", segment)
    monkeypatch.setattr("memplan.mxnet.realise.packed_step.pack", several)
    schedule = Schedule.unplanned(traced.graph)
    assert several(lower(traced, schedule).schedule).nbytes > 3 * segment
    values = random_values(traced)
    executor = TrainExecutor(
        traced,
        schedule,
        args={name: mx.nd.array(values[name]) for name in traced.symbol.list_arguments()},
        aux_states={
            name: mx.nd.array(values[name]) for name in traced.symbol.list_auxiliary_states()
        },
    )
    assert not differences(stock_steps(traced, values), planned_steps(executor))


@pytest.mark.gpu
@pytest.mark.skipif(not mx.context.num_gpus(), reason="MXNet 1.9.1 has no GPU here")
def test_on_a_gpu() -> None:
    """As in the blocks of an executor there."""
    symbol, shapes = residual_net()
    found = []
    for realisation in ("explicit", "packed"):
        traced = trace(symbol, shapes=shapes, realisation=realisation, device_type="gpu")
        values = random_values(traced)
        arrays_of = {n: mx.nd.array(v, mx.gpu(0), v.dtype) for n, v in values.items()}
        states = symbol.list_auxiliary_states()
        executor = TrainExecutor(
            traced,
            random_schedule(traced.graph, 1),
            ctx=mx.gpu(0),
            args={n: array for n, array in arrays_of.items() if n not in states},
            aux_states={n: arrays_of[n] for n in states},
        )
        found.append(planned_steps(executor))
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-5, err_msg=name)
