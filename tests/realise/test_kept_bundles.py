"""Bundles of calls that the engine gets again without the calls being made."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.cases import CASES
from helpers.held import held
from helpers.networks import loss, var
from helpers.schedules import random_schedule
from helpers.training_runs import (
    Values,
    bound,
    differences,
    differences_by_turns,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise import kept_bundles, packed_memory
from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.engine import bundle as hand_over_in_bundles_of
from memplan.mxnet.realise.imperative import Call
from memplan.mxnet.realise.kept_bundles import Bundle
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.placed_arrays import address_of
from memplan.mxnet.realise.workspace import OneWorkspace
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

# In the second step the calls become direct ones, and the bundles are kept.
NSTEPS = 5


class Counter:
    """How many calls have been made one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ncalls = 0
        make = OneWorkspace.call

        def counted(workspace: OneWorkspace, call: Any) -> None:
            self._ncalls += 1
            make(workspace, call)

        monkeypatch.setattr(OneWorkspace, "call", counted)

    def taken(self) -> int:
        """Since the last time."""
        result, self._ncalls = self._ncalls, 0
        return result


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def case(name: str) -> tuple[Trace, Values]:
    traced = CASES[name].trace("packed")
    return traced, random_values(traced, CASES[name].integers)


@pytest.mark.parametrize("name", ["dropout", "embedding", "transformer", "unet", "lstm"])
def test_from_the_third_step_on_no_call_is_made(name: str, made: Counter) -> None:
    traced, values = case(name)
    schedule = random_schedule(traced.graph, 1)
    assert not differences_by_turns(traced, [schedule], values, NSTEPS)
    ncalls = len(lower(traced, schedule).schedule.ops)
    assert ncalls < made.taken() <= 2 * ncalls


def test_where_the_library_hides_it_calls_are_made(
    made: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_bundles, "_ARE_THERE", False)
    traced, values = case("transformer")
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values, NSTEPS), planned_steps(executor, NSTEPS))
    assert made.taken() == NSTEPS * len(executor._training._calls)


def test_each_thread_draws_its_own_numbers() -> None:
    """Also in a bundle that was kept in another one."""
    traced, values = case("dropout")
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    found: list[Any] = []

    def step(seed: int) -> None:
        mx.random.seed(seed)
        executor.forward(is_train=True)
        found.append(executor.outputs[0].asnumpy())

    for seed in (1, 1, 1, 2):
        step(seed)
    executor.binding = None  # which would warn
    for seed in (1, 2):
        thread = threading.Thread(target=step, args=[seed])
        thread.start()
        thread.join()
    step(1)
    ones, others = [found[i] for i in (0, 1, 2, 4, 6)], [found[i] for i in (3, 5)]
    assert all(np.array_equal(one, ones[0]) for one in ones)
    assert all(np.array_equal(other, others[0]) for other in others)
    assert not np.array_equal(ones[0], others[0])


def test_steps_of_several_networks_are_kept_in_one_memory(made: Counter) -> None:
    cases = [case("unet"), case("embedding")]
    executors = [bound(t, Schedule.unplanned(t.graph), values) for t, values in cases]
    memory = max((e.memory for e in executors), key=lambda memory: memory.nbytes)
    executors = [
        TrainExecutor(e.trace, e.schedule, args=e.arg_dict, aux_states=e.aux_dict, memory=memory)
        for e in executors
    ]
    planned: list[list[Values]] = [[], []]
    for _ in range(NSTEPS):
        for executor, results in zip(executors, planned, strict=True):
            results += planned_steps(executor, 1)
    for (traced, values), results in zip(cases, planned, strict=True):
        assert not differences(stock_steps(traced, values, NSTEPS), results)
    assert made.taken() <= 2 * sum(len(e._training._calls) for e in executors)


