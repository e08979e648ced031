"""Updates within a step beside what else the trainer, the block and the optimizer have."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep

L2 = gluon.loss.L2Loss()
PACKED = {"realisation": "packed", "strategy": "store_all"}
RANDOM = np.random.default_rng(1)
BATCHES = [
    (RANDOM.normal(size=(5, 3)).astype("float32"), RANDOM.normal(size=(5, 4)).astype("float32"))
    for _ in range(6)
]

Values = dict[str, bytes]


def train(net: Any, x: Any, y: Any) -> None:
    with autograd.record():
        loss = L2(net(x), y)
    loss.backward()


def values(params: Any) -> Values:
    return {name: p.data().asnumpy().tobytes() for name, p in params.items()}


def realisations(step: TrainStep) -> list[str]:
    return [plan.realisation for plan in step.plans.values()]


class Partly(gluon.HybridBlock):  # type: ignore[misc]
    """It has a layer that it does not run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        with self.name_scope():
            self.read, self.unread = nn.Dense(4, in_units=3), nn.Dense(2, in_units=2)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        """Of the one layer."""
        return self.read(x)


class Overflow:
    """As AMP's loss scaler, in a step that overflows."""

    loss_scale = 1.0

    def has_overflow(self, params: Any) -> bool:
        """Always."""
        return True


def replace_step(trainer: Any) -> None:
    trainer.step = lambda *_, **__: None


def attach_scaler(trainer: Any) -> None:
    trainer._amp_loss_scaler = Overflow()


