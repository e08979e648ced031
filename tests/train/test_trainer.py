"""A TrainStep that has the trainer: the bits of trainer.step, within the step or behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from helpers.planning import NEVER_SECONDS
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.gluon import TrainStep

Values = dict[str, np.ndarray]
X = np.random.default_rng(1).normal(size=(4, 3, 8, 8)).astype("float32")
Y = np.arange(4, dtype="float32")
BEHIND = "ignore:parameters are updated behind the step"


class Half(gluon.HybridBlock):  # type: ignore[misc]
    """Parameters in half precision, and a layer in single precision, for a CPU has no other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(10, 192))
            self.scale = self.params.get("scale", shape=(1, 192), init="ones")

    def hybrid_forward(self, F: Any, x: Any, weight: Any, scale: Any) -> Any:  # noqa: N803
        """Scores."""
        weight, scaled = F.cast(weight, "float32"), F.broadcast_mul(F.flatten(x), scale)
        scores = F.FullyConnected(F.cast(scaled, "float32"), weight, num_hidden=10, no_bias=True)
        return F.tanh(scores)


def network(*, prepare: Callable[[Any], None] = lambda net: None) -> Any:
    """Layers, two of which share their parameters, and a Dropout."""
    mx.random.seed(5)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        twice = nn.Conv2D(8, 3, padding=1, in_channels=8)
        net.add(twice, nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.3))
        net.add(nn.Conv2D(8, 3, padding=1, in_channels=8, params=twice.params))
        net.add(nn.Activation("tanh"), nn.Dense(16), nn.LayerNorm(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    prepare(net)
    return net


class Loop:
    """Trains by autograd and trainer.step, or by a TrainStep that has the trainer."""

    def __init__(
        self,
        optimizer: Any,
        options: dict[str, Any],
        *,
        planned: bool,
        dtype: str = "float32",
        prepare: Callable[[Any], None] = lambda net: None,
        **more: Any,
    ) -> None:
        self.net = network(prepare=prepare)
        if dtype == "float16":
            self.net = Half(prefix="half_")
            self.net.initialize(mx.init.Xavier())
            self.net.cast(dtype)
        self.x, self.y, self.planned = mx.nd.array(X, dtype=dtype), mx.nd.array(Y), planned
        self.net(self.x)
        if isinstance(optimizer, str) and "lr_scheduler" in options:
            options = {**options, "lr_scheduler": options["lr_scheduler"]()}
        params = self.net.collect_params()
        if "kvstore" in more:
            more = {**more, "kvstore": mx.kv.create(more["kvstore"])}
        self.trainer = gluon.Trainer(params, optimizer, options, **more)
        if not planned:
            self.net.hybridize()

    def start(self, **options: Any) -> TrainStep:
        given: dict[str, Any] = {"realisation": "packed", "trainer": self.trainer}
        given |= {"strategy": "store_all", "time_limit": NEVER_SECONDS}
        self.step = TrainStep(self.net, SOFTMAX, **(given | options))
        return self.step

    def train(self, nsteps: int, **options: Any) -> list[np.ndarray]:
        losses = []
        for _ in range(nsteps):
            if self.planned:
                loss = self.step(self.x, self.y, **options)
            else:
                with autograd.record():
                    loss = SOFTMAX(self.net(self.x), self.y)
                loss.backward()
                mx.nd.waitall()  # or an update may meet a weight in a layout of oneDNN's
                self.trainer.step(options.get("batch_size", 4))
            losses.append(loss.asnumpy())
        return losses

    def values(self) -> Values:
        found = {name: p.data().asnumpy() for name, p in self.net.collect_params().items()}
        for index, state in self.trainer._updaters[0].states.items():
            for i, array in enumerate(arrays_in(state)):
                found[f"state {index}, {i}"] = array.asnumpy()
        return found


def arrays_in(state: Any) -> list[Any]:
    if isinstance(state, list | tuple):
        return [array for item in state for array in arrays_in(item)]
    return [] if state is None else [state]


def differing(one: Values, other: Values) -> list[str]:
    assert one.keys() == other.keys()
    assert all(np.isfinite(value).all() for value in one.values())
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def assert_equal_loops(
    optimizer: str, options: dict[str, Any], step: dict[str, Any] | None = None, **more: Any
) -> TrainStep:
    """Both loops leave the same; the step that was used."""
    loops = [Loop(optimizer, options, planned=planned, **more) for planned in (False, True)]
    loops[1].start(**(step or {}))
    losses = []
    for loop in loops:
        mx.random.seed(9)
        losses.append(loop.train(5))
    assert np.array_equal(*losses)
    assert not differing(*(loop.values() for loop in loops))
    return loops[1].step


def within(step: TrainStep) -> bool:
    [plan] = step.plans.values()
    assert plan.realisation in ("packed", "updating")
    return plan.realisation == "updating"


def multiply(net: Any) -> None:
    for i, parameter in enumerate(net.collect_params().values()):
        parameter.lr_mult, parameter.wd_mult = 1.0 + i / 8, 0.5 + i / 4


def freeze(net: Any) -> None:
    """The first parameter of the trainer, which is one of the last to be updated in a step."""
    net[1].beta.grad_req = "null"


def schedule() -> Any:
    return mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "adagrad", "lamb"])
