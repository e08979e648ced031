"""States and attributes that are others in the next step: none of before are used, or held."""

from __future__ import annotations

import gc
import sys
from typing import Any

import mxnet as mx
import pytest

from helpers.trainer_loops import Loop, X, Y, arrays_in, differing
from memplan.mxnet.realise.engine import bundles
from memplan.mxnet.realise.kept_bundles import Bundle
from memplan.mxnet.realise.update_calls import UpdateCall
from memplan.mxnet.train import update_operators
from memplan.mxnet.train.update_operators import OperatorsOfStep
from memplan.mxnet.train.updates import OptimizerUpdates


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def updates_of(optimizer: Any) -> tuple[OptimizerUpdates, dict[str, Any]]:
    return OptimizerUpdates(mx.optimizer.get_updater(optimizer), {"p0": 0}), {"p0": mx.nd.ones(2)}


class OneCycle(mx.lr_scheduler.LRScheduler):  # type: ignore[misc]
    """Sets what an optimizer reads after it has asked for the rate."""

    def __init__(self) -> None:
        super().__init__(base_lr=0.1)
        self.set: list[Any] = []

    def __call__(self, num_update: int) -> float:
        for optimizer in self.set:
            optimizer.momentum = 0.9 - 0.05 * num_update
            optimizer.beta1, optimizer.clip_gradient = optimizer.momentum, 0.01 / num_update
        return float(self.base_lr)


@pytest.mark.parametrize(
    ("optimizer", "options"), [("sgd", {"momentum": 0.9}), ("nag", {"momentum": 0.9}), ("adam", {})]
)
def test_a_scheduler_may_set_what_is_read_after_it(optimizer: str, options: dict[str, Any]) -> None:
    found = []
    for planned in (False, True):
        loop = Loop(optimizer, {"lr_scheduler": OneCycle, **options}, planned=planned)
        loop.start()
        loop.trainer.optimizer.lr_scheduler.set.append(loop.trainer.optimizer)
        mx.random.seed(9)
        loop.train(5)
        found.append(loop.values())
    assert not differing(*found)


def test_ctrl_c_before_operators_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    updates, weights = updates_of(mx.optimizer.SGD(learning_rate=0.1))
    with updates.step(weights):
        assert dict(updates.operators["p0"][0].attrs)["lrs"] == "[0.1]"
    updates.updater.optimizer.lr = 0.05
    with monkeypatch.context() as patched:
        patched.setattr(OperatorsOfStep, "_made", interrupted)
        with pytest.raises(KeyboardInterrupt), updates.step(weights):
            assert updates.operators
    with updates.step(weights):
        assert dict(updates.operators["p0"][0].attrs)["lrs"] == "[0.05]"


@pytest.mark.parametrize("function", ["_arrays_of", "_kinds"])
def test_ctrl_c_before_states_are_known(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    updates, weights = updates_of(mx.optimizer.SGD(momentum=0.9))
    with updates.step(weights):
        assert updates.operators
    updates.updater.states[0] = mx.nd.zeros(2)
    with monkeypatch.context() as patched:
        patched.setattr(update_operators, function, interrupted)
        with pytest.raises(KeyboardInterrupt), updates.step(weights):
            assert updates.operators
    with updates.step(weights):
        [state] = updates.operators["p0"][1]
        assert state is updates.updater.states[0]


def test_ctrl_c_before_a_bundle_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    updates, weights = updates_of(mx.optimizer.SGD())
    bundle = Bundle([UpdateCall(updates, "p0", weights["p0"], mx.nd.ones(2))])
    with updates.step(weights):
        with monkeypatch.context() as patched:
            patched.setattr(UpdateCall, "prepare", interrupted)
            with pytest.raises(KeyboardInterrupt):
                bundle.renew()
        assert bundle.renew()
        assert not bundle.renew()


def trained(optimizer: str, options: dict[str, Any]) -> Loop:
    """By steps of two shapes, which have kept their bundles."""
    loop = Loop(optimizer, {"learning_rate": 0.1, **options}, planned=True)
    loop.start()
    for size in (4, 4, 4, 2, 2, 2):
        loop.x, loop.y = mx.nd.array(X[:size]), mx.nd.array(Y[:size])
        loop.train(1)
    return loop


def held(states: list[Any]) -> int:
    """How many of these states are held by others than the list."""
    mx.nd.waitall()
    gc.collect()
    return sum(sys.getrefcount(states[place]) > 2 for place in range(len(states)))


def kept(loop: Loop) -> int:
    """How many bundles with updates of the loop's parameters are kept."""
    weights = {id(p.data()) for p in loop.net.collect_params().values()}
    found = [each for each in gc.get_objects() if isinstance(each, Bundle) and each.operation]
    return sum(any(id(call.weight) in weights for call in each._updates) for each in found)


def test_no_step_holds_states_that_were_replaced() -> None:
    loop = trained("nag", {"momentum": 0.9})
    [updater] = loop.trainer._updaters
    before, states = kept(loop), arrays_in(list(updater.states.values()))
    assert held(states) == len(states)
    updater.set_states(updater.get_states(dump_optimizer=False))
    loop.train(1)
    assert not held(states)
    if bundles():
        assert before > 0
        assert kept(loop) == 0


def test_no_step_holds_states_of_an_optimizer_that_went() -> None:
    loop = trained("sgd", {"momentum": 0.9})
    [updater] = loop.trainer._updaters
    states = arrays_in(list(updater.states.values()))
    other = mx.optimizer.create("adagrad", param_dict=updater.optimizer.param_dict)
    loop.trainer._optimizer = updater.optimizer = other
    updater.aggregate_updates = False
    updater.states, updater.states_synced = {}, {}
    loop.train(1)
    assert not held(states)


def test_calls_stay_ready_where_a_rate_changes_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop("sgd", {"momentum": 0.9}, planned=True)
    loop.start()
    loop.train(2)
    forgotten: list[UpdateCall] = []
    monkeypatch.setattr(UpdateCall, "forget", forgotten.append)
    for step in range(12):
        if step % 6 < 5:
            loop.trainer.set_learning_rate(0.1 / (step + 1))
        loop.train(1)
    assert not forgotten
