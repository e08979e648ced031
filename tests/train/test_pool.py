"""What executors that share their memory hold together: as MXNet does it, and within the budget."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import memplan
from helpers.fresh_process import in_a_fresh_process
from helpers.module_runs import batch, module_steps
from helpers.networks import hinted_resnet, residual_net, unrolled_lstm
from memplan.mxnet import Module
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.realise.bind import ArraysToBind, bind_inference
from memplan.mxnet.trace.probe import allocated_mib
from memplan.mxnet.train import memory_growth
from memplan.mxnet.train.arrays.input_memory import view
from memplan.mxnet.train.pool import Need, Pool, inference_need, release, training_need
from memplan.planning.plan import Plan
from memplan.planning.realisation import trace
from memplan.util.heap import keep_below

MIB = 1 << 20
NET = residual_net()[0]
SIZES = (16, 12, 8)
STRATEGY = "chen_greedy:linear"


def planned(
    size: int,
    budget: int | float | None,
    *,
    pixels: int = 16,
    filters: int = 8,
    realisation: str = "explicit",
) -> Plan:
    return memplan.plan(
        residual_net(filters=filters)[0],
        realisation=realisation,
        strategy=STRATEGY,
        budget=budget,
        ctx=mx.cpu(),  # as Module and TrainStep plan: workspaces count
        data=(size, 3, pixels, pixels),
    )


@lru_cache(2)
def least_budget(realisation: str = "explicit") -> int:
    """For the first size; explicit plans for others within it need blocks that it has not."""
    budget = planned(16, 0.8, realisation=realisation).budget_nbytes
    assert budget is not None
    return budget


def resident_mib() -> float:
    mx.nd.waitall()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def shared_and_grown_mib() -> tuple[float, float, float]:
    """Of the second of two executors: what the pool's blocks grow by, what the process, and what
    the executor would take alone."""
    first = planned(16, 0.8, pixels=64, filters=32)
    second = planned(12, first.budget_nbytes, pixels=64, filters=32)
    pool = Pool()
    grown = held = 0.0
    executors = []
    for plan in (first, second):
        grown, held = -resident_mib(), -sum(pool._blocks)
        executor = TrainExecutor(
            plan.trace, plan.schedule, pool=pool.executor, match_range=plan.match_range
        )
        executors.append(executor)
        pool.add(training_need(plan), executor.pool)
        executor.forward(is_train=True)
        grown += resident_mib()
        held += sum(pool._blocks)
    return held / MIB, grown, second.allocated_nbytes / MIB


def packed_and_grown_mib() -> tuple[float, list[float]]:
    """What a packed plan takes, and what the process grows by for each of its executors: the first
    brings operators' workspace, the second has the memory of the first, the third its own."""
    plan = planned(16, 0.8, pixels=64, filters=32, realisation="packed")
    executors: list[TrainExecutor] = []
    found = []
    for shares in (False, True, False):
        before = resident_mib()
        memory = executors[0].memory if shares else None
        executors.append(TrainExecutor(plan.trace, plan.schedule, memory=memory))
        executors[-1].forward(is_train=True)
        found.append(resident_mib() - before)
    return plan.allocated_nbytes / MIB, found


@pytest.mark.long
def test_mxnet_shares_as_modelled() -> None:
    shared, grown, alone = in_a_fresh_process(shared_and_grown_mib)
    assert 10 < shared < alone - 20, "nothing to tell"
    # Operators' own workspace comes on top.
    assert shared - 5 < grown < (shared + alone) / 2


@pytest.mark.long
def test_packed_steps_take_what_is_planned() -> None:
    planned_mib, (first, second, third) = in_a_fresh_process(packed_and_grown_mib)
    assert first > planned_mib > 50, "too small to tell"
    assert second < 0.3 * planned_mib
    assert 0.95 * planned_mib < third < 1.15 * planned_mib


def kept_and_released_mib() -> tuple[float, float]:
    """Of what was freed in pieces: what a process keeps, and what it does once that is released."""
    keep_below(32 << 20)
    before = memory_growth._status("VmRSS")
    arrays = [mx.nd.ones((MIB,)) for _ in range(32)]
    mx.nd.waitall()
    last = arrays.pop()  # behind the others, which the C library keeps below it
    arrays.clear()
    mx.nd.waitall()
    found = [memory_growth._status("VmRSS") - before]
    release(last.context)
    found.append(memory_growth._status("VmRSS") - before)
    return found[0] / MIB, found[1] / MIB


def test_what_is_freed_for_a_step_goes_back_to_the_system() -> None:
    kept, released = in_a_fresh_process(kept_and_released_mib)
    assert kept > 100, "nothing to tell"
    assert released < 20