@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"lr_scheduler": schedule, "wd": 0.01}, {}),
        ({"learning_rate": 0.1, "wd": 0.1, "clip_gradient": 0.01}, {"prepare": multiply}),
        ({"learning_rate": 0.1, "multi_precision": True}, {"dtype": "float16"}),
        ({"learning_rate": 0.1}, {"prepare": freeze}),
    ],
)
def test_options_of_optimizers(
    optimizer: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    momentum = {"momentum": 0.9} if optimizer in ("sgd", "nag") else {}
    assert within(assert_equal_loops(optimizer, options | momentum, **more))


def test_readers_that_are_recomputed() -> None:
    step = assert_equal_loops(
        "adam", {"learning_rate": 0.1}, {"strategy": "evict", "time_limit": NEVER_SECONDS}
    )
    assert within(step)
    [plan] = step.plans.values()
    assert plan.optimizer_nbytes == sum(
        array.size * 4 for s in step._trainer.trainer._updaters[0].states.values() for array in s
    )
    kinds = {plan.schedule.graph.ops[op].kind for op in plan.schedule.recomputed}
    assert kinds & {"BatchNorm", "Convolution", "FullyConnected"}


def test_a_scheduler_sees_each_parameter_in_the_order_of_the_trainer() -> None:
    """After frozen parameters are freed, the number of updates differs from one to the other."""
    found = []
    for planned in (False, True):
        loop = Loop("adam", {"lr_scheduler": schedule}, planned=planned, prepare=freeze)
        loop.start()
        mx.random.seed(9)
        loop.train(2)
        loop.net[1].beta.grad_req = "write"
        loop.train(5)
        found.append(loop.values())
    assert not differing(*found)
    assert {plan.realisation for plan in loop.step.plans.values()} == {"updating"}


def test_parameters_are_frozen_after_an_update_within_the_step() -> None:
    """Its gradient was given up: what autograd has in its place is none that a script attached."""
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1}, planned=planned)
        loop.start()
        mx.random.seed(9)
        for _ in range(2):
            for request in ("null", "write"):
                loop.train(1)
                loop.net[1].gamma.grad_req = request
        found.append(loop.values())
    assert not differing(*found)


def test_batch_size_is_that_of_the_trainer() -> None:
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(1)
        loop.train(2, batch_size=7)
        loop.train(1)
        found.append(loop.values())
    assert not differing(*found)
    step = TrainStep(loop.net, SOFTMAX)
    with pytest.raises(ArgumentError, match="given a trainer"):
        step(loop.x, loop.y, batch_size=3)


def test_gradients_are_gone_and_come_back() -> None:
    loop = Loop("sgd", {"learning_rate": 0.1}, planned=True)
    step = loop.start()
    loop.train(2)
    weight = loop.net[0].weight
    before = weight.data().asnumpy()
    for call in (loop.trainer.step, loop.trainer.update):
        with pytest.raises(UsageError, match=r"Leave trainer\.step out"):
            call(4, ignore_stale_grad=True)
    with pytest.raises(RuntimeError, match="Cannot get gradient"):
        weight.grad()
    loop.net.collect_params().zero_grad()
    assert np.array_equal(weight.data().asnumpy(), before)
    for parameter in loop.net.collect_params().values():
        if parameter.grad_req == "write":
            parameter.grad_req = "null"
            parameter.grad_req = "write"
    loop.planned = False
    loop.train(1)
    assert weight.grad().asnumpy().any()
    other = TrainStep(loop.net, SOFTMAX, realisation="packed", strategy="store_all")
    loop.planned = True
    loop.train(1)  # gone again
    other(loop.x, loop.y)
    loop.trainer.step(4)
    after = weight.data().asnumpy()
    step(loop.x, loop.y)
    assert not np.array_equal(weight.data().asnumpy(), after)
    with pytest.raises(UsageError):
        loop.trainer.step(4)