def test_an_error_is_that_of_one_step() -> None:
    """And the parameters are what they were, as in MXNet's executor."""
    net = loss(mx.sym.linalg.potrf(var("data") * 1) * var("weight"))
    shapes = {"data": (4, 4), "weight": (4, 4)}
    traced = trace(net, shapes=shapes, grad_req="write", realisation="packed")
    executor = bound(traced, Schedule.unplanned(traced.graph), random_values(traced))
    found = []
    for sign in (1, 1, 1, 1, -1, -1, 1):
        executor.arg_dict["data"][:] = sign * mx.nd.eye(4)
        executor.forward(is_train=True)
        if sign > 0:
            found.append(executor.outputs[0].asnumpy())
        else:
            with pytest.raises(mx.MXNetError, match="potrf"):
                executor.outputs[0].wait_to_read()
            mx.nd.waitall()
    assert all(np.array_equal(each, found[0]) for each in found)


def adding(array: Any, times: int) -> list[Call]:
    """Calls that add one to ``array``, which have become direct."""
    arrays = Handles([array])
    calls = [Call("_plus_scalar", {"scalar": "1"}, arrays, arrays) for _ in range(times)]
    for call in calls:
        call()
        call()
    return calls


def test_a_bundle_that_was_cut_is_not_kept() -> None:
    memory, array = PackedMemory(8, mx.cpu(0)), mx.nd.zeros((1,))
    memory.prepare()
    calls = adding(array, 3)

    class Freeing:
        """Frees an array as it is made."""

        skips, frees, noperations = 0, False, 1

        def __call__(self) -> None:
            calls[0]()
            mx.nd.zeros((1,))

    with_one: list[Any] = [calls[0], Freeing(), calls[1]]
    cut, whole = Bundle(with_one), Bundle(calls)
    for _ in range(3):
        memory.bundled(cut)
        memory.bundled(whole)
    assert cut.operation is None
    assert whole.operation is not None
    assert array.asscalar() == 6 + 3 * (3 + 3)


def kept_and_counting() -> tuple[PackedMemory, Bundle, Any]:
    """A kept bundle that takes longer than to hand it over, and the number that it adds one to."""
    memory, array = PackedMemory(8, mx.cpu(0)), mx.nd.zeros((1 << 20,))
    memory.prepare()
    bundle = Bundle(adding(array, 1))
    memory.bundled(bundle)
    assert bundle.operation is not None
    array.wait_to_read()
    return memory, bundle, ctypes.cast(address_of(array), ctypes.POINTER(ctypes.c_float))


def test_few_kept_bundles_are_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_memory, "WAITING", 2)
    monkeypatch.setattr(packed_memory, "KEPT", 1)
    memory, bundle, number = kept_and_counting()
    for handed_over in range(1, 20):
        memory.bundled(bundle)
        assert number[0] >= handed_over, "the engine has more bundles"


def test_few_steps_are_with_the_engine() -> None:
    """It holds the batch that a step is to copy, however few the bundles of a step are."""
    memory, bundle, number = kept_and_counting()
    for nsteps in range(1, 40):
        memory.begin([])
        memory.bundled(bundle)
        assert number[0] >= nsteps - 4, "the engine has more steps"


def test_what_is_not_understood_is_not_kept() -> None:
    memory, array = PackedMemory(8, mx.cpu(0)), mx.nd.zeros((1,))
    memory.prepare()
    one = Bundle(adding(array, 1))
    hand_over_in_bundles_of(9)
    try:
        memory._fence()
        one.calls[0]()
        one.keep(memory._thread, [memory._fence], 8)
        assert one.operation is None
        one.keep(memory._thread, [memory._fence], 9)
        assert one.operation is not None
    finally:
        hand_over_in_bundles_of(0)


def test_the_engine_may_have_a_bundle_several_times() -> None:
    memory, array = PackedMemory(8, mx.cpu(0)), mx.nd.zeros((1,))
    memory.prepare()
    bundle = Bundle(adding(array, 2))
    with held():
        for _ in range(10):
            memory.bundled(bundle)
        bundle.operation = None
        gc.collect()
    assert array.asscalar() == 4 + 20


def test_what_is_kept_goes_with_the_step() -> None:
    traced, values = case("transformer")
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    (segment,) = executor.memory._segments
    planned_steps(executor, 4)
    assert sys.getrefcount(segment) > len(traced.graph.ops) // 2, "each array holds it"
    del executor
    gc.collect()
    mx.nd.waitall()
    assert sys.getrefcount(segment) == 2
