"""Updates by operators that are called without an optimizer's code: those that this would call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.ndarray import register
from mxnet.ndarray.ndarray import NDArrayBase
from mxnet.optimizer import optimizer as written

from helpers.trainer_loops import Loop, differing, within
from memplan.mxnet.realise.engine import _BULK_SIZE, engine
from memplan.mxnet.realise.update_calls import UpdateCall
from memplan.mxnet.realise.workspace import OneWorkspace
from memplan.mxnet.trace.nnvm import operator_handle
from memplan.mxnet.train.arrays.writes import Writes
from memplan.mxnet.train.updates import OptimizerUpdates

# Names, and what is set before the updates; then the number of calls of a kind that there may be.
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("ccsgd", {"momentum": 0.9, "multi_precision": True}),
    ("sgd", {"multi_precision": True}),
    ("nag", {}),
    ("nag", {"momentum": 0.9}),
    ("nag", {"multi_precision": True}),
    ("nag", {"momentum": 0.9, "multi_precision": True}),
    ("signum", {"momentum": 0.0}),
    ("signum", {"wd_lh": 0.02}),
    ("ftml", {}),
    ("adam", {"lazy_update": False, "beta1": 0.8}),
    ("rmsprop", {"clip_weights": 0.5}),
    ("rmsprop", {"centered": True}),
    ("ftrl", {"beta": 2}),
]


def arrays_of(optimizer: Any) -> dict[str, Any]:
    dtypes = ["float32", "float32", "float32", "float32"]
    if optimizer.multi_precision:
        dtypes[1] = dtypes[3] = "float16"
    return {
        f"p{place}": mx.nd.array(np.arange(3) + place, dtype=dtype)
        for place, dtype in enumerate(dtypes)
    }


def create(name: str, options: dict[str, Any]) -> Any:
    names = {place: f"p{place}" for place in range(4)}
    optimizer = mx.optimizer.create(name, param_idx2name=names, wd=0.1, **options)
    optimizer.set_lr_mult({"p1": 0.5})
    optimizer.set_wd_mult({"p0": 1, "p2": 3})
    return optimizer


def by_scheduler(optimizer: Any) -> None:
    optimizer.lr_scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.3)
    optimizer._index_update_count.update({0: 1, 1: 7})


def set_all(optimizer: Any) -> None:
    optimizer.rescale_grad, optimizer.clip_gradient = 1 / 3, 0.25
    optimizer.lr, optimizer.lr_mult["p2"] = np.float64(0.7), -0.0


Calls = dict[int, tuple[str, dict[str, str], list[int]]]


def called_by(updater: Any, weights: dict[str, Any], patch: pytest.MonkeyPatch) -> Calls:
    """By the number of a parameter the operator that ``updater`` calls, its attributes and states.

    Of what it calls for several parameters at once that for each of them.
    """
    found: Calls = {}
    ids = {id(weight): place for place, weight in enumerate(weights.values())}
    ops = {operator_handle(op).value: op for op in mx.nd.op.__all__ if op.endswith("_update")}

    def noted(handle: Any, inputs: Any, keys: Any, values: Any, out: Any, *_: Any) -> None:
        outs = out if isinstance(out, list | tuple) else [out]
        size = len(inputs) // len(outs)
        for place, weight in enumerate(outs):
            attrs = dict(zip(keys, map(str, values), strict=True))
            if "lrs" in attrs:
                given = dict(zip(keys, values, strict=True))
                attrs |= {name: str([given[name][place]]) for name in ("lrs", "wds")}
                attrs["num_weights"] = "1"
            states = inputs[place * size + 2 : (place + 1) * size]
            found[ids[id(weight)]] = ops[handle], attrs, list(map(id, states))

    with patch.context() as patched:
        patched.setattr(register, "_imperative_invoke", noted)
        updater(list(range(len(weights))), list(weights.values()), list(weights.values()))
    return found


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
@pytest.mark.parametrize("prepare", [lambda _: None, by_scheduler, set_all])
def test_they_are_those_of_mxnet(
    name: str,
    options: dict[str, Any],
    prepare: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same attributes, in words, on the same states; and as many updates are counted."""
    stock, ours = (mx.optimizer.get_updater(create(name, options)) for _ in range(2))
    weights = arrays_of(ours.optimizer)
    updates = OptimizerUpdates(ours, {f"p{place}": place for place in range(4)})
    with updates.step(weights):
        assert updates.by_operators
    stock.states, stock.states_synced = ours.states, ours.states_synced
    for updater in (stock, ours):
        prepare(updater.optimizer)
    seen = []
    for number in range(5):
        for updater in (stock, ours) if number == 3 else ():
            updater.optimizer.wd = 0.3
        expected = called_by(stock, weights, monkeypatch)
        with updates.step(weights):
            found = updates.operators
            assert updates.operators is found
        seen.append(found)
        assert expected == {
            updates.indices[name]: (operator.op, dict(operator.attrs), list(map(id, states)))
            for name, (operator, states) in found.items()
        }
        assert vars(stock.optimizer).keys() == vars(ours.optimizer).keys()
        for attribute in ("num_update", "_index_update_count", "lr", "wd"):
            assert getattr(stock.optimizer, attribute) == getattr(ours.optimizer, attribute)
    if prepare is not by_scheduler:
        changes = {1: name in ("adam", "ftml"), 2: name in ("adam", "ftml"), 3: True}
        for number, is_new in changes.items():
            assert (seen[number] is not seen[number - 1]) is is_new


