"""Where a budget has no room for an evaluation beside a step, what the step holds is given back."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.fresh_process import in_a_fresh_process
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.placed_arrays import address_of
from memplan.mxnet.train import evaluation
from memplan.mxnet.train.memory_growth import MemoryGrowth
from memplan.mxnet.train.pool import inference_need
from memplan.mxnet.train.taking_turns import TURN

SHAPE, LARGE = (32, 3, 32, 32), 256
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
KINDS = ("planned", "not hybridized", "loss", "updating")
NOTHING_AGAIN = "store_all"


def network(*, hybridized: bool = True) -> Any:
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for channels in (16, 24):
            net.add(nn.Conv2D(channels, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dropout(0.5), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    if hybridized:
        net.hybridize()
    with autograd.pause():
        net(mx.nd.zeros((1, *SHAPE[1:])))
    return net


def batch(size: int = SHAPE[0]) -> tuple[Any, Any]:
    random = np.random.RandomState(size)
    shape = (size, *SHAPE[1:])
    return mx.nd.array(random.uniform(size=shape)), mx.nd.array(random.randint(0, 10, size))


class Run:
    """A network, by a plan or not, whose ``step`` trains it on the batch."""

    def __init__(
        self, kind: str, budget: int | None, *, is_planned: bool = True, size: int = SHAPE[0]
    ) -> None:
        self.net = network(hybridized=kind != "not hybridized")
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", {"momentum": 0.9})
        self.x, self.y = batch(size)
        options: dict[str, Any] = {"budget": budget, "strategy": NOTHING_AGAIN}
        self.steps: Any = None
        self.step: Callable[[], Any] = self._by_hand
        if is_planned and kind in ("planned", "not hybridized"):
            self.steps = planned(self.net, **options).planned_step
        elif is_planned:
            trainer = self.trainer if kind == "updating" else None
            self.steps = TrainStep(self.net, LOSS, trainer=trainer, **options)
            self.step = self._by_train_step
        self._updates = kind != "updating" or not is_planned

    def _by_hand(self) -> Any:
        with autograd.record():
            losses = LOSS(self.net(self.x), self.y)
        losses.backward()
        self.trainer.step(len(self.x))
        return losses

    def _by_train_step(self) -> Any:
        losses = self.steps(self.x, self.y)
        if self._updates:
            self.trainer.step(len(self.x))
        return losses

    @property
    def memory(self) -> PackedMemory:
        memory: PackedMemory = self.steps._pools[mx.cpu()].memory
        return memory

    @property
    def plan(self) -> Any:
        [plan] = self.steps.plans.values()
        return plan

    def share_of_zeros(self) -> float:
        """Of the array in which the step runs."""
        mx.nd.waitall()
        [segment] = self.memory._segments
        content = ctypes.string_at(address_of(segment), self.memory.nbytes)
        return content.count(0) / len(content)


def total_of(kind: str, size: int = SHAPE[0]) -> int:
    """What the step takes."""
    run = Run(kind, None, size=size)
    run.step()
    return int(run.plan.total_nbytes)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_before(kind: str) -> None:
    def numbers(run: Run) -> list[Any]:
        mx.random.seed(2)
        found = []
        for _ in range(4):
            found.append(run.step().asnumpy())
            if kind != "updating":
                grads = [p.grad() for p in run.net.collect_params().values() if p._grad]
                before = [grad.asnumpy() for grad in grads]
                run.net(run.x).wait_to_read()
                assert all(map(np.array_equal, before, [grad.asnumpy() for grad in grads]))
                found += before
            found.append(run.net(batch(20)[0]).asnumpy())
        return found + [p.data().asnumpy() for p in run.net.collect_params().values()]

    run = Run(kind, total_of(kind))
    stock = Run(kind, None, is_planned=False)
    assert all(map(np.array_equal, numbers(run), numbers(stock)))
    assert run.share_of_zeros() > 0.9, "nothing was given back"


@pytest.mark.parametrize("kind", KINDS)
def test_where_there_is_room_all_stays(kind: str) -> None:
    total = total_of(kind)
    for budget in (None, 3 * total):
        run = Run(kind, budget)
        run.step()
        zeros = run.share_of_zeros()
        run.net(run.x).wait_to_read()
        assert run.share_of_zeros() == zeros < 0.9


@pytest.mark.parametrize("kind", ["planned", "loss"])
def test_larger_batches_need_more_room(kind: str) -> None:
    run = Run(kind, None)
    run.step()
    need = inference_need(run.plan.trace, "cpu")
    run = Run(kind, run.plan.total_nbytes + need.nbytes)
    run.step()
    run.net(run.x).wait_to_read()
    assert run.memory.can_give_back
    run.net(batch(2 * SHAPE[0])[0]).wait_to_read()
    assert not run.memory.can_give_back


def test_little_may_come_on_top() -> None:
    run = Run("planned", total_of("planned"))
    run.step()
    run.net(batch(1)[0]).wait_to_read()
    assert run.memory.can_give_back
    run.net(run.x).wait_to_read()
    assert not run.memory.can_give_back


def test_room_is_made_for_batches_of_other_processes() -> None:
    """DataLoaders hand over batches in shared memory, from which MXNet computes on the CPU."""
    run = Run("not hybridized", total_of("not hybridized"))
    run.step()
    run.net(run.x.as_in_context(mx.Context("cpu_shared", 0))).wait_to_read()
    assert not run.memory.can_give_back


def test_smaller_batches_of_before_give_back_theirs_too() -> None:
    """Each larger shape that comes later runs in an array of its own."""
    run = Run("loss", total_of("loss") + total_of("loss", 2 * SHAPE[0]))
    run.step()
    run.x, run.y = batch(2 * SHAPE[0])
    run.step()
    memories = run.steps._pools[mx.cpu()]._memories
    assert [memory.can_give_back for memory in memories] == [True, True]
    run.net(batch(4 * SHAPE[0])[0]).wait_to_read()
    assert [memory.can_give_back for memory in memories] == [False, False]


def growths(budget: int) -> tuple[int, int]:
    """Bytes by which a process grows by steps, and by these and evaluations."""
    run = Run("updating", budget, size=LARGE)
    grown = MemoryGrowth(mx.cpu())
    for _ in range(3):
        run.step().wait_to_read()
    steps = grown.look()
    for _ in range(3):
        run.net(run.x).wait_to_read()
        run.step().wait_to_read()
    return steps, grown.look()


@pytest.mark.long
def test_a_process_takes_the_larger_of_both_and_not_the_sum() -> None:
    steps, both = in_a_fresh_process(partial(growths, total_of("updating", LARGE)))
    assert steps > 40e6, "nothing to tell"
    assert both < 1.2 * steps


def test_nothing_is_given_back_between_the_halves_of_a_step() -> None:
    results = []
    total = total_of("planned")
    for is_planned in (True, False):
        run = Run("planned", total, is_planned=is_planned)
        run.step()
        mx.random.seed(3)
        with autograd.record():
            outputs = run.net(run.x)
            with autograd.pause(train_mode=False):
                targets = run.net(run.x)
            losses = LOSS(outputs, run.y) + ((outputs - targets) ** 2).mean(axis=1)
        losses.backward()
        results.append([p.grad().asnumpy() for p in run.net.collect_params().values() if p._grad])
    assert all(map(np.array_equal, *results))


def test_what_is_trained_is_no_evaluation() -> None:
    run = Run("planned", total_of("planned"))
    run.step()
    with autograd.record():
        run.net(run.x)
    assert run.share_of_zeros() < 0.9


def test_all_stays_where_another_thread_has_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("planned", total_of("planned"))
    run.step()
    with TURN:
        thread = threading.Thread(target=lambda: run.net(run.x).wait_to_read())
        thread.start()
        thread.join()
    assert run.memory.can_give_back
    monkeypatch.setattr(evaluation, "is_mxnets_thread", lambda: True)  # which must not wait
    run.net(run.x).wait_to_read()
    assert run.memory.can_give_back
    monkeypatch.undo()
    run.net(run.x).wait_to_read()
    assert not run.memory.can_give_back


def test_a_step_that_is_gone_is_not_asked() -> None:
    run = Run("loss", total_of("loss"))
    run.step()
    assert evaluation._STEPS
    run.steps, run.step = None, run._by_hand
    gc.collect()
    assert not any(step.block is run.net for step in evaluation._STEPS)
    run.net(run.x).wait_to_read()