def test_states_of_the_trainer_are_saved_and_loaded(tmp_path: Any) -> None:
    found = []
    for planned in (False, True):
        loop = Loop("adam", {"lr_scheduler": schedule}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(3)
        loop.trainer.save_states(str(tmp_path / "states"))
        saved = (tmp_path / "states").read_bytes()
        loop.train(1)
        loop.trainer.load_states(str(tmp_path / "states"))
        loop.train(2)
        found.append((saved, loop.values()))
    assert found[0][0] == found[1][0]
    assert not differing(found[0][1], found[1][1])


class MySGD(mx.optimizer.SGD):  # type: ignore[misc]
    """Of the user's."""


class MyTrainer(gluon.Trainer):  # type: ignore[misc]
    """Of the user's."""


def test_optimizers_of_the_users() -> None:
    for kind, is_within in ((MySGD, False), (type("M", (MySGD,), TOLD), True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if not is_within else "error", UserWarning)
            loop = Loop(kind(learning_rate=0.1), {}, planned=True)
            loop.start()
            loop.train(1)
        assert within(loop.step) is is_within


TOLD = {"updates_in_any_order": True}
OTHER = "it draws random|momentum schedule|momentum by|adds up gradients"


@pytest.mark.parametrize("optimizer", ["sgld", "nadam", "lars", "lbsgd"])
def test_optimizers_that_are_refused(optimizer: str) -> None:
    with pytest.warns(UserWarning, match=OTHER):
        step = assert_equal_loops(optimizer, {"learning_rate": 0.01})
    assert not within(step)


@pytest.mark.parametrize(
    ("more", "reason"),
    [({}, "a kvstore"), ({"update_on_kvstore": False}, "a kvstore")],
)
def test_kvstores_are_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=reason):
        step = assert_equal_loops("sgd", {"learning_rate": 0.1}, kvstore="local", **more)
    assert not within(step)


def test_parameters_beside_the_trainer_or_the_network() -> None:
    loop = Loop("sgd", {"learning_rate": 0.1}, planned=True)
    loop.trainer = gluon.Trainer(loop.net[0].collect_params(), "sgd", {"learning_rate": 0.1})
    with pytest.warns(UserWarning, match="is none of the trainer's"):
        loop.start()(loop.x, loop.y)
    assert loop.net[3].weight.grad().asnumpy().any()
    other = nn.Dense(3, in_units=3)
    other.initialize()
    params = loop.net.collect_params()
    params.update(other.collect_params())
    loop.trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.1})
    with (
        pytest.warns(UserWarning, match="no gradient for parameter"),
        pytest.raises(UserWarning, match="has not been updated by backward"),  # MXNet's own
    ):
        loop.start()(loop.x, loop.y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.start(ignore_stale_grad=True)(loop.x, loop.y)
    assert within(loop.step)


@pytest.mark.filterwarnings(BEHIND)
def test_what_else_is_refused() -> None:
    loop = Loop("sgd", {"learning_rate": 0.1}, planned=True)
    loop.trainer = MyTrainer(loop.net.collect_params(), "sgd", {"learning_rate": 0.1})
    loop.start()(loop.x, loop.y)
    assert not within(loop.step)
    with pytest.raises(ArgumentError, match=r"trainer must be a gluon\.Trainer"):
        loop.start(trainer="sgd")
    with pytest.raises(ArgumentError, match="packed steps of TrainStep"):
        loop.start(realisation="updating")
    loop.net[0].weight.grad_req = "add"
    with pytest.raises(ArgumentError, match="grad_req='add'"):
        loop.start()(loop.x, loop.y)


def test_a_refusal_that_comes_later() -> None:
    """AMP scales the loss dynamically from some step on."""
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1, "momentum": 0.9}, planned=planned)
        loop.start()
        mx.random.seed(9)
        loop.train(2)
        loop.trainer._amp_loss_scaler = LossScaler()
        with pytest.warns(UserWarning, match="AMP") if planned else warnings.catch_warnings():
            loop.train(1)
        loop.train(1)
        del loop.trainer._amp_loss_scaler
        loop.train(2)
        found.append(loop.values())
    assert not differing(*found)
    made = [plan.realisation for plan in loop.step.plans.values()]
    assert made == ["packed"]


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_halves_are_followed_by_the_trainer(realisation: str) -> None:
    found = []
    for planned in (False, True):
        loop = Loop("sgd", {"learning_rate": 0.1}, planned=planned)
        options: dict[str, Any] = {"realisation": realisation, "strategy": "store_all"}
        step = TrainStep(loop.net, trainer=loop.trainer, **options)
        mx.random.seed(9)
        for batch_size in (4, 9):
            if planned:
                scores = step.forward(loop.x, batch_size=batch_size)
                with autograd.record():
                    loss = SOFTMAX(scores, loop.y)
                step.backward(loss)
            else:
                loop.train(1, batch_size=batch_size)
        found.append(loop.values())
    assert not differing(*found)