def test_a_zero_of_the_other_sign_is_another_rate() -> None:
    updater = mx.optimizer.get_updater(create("sgd", {"learning_rate": 0.0}))
    updates, weights = OptimizerUpdates(updater, {"p0": 0}), {"p0": mx.nd.ones(2)}
    found = []
    for rate in (0.0, 0.0, -0.0):
        updater.optimizer.lr = rate
        with updates.step(weights):
            found.append(updates.operators)
    assert found[0] is found[1]
    assert dict(found[0]["p0"][0].attrs)["lrs"] == "[0.0]"
    assert dict(found[2]["p0"][0].attrs)["lrs"] == "[-0.0]"


def test_steps_of_several_shapes_have_the_same() -> None:
    """But not one that updates fewer parameters, or others."""
    updater = mx.optimizer.get_updater(create("sgd", {"learning_rate": 0.1}))
    weights = arrays_of(updater.optimizer)
    updates = OptimizerUpdates(updater, {f"p{place}": place for place in range(4)})
    fewer = {name: array for name, array in weights.items() if name != "p1"}
    found = []
    others = {**weights, "p1": weights["p1"].copy()}
    for each in (weights, dict(reversed(weights.items())), weights, fewer, others):
        with updates.step(each):
            found.append(updates.operators)
    assert found[0] is found[1] is found[2]
    assert found[3] is not found[2]
    assert found[3].keys() == fewer.keys()
    assert found[4] is not found[2]


class Mine(mx.optimizer.SGD):  # type: ignore[misc]
    """As one of MXNet's, but of the script's."""

    updates_in_any_order = True


class MyRates(mx.lr_scheduler.FactorScheduler):  # type: ignore[misc]
    """As one of MXNet's, but of the script's."""


def rates_of(optimizer: Any) -> None:
    optimizer._get_lrs = lambda indices: [0.5 for _ in indices]


@pytest.mark.parametrize(
    ("optimizer", "prepare"),
    [
        (Mine(), lambda _: None),
        (mx.optimizer.AdaGrad(), lambda _: None),
        (mx.optimizer.SGD(), rates_of),
        (mx.optimizer.SGD(lr_scheduler=MyRates(2)), lambda _: None),
        (mx.optimizer.SGD(lr_scheduler=lambda _: 0.1), lambda _: None),
        (mx.optimizer.SGD(), lambda optimizer: setattr(optimizer, "momentum", 0.9)),
        (mx.optimizer.SGD(momentum=0.9), lambda optimizer: setattr(optimizer, "momentum", 0)),
        (mx.optimizer.Adam(multi_precision=True), lambda _: None),
    ],
)
def test_what_is_not_known_is_called_as_before(
    optimizer: Any, prepare: Callable[[Any], None]
) -> None:
    updater = mx.optimizer.get_updater(optimizer)
    updates, weights = OptimizerUpdates(updater, {"p0": 0}), {"p0": mx.nd.ones(2, dtype="float16")}
    updater.states[0] = optimizer.create_state_multi_precision(0, weights["p0"])
    updater.states_synced[0] = True
    prepare(optimizer)
    with updates.step(weights):
        assert not updates.by_operators


def test_a_method_of_the_class_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    updater = mx.optimizer.get_updater(mx.optimizer.Adam())
    updates, weights = OptimizerUpdates(updater, {"p0": 0}), {"p0": mx.nd.ones(2)}
    with updates.step(weights):
        assert updates.by_operators
    monkeypatch.setattr(mx.optimizer.Optimizer, "_get_wds", lambda *_: [0.0])
    with updates.step(weights):
        assert not updates.by_operators