def test_what_is_made_after_a_release_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an evaluation that is given up for the next step, the C library may keep a part."""
    kept: list[int] = []
    monkeypatch.setattr("memplan.mxnet.train.pool.keep_below", kept.append)
    release(mx.nd.ones((1,)).context)
    assert kept == [0]


def held_by_mxnets_thread_mib() -> tuple[float, float]:
    """What a thread of MXNet's holds at the end of its memory: after malloc_trim, and a release."""
    release(mx.nd.ones((1,)).context)
    keep_below(32 * MIB)
    before = resident_mib()
    arrays = [mx.nd.ones((24000,)) for _ in range(500)]
    mx.nd.waitall()
    del arrays
    trimmed = resident_mib()
    release(mx.cpu())
    return trimmed - before, resident_mib() - before


@pytest.mark.long
def test_a_release_returns_what_is_free_in_mxnets_thread() -> None:
    trimmed, released = in_a_fresh_process(held_by_mxnets_thread_mib)
    assert trimmed > 20, "nothing to tell"
    assert released < 10


def grown_by_gradients_mib() -> tuple[float, float]:
    """Parameters that were frozen for a while, and by how much a first step grows the process."""
    net = gluon.nn.HybridSequential()
    for _ in range(12):
        net.add(gluon.nn.Dense(1024, in_units=1024))
    net.initialize()
    step = TrainStep(net, gluon.loss.L2Loss(), realisation="packed", strategy="store_all")
    params, x = net.collect_params(), mx.nd.ones((2, 1024))
    for request in ("null", "write"):  # from now on the C library keeps what is as large
        params.setattr("grad_req", request)
    mx.nd.waitall()
    before = memory_growth._status("VmRSS")
    step(x, x)
    mx.nd.waitall()
    grown = memory_growth._status("VmRSS") - before
    return sum(4 * p.data().size for p in params.values()) / MIB, grown / MIB


@pytest.mark.long
def test_the_gradients_of_before_a_first_step_go_back_to_the_system() -> None:
    gradients, grown = in_a_fresh_process(grown_by_gradients_mib)
    assert gradients > 45
    assert grown < 0.6 * gradients


@pytest.mark.parametrize(
    "network",
    [residual_net(64, 64), hinted_resnet(32, 64), unrolled_lstm(batch=2048, hidden=256)],
    ids=["residual", "resnet", "lstm"],
)
def test_blocks_of_inference(network: Any) -> None:
    net, shapes = network
    traced = trace(net, shapes=shapes, realisation="explicit")
    arrays = {n: mx.nd.empty(shape, dtype=traced.dtypes[n]) for n, shape in traced.shapes.items()}
    total = allocated_mib(bind_inference(net, ArraysToBind(mx.cpu(0), arrays, arrays)).debug_str())
    assert total >= 5, "too small to tell"
    assert sum(inference_need(traced, "cpu").blocks) >> 20 == total


def test_what_a_pool_admits() -> None:
    plan = planned(16, least_budget())
    assert sum(training_need(plan).blocks) == plan.allocated_nbytes
    room = plan.budget_nbytes - plan.total_nbytes + plan.allocated_nbytes + plan.workspace_nbytes
    pool = Pool()
    assert not pool.executor
    assert pool.admits(Need((room + 1,)))
    pool.allow(plan)
    pool.add(Need((room - 10,)), "first")
    for blocks, admitted in (((10,), True), ((8, room - 10, 2), True), ((9, room - 10, 2), False)):
        assert pool.admits(Need(blocks)) is admitted
    pool.add(Need((room - 20, 10)), "second")
    assert pool.executor == "first"
    assert not pool.admits(Need((11, 11)))
    pool.allow(planned(8, 0.9))
    assert pool.admits(Need((10, 10)))
    pool.clear()
    assert pool.executor is None
    assert pool.admits(Need((room + 1,)))
    pool.add(Need((room,)), "third")
    assert pool.is_limited
    assert not pool.admits(Need((room + 1,)))
    pool.allow(planned(8, None))  # the steps hold what the largest does, inference what it takes
    assert not pool.is_limited
    assert pool.admits(Need((room,)))
    assert not pool.admits(Need((room + 1,)))


def test_what_operators_take_in_inference_must_fit_beside_a_step() -> None:
    plan = planned(16, least_budget())
    assert plan.budget_nbytes is not None
    assert plan.workspace_nbytes
    left = plan.budget_nbytes - plan.total_nbytes
    pool = Pool()
    pool.allow(plan)
    pool.add(training_need(plan), None)
    assert pool.admits(Need(of_inference_nbytes=left))
    assert not pool.admits(Need(of_inference_nbytes=left + 1))
    pool.clear()
    in_place_of_step = left + plan.allocated_nbytes + plan.workspace_nbytes
    pool.add(Need((1,)), None)
    assert pool.admits(Need(of_inference_nbytes=in_place_of_step - 1))
    assert not pool.admits(Need(of_inference_nbytes=in_place_of_step))
    pool.add(Need(of_inference_nbytes=left + 1), None)
    assert not pool.admits(training_need(plan))


def test_plans_that_count_no_operators_count_none_of_inference() -> None:
    plan = memplan.plan(NET, realisation="explicit", strategy=STRATEGY, data=(8, 3, 16, 16))
    assert not plan.workspace_nbytes
    pool = Pool()
    pool.allow(plan)
    pool.add(training_need(plan), None)
    pool.is_limited = True
    assert pool.admits(Need(of_inference_nbytes=1 << 40))