@pytest.mark.parametrize(
    ("leave_out", "reason"), [(replace_step, "was replaced"), (attach_scaler, "AMP looks")]
)
def test_a_refusal_after_updates_beside_a_layer_that_nothing_reads(
    leave_out: Callable[[Any], None], reason: str
) -> None:
    """The trainer does not have the layer, either: that does not keep the others from updates."""
    net = Partly()
    net.initialize()
    trainer = gluon.Trainer(net.read.collect_params(), "sgd", {"learning_rate": 0.1})
    step = TrainStep(net, L2, trainer=trainer, **PACKED)
    x, y = map(mx.nd.array, BATCHES[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step(x, y)
    assert realisations(step) == ["updating"]
    before = values(net.collect_params())
    leave_out(trainer)
    with pytest.warns(UserWarning, match=reason):
        step(x, y)
    step(x, y)
    assert values(net.collect_params()) == before


HEADS = ("first", "second")


def trained_by_turns(
    realisation: str | None, optimizer: str, options: dict[str, Any]
) -> tuple[Values, int, list[TrainStep]]:
    """A body with two heads, of which the first is trained for some batches: one update for both.

    The trainer's parameters, its number of updates and the steps.
    """
    mx.random.seed(1)
    body = nn.Dense(4, in_units=3, prefix="body_")
    heads = [nn.Dense(4, in_units=4, prefix=f"{name}_") for name in HEADS]
    nets, params = [nn.HybridSequential() for _ in HEADS], gluon.ParameterDict()
    for block in (body, *heads):
        block.initialize()
        params.update(block.collect_params())
    for net, head in zip(nets, heads, strict=True):
        net.add(body, head)
    scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    trainer = gluon.Trainer(params, optimizer, {"lr_scheduler": scheduler, **options})
    given: dict[str, Any] = {"realisation": realisation, "strategy": "store_all"}
    steps = []
    if realisation is not None:
        steps = [TrainStep(nets[0], L2, **given)]
        steps += [TrainStep(nets[1], L2, trainer=trainer, ignore_stale_grad=True, **given)]
    for i, batch in enumerate(BATCHES):
        x, y = map(mx.nd.array, batch)
        for place in (1,) if i in (0, 3) else (0, 1):
            if steps:
                steps[place](x, y)
            else:
                train(nets[place], x, y)
        if not steps:
            trainer.step(5, ignore_stale_grad=True)
    return values(params), trainer.optimizer.num_update, steps


@pytest.mark.parametrize(
    ("optimizer", "options"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("adagrad", {})]
)
def test_fresh_gradients_beside_the_network(optimizer: str, options: dict[str, Any]) -> None:
    """With ignore_stale_grad the trainer leaves out stale ones, and no others."""
    expected = trained_by_turns(None, optimizer, options)
    for realisation in ("explicit", "packed"):
        found = trained_by_turns(realisation, optimizer, options)
        assert found[:2] == expected[:2]
    assert realisations(found[2][1]) == ["updating"]


Rate = Callable[[Any, int], float]


def optimizer_of(rate: Rate) -> Any:
    """An optimizer of the user's that takes this ``rate``."""

    class Mine(mx.optimizer.Optimizer):  # type: ignore[misc]
        """It says that it updates every parameter by its own gradient alone."""

        updates_in_any_order = True

        def create_state(self, index: int, weight: Any) -> None:
            """None."""

        def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
            """A step down the slope."""
            weight[:] -= rate(self, index) * self.rescale_grad * grad

    return Mine(lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1))


def counted(optimizer: Any, index: int) -> float:
    optimizer._update_count(index)
    return float(optimizer._get_lr(index))


def of_the_number(optimizer: Any, index: int) -> float:
    return counted(optimizer, index) / optimizer.num_update


def and_then_read(optimizer: Any, index: int) -> float:
    return counted(optimizer, index) + float(optimizer.lr_scheduler.base_lr)


def and_read_what_stays(optimizer: Any, index: int) -> float:
    return float(optimizer.lr_scheduler.factor) * counted(optimizer, index)


def only_read(optimizer: Any, index: int) -> float:
    optimizer._update_count(index)
    return float(optimizer.lr_scheduler.base_lr)


def ahead(optimizer: Any, index: int) -> float:
    rate = float(optimizer._get_lr(index))
    optimizer._update_count(index)
    return rate


def never_counted(optimizer: Any, index: int) -> float:
    return float(optimizer.learning_rate)


def by_its_own_count(optimizer: Any, index: int) -> float:
    optimizer._update_count(index)
    return float(optimizer.lr_scheduler(optimizer._index_update_count[index]))


def read_before(optimizer: Any, index: int) -> float:
    return float(optimizer.lr_scheduler.base_lr) + counted(optimizer, index)


def trained_by(rate: Rate, *, planned: bool, later: str = "") -> Values:
    """Layers trained by an optimizer of this ``rate``; one parameter begins ``later``."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=3), nn.Dense(4, in_units=4))
    net.initialize()
    params = net.collect_params()
    trainer = gluon.Trainer(params, optimizer_of(rate))
    step = TrainStep(net, L2, trainer=trainer, **PACKED)
    for i, batch in enumerate(BATCHES):
        if later:
            params[later].grad_req = "null" if i < 3 else "write"
        x, y = map(mx.nd.array, batch)
        if planned:
            step(x, y)
        else:
            train(net, x, y)
            trainer.step(5)
    assert set(realisations(step)) == ({"updating"} if planned else set())
    return values(params) | {"base_lr": str(trainer.optimizer.lr_scheduler.base_lr).encode()}


# The first parameter of the trainer: the numbers of updates differ from then on.
LATER = "net_dense0_bias"


@pytest.mark.parametrize("later", ["", LATER])
@pytest.mark.parametrize("rate", [counted, of_the_number, and_read_what_stays, only_read])
def test_rates_of_optimizers_of_the_users(rate: Rate, later: str) -> None:
    assert trained_by(rate, planned=True, later=later) == trained_by(
        rate, planned=False, later=later
    )


@pytest.mark.parametrize("rate", [and_then_read, by_its_own_count])
def test_rates_that_are_right_while_all_have_had_as_many_updates(rate: Rate) -> None:
    assert trained_by(rate, planned=True) == trained_by(rate, planned=False)
    with pytest.raises(UsageError, match="leave updates_in_any_order out"):
        trained_by(rate, planned=True, later=LATER)


@pytest.mark.parametrize(
    ("rate", "reason"),
    [
        (ahead, r"update 0 in update 1, .* call self\._update_count\(index\)"),
        (never_counted, "asks its lr_scheduler for the rate of update 0 in update 1"),
        (read_before, r"reads lr_scheduler\.base_lr, which changes"),
    ],
)
def test_rates_that_depend_on_the_order(rate: Rate, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        trained_by(rate, planned=True)


def test_nothing_holds_the_gradients_that_a_step_gives_up() -> None:
    """Neither those of initialize() nor those that a parameter gets when it is trained again."""
    net = nn.Dense(4, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    step = TrainStep(net, L2, trainer=trainer, **PACKED)
    for x, y in BATCHES[:2]:
        gradient = net.weight._grad[0]
        step(mx.nd.array(x), mx.nd.array(y))
        assert net.weight._grad is None
        assert sys.getrefcount(gradient) == 2, "others than this function and this call have it"
        net.weight.grad_req = "null"
        net.weight.grad_req = "write"
    assert realisations(step) == ["updating"]


def left_by_one_memory(first: int, *, planned: bool) -> Values:
    """What steps leave, before the ``first`` of which a script lets two layers have one memory."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        widths = [(3, 4), (4, 4), (4, 4), (4, 4)]
        net.add(*(nn.Dense(n, activation="tanh", in_units=m, use_bias=False) for m, n in widths))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
    step = TrainStep(net, L2, trainer=trainer, **PACKED)
    for number, (x, y) in enumerate(BATCHES[:4]):
        x, y = mx.nd.array(x), mx.nd.array(y)
        if number == first:
            both = mx.nd.random.uniform(shape=(6, 4))
            net[1].weight._data, net[3].weight._data = [both[:4]], [both[2:]]
            for layer in (net[1], net[3]):
                layer.weight._init_grad()
        if planned:
            step(x, y)
        else:
            train(net, x, y)
            trainer.step(5)
    assert not planned or len(realisations(step)) == 1
    return values(net.collect_params())


@pytest.mark.parametrize("first", [0, 2])
def test_of_parameters_with_one_memory_none_is_updated_before_all_are_read(first: int) -> None:
    with pytest.warns(UserWarning, match="'net_dense1_weight' and 'net_dense3_weight' have the"):
        found = left_by_one_memory(first, planned=True)
    assert found == left_by_one_memory(first, planned=False)


@pytest.mark.parametrize("in_halves", [False, True])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_step_under_record_updates_what_no_loss_is_recorded_of(
    realisation: str, in_halves: bool
) -> None:
    """Behind the step, too, as one that runs in halves is updated, or an explicit one."""
    found = []
    for planned in (False, True):
        mx.random.seed(1)
        net = nn.Dense(4, in_units=3, prefix="net_")
        net.initialize(mx.init.Xavier())
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
        options = {"realisation": realisation, "strategy": "store_all", "trainer": trainer}
        step = TrainStep(net, None if in_halves else L2, **options) if planned else None
        for x, y in BATCHES[:2]:
            x, y = mx.nd.array(x), mx.nd.array(y)
            if step is None:
                train(net, x, y)
                trainer.step(5)
                continue
            with warnings.catch_warnings(), autograd.record():
                warnings.filterwarnings("ignore", "parameters are updated behind the step")
                if in_halves:
                    step.backward(L2(step.forward(x), y))
                else:
                    step(x, y)
        found.append(values(net.collect_params()))
    assert found[0] == found[1]