def test_a_function_that_mxnet_calls_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    found, update = [], written.adam_update

    def halved(*arrays: Any, lr: float, **options: Any) -> None:
        update(*arrays, lr=lr * 0.5, **options)

    for planned in (False, True):
        loop = Loop("adam", {"learning_rate": 0.1}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(3)
        with monkeypatch.context() as patched:
            patched.setattr(written, "adam_update", halved)
            loop.train(2)
        loop.train(2)
        found.append(loop.values())
    assert not differing(*found)


def test_who_watches_parameters_is_told() -> None:
    updater = mx.optimizer.get_updater(mx.optimizer.SGD())
    updates, weights = OptimizerUpdates(updater, {"p0": 0}), {"p0": mx.nd.ones(2)}
    writes = Writes(weights)
    with updates.step(weights):
        assert updates.by_operators
    assert not writes.written()
    with updates.step(weights):
        assert updates.operators
    assert writes.written() == {"p0"}
    writes.end()


def change(loop: Loop, number: int) -> None:
    """What a script may do between two steps."""
    optimizer, params = loop.trainer.optimizer, loop.net.collect_params()
    first, second = list(params.values())[:2]
    if number == 4:
        loop.trainer.set_learning_rate(0.05)
    elif number == 6:
        first.lr_mult, second.wd_mult = 0.25, 3.0
    elif number == 8:
        optimizer.clip_gradient = 0.01
    elif number == 10:
        updater = loop.trainer._updaters[0]
        updater.set_states(updater.get_states(dump_optimizer=False))
    elif number == 12:
        optimizer.wd = 0.3
    elif number == 14:
        updater = loop.trainer._updaters[0]
        updater.states = {index: listed(state) for index, state in updater.states.items()}
    elif number == 15:
        for state in loop.trainer._updaters[0].states.values():
            if isinstance(state, list):
                state[-1] = state[-1] * 0.5


def listed(state: Any) -> Any:
    return list(state) if isinstance(state, tuple) else state


@pytest.mark.parametrize(
    ("optimizer", "options", "dtype"),
    [
        ("sgd", {}, "float32"),
        ("sgd", {"momentum": 0.9}, "float32"),
        ("sgd", {"momentum": 0.9, "multi_precision": True}, "float16"),
        ("nag", {"momentum": 0.9}, "float32"),
        ("nag", {"multi_precision": True}, "float16"),
        ("signum", {}, "float32"),
        ("ftml", {}, "float32"),
        ("adam", {}, "float32"),
        ("rmsprop", {"centered": True}, "float32"),
        ("ftrl", {}, "float32"),
    ],
)
def test_scripts_change_what_updates_depend_on(
    optimizer: str, options: dict[str, Any], dtype: str
) -> None:
    found = []
    for planned in (False, True):
        loop = Loop(optimizer, {"learning_rate": 0.1, **options}, planned=planned, dtype=dtype)
        loop.start()
        mx.random.seed(9)
        for number in range(18):
            change(loop, number)
            loop.train(1, batch_size=4 if number < 16 else 7)
        found.append(loop.values())
    assert not differing(*found)
    assert within(loop.step)


@pytest.mark.parametrize(("optimizer", "is_kept"), [("sgd", True), ("nag", True), ("adam", False)])
def test_updates_are_kept_while_nothing_changes(
    optimizer: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's rate changes in every step; its code is not run, either."""
    made: list[list[Any]] = []
    run, make = OneWorkspace.call, OptimizerUpdates.update

    def noted(workspace: OneWorkspace, call: Any) -> None:
        made[-1].append(call)
        run(workspace, call)

    def by_code(*arguments: Any) -> None:
        made[-1].append(arguments)
        make(*arguments)

    monkeypatch.setattr(OneWorkspace, "call", noted)
    monkeypatch.setattr(OptimizerUpdates, "update", by_code)
    loop = Loop(optimizer, {"learning_rate": 0.1}, planned=True)
    loop.start()
    for number in range(7):
        if number == 5:
            loop.trainer.set_learning_rate(0.05)
        made.append([])
        loop.train(1)
    assert within(loop.step)
    updates = [sum(isinstance(call, UpdateCall) for call in calls) for calls in made]
    nupdates = sum(p.grad_req != "null" for p in loop.net.collect_params().values())
    assert updates == [nupdates] * 2 + [nupdates * (not is_kept)] * 3 + [nupdates] * 2
    assert not any(isinstance(call, tuple) for calls in made for call in calls)
    assert len(made[4]) < len(made[0])


def test_no_state_goes_within_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXNet would cut it there, and run a part of it out of turn."""
    loop = Loop("adam", {"learning_rate": 0.1}, planned=True)
    loop.start()
    loop.train(4)
    freed, free = [], NDArrayBase.__del__

    def noted(array: Any) -> None:
        freed.append(_BULK_SIZE(engine()))
        free(array)

    [updater] = loop.trainer._updaters
    states = updater.get_states(dump_optimizer=False)
    monkeypatch.setattr(NDArrayBase, "__del__", noted)
    updater.set_states(states)
    loop.train(1)
    assert len(freed) > 2 * len(updater.states)
    assert not any(freed)


def test_two_trainers_in_turn() -> None:
    """Of two networks in one step each, whose optimizers differ in everything."""
    found = []
    for planned in (False, True):
        loops = [Loop("adam", {"learning_rate": 0.1}, planned=planned)]
        loops.append(Loop("sgd", {"learning_rate": 0.3, "momentum": 0.5}, planned=planned))
        for loop in loops:
            loop.start()
        mx.random.seed(9)
        for _ in range(4):
            for loop in loops:
                loop.train(1)
        found.append([loop.values() for loop in loops])
    for stock, ours in zip(*found, strict=True):
        assert not differing(stock, ours)


def test_another_trainer_of_the_same_block() -> None:
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1, "momentum": 0.9}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(4)
        params = loop.net.collect_params()
        loop.trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        loop.start()
        loop.train(4)
        found.append(loop.values())
    assert not differing(*found)