def test_a_softmax_output_is_computed_beside_its_place_in_inference() -> None:
    def of_inference(*, device_type: str = "cpu", **attrs: str) -> int:
        scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2000)
        net = mx.sym.SoftmaxOutput(scores, name="softmax", **attrs)
        traced = trace(net, shapes={"data": (512, 10)}, realisation="explicit")
        return inference_need(traced, device_type).of_inference_nbytes

    by_mxnet, more = of_inference(multi_output="True"), 4 * 512 * 2000
    assert by_mxnet + 0.9 * more < of_inference() < by_mxnet + 1.1 * more
    assert of_inference(device_type="gpu") == 0


def test_views() -> None:
    array = mx.nd.arange(12).reshape((3, 4))
    front = view(array, (2, 5), "float32")
    assert np.array_equal(front.asnumpy(), np.arange(10).reshape(2, 5))
    front[:] = 7
    assert np.array_equal(array.asnumpy().ravel(), [7] * 10 + [10, 11])
    assert view(array, (13,), "float32") is None
    assert view(array, (2,), "float16") is None
    assert view(array.tostype("row_sparse"), (2, 4), "float32") is None


REALISATIONS = pytest.mark.parametrize("realisation", ["explicit", "packed"])
LIMITS = pytest.mark.parametrize("limited", [True, False], ids=["budget", "least"])


def packed_nbytes(executors: list[Any]) -> int:
    """What the executors' packed steps really have."""
    memories = {id(executor.memory): executor.memory for executor in executors}
    return sum(memory.nbytes for memory in memories.values() if memory is not None)


@LIMITS
@REALISATIONS
def test_module_stays_within_its_budget(realisation: str, limited: bool) -> None:
    sizes = (*SIZES, 16, 12)
    held: list[list[Any]] = []

    def note(module: Any) -> None:
        (executor, *_), device = module._exec_group.execs, module._exec_group.execs[0].device
        assert device.pool.admits(Need()), "more than the budget"
        bound = [other._training for other in device.executors if other._training is not None]
        held.append([weakref.ref(training) for training in bound])
        assert packed_nbytes(bound) == device.pool._arrays_nbytes
        assert executor.plan.realisation == realisation

    def make(net: Any) -> Any:
        budget = least_budget(realisation) if limited else None
        return Module(net, strategy=STRATEGY, budget=budget, realisation=realisation)

    gc.collect()
    gc.disable()
    try:
        ours = module_steps(make, sizes, note)
    finally:
        gc.enable()
    stock = module_steps(mx.mod.Module, sizes, lambda _: None)
    for step, (one, other) in enumerate(zip(stock, ours, strict=True)):
        assert [n for n in one if not np.array_equal(one[n], other[n])] == [], step
    # Beside what operators take in an evaluation no second step fits.
    assert max(map(len, held)) == (1 if limited else len(SIZES))


def block() -> Any:
    made = gluon.SymbolBlock(NET, [mx.sym.Variable(n) for n in ("data", "softmax_label")])
    mx.random.seed(3)
    made.initialize(mx.init.Uniform(0.1))
    return made


def run(step_of: Any, sizes: tuple[int, ...]) -> list[list[np.ndarray]]:
    """Outputs, gradients and parameters after a step with a batch of each size."""
    net = block()
    step = step_of(net)
    result = []
    for size in sizes:
        outputs = step(*batch(size))
        mx.nd.waitall()
        params = net.collect_params().values()
        grads = [p.grad().asnumpy() for p in params if p.grad_req != "null"]
        result.append([outputs.asnumpy(), *grads, *(p.data().asnumpy() for p in params)])
    return result


@LIMITS
@REALISATIONS
def test_train_step_stays_within_its_budget(realisation: str, limited: bool) -> None:
    def by_autograd(net: Any) -> Any:
        net.hybridize()

        def step(x: Any, y: Any) -> Any:
            with autograd.record():
                outputs = net(x, y)
            outputs.backward()
            return outputs

        return step

    made: list[TrainStep] = []
    bound: list[int] = []

    def by_plan(net: Any) -> Any:
        budget = least_budget(realisation) if limited else None
        made.append(TrainStep(net, strategy=STRATEGY, budget=budget, realisation=realisation))

        def step(x: Any, y: Any) -> Any:
            outputs = made[0](x, y)
            assert all(pool.admits(Need()) for pool in made[0]._pools.values())
            bound.append(len(made[0]._bound))
            return outputs

        return step

    sizes = (*SIZES, 16, 12)
    ours, stock = run(by_plan, sizes), run(by_autograd, sizes)
    for one, other in zip(stock, ours, strict=True):
        assert all(map(np.array_equal, one, other))
    if limited:
        # The plan of the second size takes more than that of the first: all fit in its array.
        assert bound == ([1, 1, 2, 1, 2] if realisation == "explicit" else [1, 1, 2, 3, 3])
    else:
        assert bound == [1, 2, 3, 3, 3]
