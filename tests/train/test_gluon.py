"""Gluon blocks trained by a plan: bit for bit as by autograd and Trainer."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import ArgumentError, BudgetError, TraceError
from memplan.mxnet.gluon import TrainStep
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Status

CPU = mx.cpu(0)
STEPS = 3
QUICK = {"strategy": "evict"}
SOFTMAX = gluon.loss.SoftmaxCrossEntropyLoss()

Values = dict[str, np.ndarray]


def conv_net() -> nn.HybridSequential:
    """Shapes unknown before the first batch; something to recompute."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(3):
            net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Dense(10))
    return net


def dropout_net() -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(3):
            net.add(nn.Dense(16, activation="relu"), nn.Dropout(0.4))
        net.add(nn.Dense(10))
    return net


class Recurrent(gluon.HybridBlock):
    """An LSTM with dropout between its layers, and a Dense layer on every step."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.lstm = gluon.rnn.LSTM(8, num_layers=2, dropout=0.3, input_size=6)
            self.dense = nn.Dense(10, flatten=False)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.dense(self.lstm(F.tanh(x)))


class Cells(gluon.HybridBlock):
    """A cell unrolled, whose weights every step shares; the states are inputs and outputs."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.cell = gluon.rnn.LSTMCell(8, input_size=6)
            self.dense = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any, states: Any) -> Any:  # noqa: N803
        outputs, states = self.cell.unroll(5, x, states, layout="TNC", merge_outputs=False)
        return self.dense(outputs[-1]), states


class Siamese(gluon.HybridBlock):
    """Two inputs through one body, two outputs; a layer shares its weights with another."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = nn.Dense(12, activation="tanh")
            self.twin = nn.Dense(12, activation="tanh", params=self.body.params)
            self.scores = nn.Dense(10)
            self.distance = nn.Dense(1)
            self.factor = self.params.get("factor", shape=(1, 12), init="ones")
            self.shift = self.params.get_constant("shift", [[0.5] * 12])

    def hybrid_forward(self, F: Any, a: Any, b: Any, factor: Any, shift: Any) -> Any:  # noqa: N803
        a, b = self.body(a), self.twin(self.body(b) * 0.5)
        a = F.broadcast_add(F.broadcast_mul(a, factor), shift)
        return self.scores(a), self.distance(a - b)


class Half(gluon.HybridBlock):
    """What MXNet computes in float16 on CPUs: no matrix products."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            for name in ("one", "two", "three"):
                made = self.params.get(name, shape=(1, 3, 1, 1), init=mx.init.Uniform(2))
                setattr(self, name, made)
            self.norm = nn.BatchNorm()

    def hybrid_forward(self, F: Any, x: Any, **scales: Any) -> Any:  # noqa: N803
        for scale in scales.values():
            x = F.relu(F.broadcast_mul(F.tanh(x), scale) + 0.1)
        return F.mean(self.norm(x), axis=3)


class WithLoss(gluon.HybridBlock):
    """A block that returns its loss."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.net = conv_net()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return F.softmax_cross_entropy(self.net(x), y)


def images(size: int, batch: int = 4) -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(batch, 3, size, size), ctx=CPU)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(batch,), ctx=CPU))


def images_and_rest() -> Callable[[], tuple[Any, Any]]:
    """Every other batch is smaller."""
    sizes = itertools.cycle([6, 4])
    return lambda: images(8, next(sizes))


def pictures() -> tuple[Any, Any]:
    x, _ = images(8)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 3, shape=(4, 8), ctx=CPU))


def vectors() -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(64, 12), ctx=CPU)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(64,), ctx=CPU))


def pairs() -> tuple[Any, Any]:
    (a, y), (b, _) = vectors(), vectors()
    return (a, b), [y, mx.nd.random.uniform(shape=(64, 1), ctx=CPU)]


def sequences() -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(5, 3, 6), ctx=CPU)
    return x, mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(5, 3), ctx=CPU))


def with_states() -> tuple[Any, Any]:
    x = mx.nd.random.uniform(shape=(5, 32, 6), ctx=CPU)
    states = [mx.nd.random.uniform(shape=(32, 8), ctx=CPU) for _ in range(2)]
    return (x, states), mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(32,), ctx=CPU))


def two_losses(outputs: Any, labels: Any) -> list[Any]:
    return [SOFTMAX(outputs[0], labels[0]), gluon.loss.L2Loss()(outputs[1], labels[1])]


def first_output(outputs: Any, label: Any) -> Any:
    return SOFTMAX(outputs[0], label)


def first_of_rows(outputs: Any, labels: Any) -> Any:
    return SOFTMAX(outputs.swapaxes(1, 2), labels)


@dataclass(frozen=True)
class Case:
    """A block to train with a loss on batches."""

    block: Callable[[], Any]
    batch: Callable[[], Any]
    loss: Any = SOFTMAX
    prepare: Callable[[Any], Any] = lambda net: None
    contexts: tuple[mx.Context, ...] = (CPU,)
    micro_batches: int = 1
    initializer: Any = field(default_factory=mx.init.Xavier)
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    recomputes: bool = True


def freeze(net: Any) -> None:
    for name, parameter in net.collect_params().items():
        if "conv0" in name or "batchnorm1" in name:
            parameter.grad_req = "null"


def accumulate(net: Any) -> None:
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad_req = "add"


CASES = {
    "conv": Case(conv_net, lambda: images(8)),
    "dropout": Case(dropout_net, vectors),
    "lstm": Case(Recurrent, sequences),
    "cells": Case(Cells, with_states, first_output, options=QUICK),
    "two_losses": Case(Siamese, pairs, two_losses),
    "list_of_losses": Case(Siamese, pairs, [SOFTMAX, gluon.loss.L1Loss(weight=0.3)]),
    "own_loss": Case(WithLoss, lambda: images(8), None),
    "frozen": Case(conv_net, lambda: images(8), prepare=freeze),
    "added": Case(conv_net, lambda: images(8), prepare=accumulate, micro_batches=2),
    "two_contexts": Case(conv_net, lambda: images(8), contexts=(mx.cpu(0), mx.cpu(1))),
    "half": Case(Half, pictures, first_of_rows, dtype="float16"),
    "shapes": Case(conv_net, images_and_rest(), micro_batches=2, prepare=accumulate),
}


def prepared(case: Case) -> tuple[Any, Any]:
    """The block of a case and its trainer, as a seed makes them."""
    mx.random.seed(3)
    net = case.block()
    net.initialize(case.initializer, ctx=list(case.contexts))
    if case.dtype != "float32":
        net.cast(case.dtype)
    case.prepare(net)
    options = {"learning_rate": 0.05, "momentum": 0.9}
    return net, gluon.Trainer(net.collect_params(), "sgd", options)


def batches(case: Case) -> list[list[tuple[Any, Any]]]:
    """For every step its micro-batches."""
    mx.random.seed(11)

    def cast(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(cast, value))
        return value.astype(case.dtype)

    return [[cast(case.batch()) for _ in range(case.micro_batches)] for _ in range(STEPS)]


def train(case: Case, losses_of: Callable[[Any, Any, list[mx.Context]], Any]) -> list[Values]:
    """What a training loop leaves after each step, where ``losses_of`` differentiates."""
    net, trainer = prepared(case)
    made = batches(case)
    mx.random.seed(7)
    result = []
    for step in made:
        values: Values = {}
        for x, y in step:
            losses = losses_of(net, (x, y), list(case.contexts))
            for loss in leaves(losses):
                values[f"loss {len(values)}"] = loss.asnumpy()
        mx.nd.waitall()
        params = net.collect_params()
        for name, parameter in params.items():
            if parameter.grad_req != "null":
                for i, grad in enumerate(parameter.list_grad()):
                    values[f"gradient of {name} {i}"] = grad.asnumpy()
        trainer.step(8)
        if case.micro_batches > 1:
            params.zero_grad()
        mx.nd.waitall()
        for name, parameter in params.items():
            for i, data in enumerate(parameter.list_data()):
                values[f"{name} {i}"] = data.asnumpy()
        result.append(values)
    return result


def leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def by_autograd(case: Case) -> Callable[[Any, Any, list[mx.Context]], Any]:
    """Gluon's own way, with the block hybridized."""

    def loss_of(net: Any, x: Any, y: Any) -> Any:
        inputs = x if isinstance(x, tuple) else (x,)
        if case.loss is None:
            return net(*inputs, y)
        if isinstance(case.loss, list):
            return [fn(*pair) for fn, *pair in zip(case.loss, net(*inputs), y, strict=True)]
        return case.loss(net(*inputs), y)

    def losses_of(net: Any, batch: Any, contexts: list[mx.Context]) -> Any:
        net.hybridize()
        parts = [gluon.utils.split_and_load(a, contexts) for a in batch] if contexts[1:] else None
        with autograd.record():
            pairs = [batch] if parts is None else list(zip(*parts, strict=True))
            losses = [loss_of(net, *pair) for pair in pairs]
        autograd.backward(leaves(losses))
        return losses

    return losses_of


def by_plan(case: Case, made: list[TrainStep]) -> Callable[[Any, Any, list[mx.Context]], Any]:
    """By a TrainStep, which is appended to ``made``."""

    def losses_of(net: Any, batch: Any, contexts: list[mx.Context]) -> Any:
        if not made:
            made.append(train_step(net, case.loss, **case.options))
        if contexts[1:]:
            return made[0](*(gluon.utils.split_and_load(array, contexts) for array in batch))
        return made[0](*batch)

    return losses_of


def train_step(net: Any, loss: Any = SOFTMAX, **options: Any) -> TrainStep:
    """One that is planned quickly, for the least memory."""
    return TrainStep(net, loss, **({"strategy": "chen_sqrt"} | options))


def differences(one: list[Values], other: list[Values]) -> list[str]:
    found = []
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a.keys() == b.keys()
        found += [
            f"step {step}: {name} by {np.abs(a[name].astype('f8') - b[name]).max():.3g}"
            for name in a
            if not np.array_equal(a[name], b[name])
        ]
    return found


@pytest.mark.parametrize("name", CASES)
def test_identical_to_autograd(name: str) -> None:
    case = CASES[name]
    made: list[TrainStep] = []
    assert not differences(train(case, by_autograd(case)), train(case, by_plan(case, made)))
    for planned in made[0].plans.values():
        assert bool(planned.schedule.recomputed) == case.recomputes


def normal(*shape: int) -> Any:
    return mx.nd.random.normal(shape=shape, ctx=CPU)


LOSSES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "ctc": (gluon.loss.CTCLoss(), lambda: mx.nd.floor(mx.nd.random.uniform(0, 8, (8, 3)))),
    "triplet": (gluon.loss.TripletLoss(), lambda: [normal(8, 10), normal(8, 10)]),
    "weighted": (SOFTMAX, lambda: [mx.nd.arange(8), mx.nd.random.uniform(shape=(8, 1))]),
    "distribution": (gluon.loss.KLDivLoss(from_logits=False), lambda: normal(8, 10).softmax()),
    "signs": (gluon.loss.SquaredHingeLoss(), lambda: normal(8, 10).sign()),
    "two terms": (lambda o, y: SOFTMAX(o, y) + (o**2).mean(axis=1), lambda: mx.nd.arange(8)),
    "mean": (lambda o, y: SOFTMAX(o, y).mean(), lambda: mx.nd.arange(8)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, labels = LOSSES[name]

    def given(outputs: Any, labels: Any) -> Any:
        return loss(outputs, *(labels if isinstance(labels, list) else [labels]))

    def net() -> Any:
        made = nn.HybridSequential(prefix="net_")
        with made.name_scope():
            flatten = name != "ctc"
            for _ in range(3):
                made.add(nn.Dense(16, activation="tanh", flatten=flatten), nn.LayerNorm())
            made.add(nn.Dense(10, flatten=flatten))
        return made

    batch = (lambda: normal(8, 6, 12)) if name == "ctc" else (lambda: normal(8, 12))
    case = Case(net, lambda: (batch(), labels()), given)
    assert not differences(train(case, by_autograd(case)), train(case, by_plan(case, [])))


def test_a_network_of_the_zoo_in_a_whole_script() -> None:
    """A loader whose last batch is smaller, metrics, clipped gradients, saving and resuming."""
    random = np.random.default_rng(2)
    x = random.normal(size=(10, 3, 32, 32)).astype("float32")
    y = random.integers(0, 10, 10).astype("int32")
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), 6, last_batch="keep")

    def epoch(net: Any, trainer: Any, losses_of: Any) -> Values:
        accuracy = mx.metric.Accuracy()
        for data, label in loader:
            losses_of(net, (data, label), [CPU])
            trainer.allreduce_grads()
            grads = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
            gluon.utils.clip_global_norm(grads, 1.0)
            trainer.update(len(data))
            accuracy.update(label, net(data))
        return {"accuracy": np.array(accuracy.get()[1])} | gradients(net)

    def made() -> Any:
        mx.random.seed(3)
        net = gluon.model_zoo.vision.get_model("mobilenetv2_0.25", classes=10, prefix="net_")
        net.initialize(mx.init.Xavier(), ctx=CPU)
        return net, gluon.Trainer(net.collect_params(), "adam", update_on_kvstore=False)

    def run(way: Callable[[], Any]) -> list[Values]:
        net, trainer = made()
        found = [epoch(net, trainer, way())]
        with tempfile.TemporaryDirectory() as folder:
            net.save_parameters(f"{folder}/net.params")
            trainer.save_states(f"{folder}/trainer.states")
            net, trainer = made()
            net.load_parameters(f"{folder}/net.params", ctx=CPU)
            trainer.load_states(f"{folder}/trainer.states")
        return [*found, epoch(net, trainer, way())]

    case = Case(lambda: None, lambda: None)
    assert not differences(run(lambda: by_autograd(case)), run(lambda: by_plan(case, [])))


def trained(block: Any = None, **options: Any) -> tuple[Any, TrainStep, Any]:
    """A block after a step, its TrainStep, and the batch."""
    mx.random.seed(3)
    net = conv_net() if block is None else block
    net.initialize(mx.init.Xavier(), ctx=CPU)
    step, batch = train_step(net, **options), images(8)
    step(*batch)
    return net, step, batch


def gradients(net: Any) -> Values:
    mx.nd.waitall()
    return {
        name: parameter.grad().asnumpy()
        for name, parameter in net.collect_params().items()
        if parameter.grad_req != "null"
    }


def autograd_gradients(net: Any, batch: Any) -> Values:
    """Those of Gluon's own way, on a copy of the block."""
    copy = conv_net()
    copy.cast(batch[0].dtype)
    copy.initialize(ctx=CPU)
    copy(batch[0])
    for name, parameter in net.collect_params().items():
        copy.collect_params()[name].set_data(parameter.data())
        copy.collect_params()[name].grad_req = parameter.grad_req
    copy.hybridize()
    with autograd.record():
        loss = SOFTMAX(copy(batch[0]), batch[1])
    loss.backward()
    return gradients(copy)


def assert_equal(one: Values, other: Values) -> None:
    assert not differences([one], [other])


def test_shapes_are_planned_once_and_share_memory() -> None:
    net, step, large = trained()
    before = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    first = [array.asnumpy() for array in before]
    step(*images(8, batch=2))
    mx.nd.waitall()
    # Where the gradients of the first were is the memory of the second step.
    assert any(not np.array_equal(a, b.asnumpy()) for a, b in zip(first, before, strict=True))
    made = step.plans
    assert set(made) == {((4, 3, 8, 8), (4,)), ((2, 3, 8, 8), (2,))}
    step(*large)
    assert_equal(autograd_gradients(net, large), gradients(net))
    assert list(step.plans.values()) == list(made.values())


def test_plan_before_the_first_batch() -> None:
    net = conv_net()
    step = train_step(net, budget=0.8, **QUICK)
    made = step.plan((16, 3, 16, 16), (16,))
    assert made.realisation == "explicit"
    assert made.schedule.recomputed
    assert made.total_nbytes <= 0.8 * made.unplanned.total_nbytes
    net.initialize(ctx=CPU)
    batch = images(16, batch=16)
    step(*batch)
    assert step.plans == {((16, 3, 16, 16), (16,)): made}
    assert_equal(autograd_gradients(net, batch), gradients(net))


def test_the_loss_and_outputs_are_the_callers() -> None:
    """The next step does not write into them; the kept outputs change no gradient."""
    net, step, (x, y) = trained(keep_outputs=True)
    with autograd.pause(train_mode=True):
        expected = net(x)
    loss = step(x, y)
    outputs, before = step.outputs, loss.asnumpy()
    assert np.array_equal(outputs.asnumpy(), expected.asnumpy())
    assert_equal(autograd_gradients(net, (x, y)), gradients(net))
    step(x * 2, y)
    mx.nd.waitall()
    assert np.array_equal(loss.asnumpy(), before)
    assert np.array_equal(outputs.asnumpy(), expected.asnumpy())


def test_scale_multiplies_the_gradients() -> None:
    net, step, (x, y) = trained()
    loss, once = step(x, y), gradients(net)
    scaled, twice = step(x, y, scale=2.0), gradients(net)
    assert np.array_equal(loss.asnumpy(), scaled.asnumpy())
    assert_equal({name: 2 * grad for name, grad in once.items()}, twice)
    step(x, y)
    assert_equal(once, gradients(net))


def test_block_serves_for_inference_saving_and_exporting(tmp_path: Path) -> None:
    net, step, (x, y) = trained()
    trainer = gluon.Trainer(net.collect_params(), "adam")
    before = net(x).asnumpy()
    step(x, y)
    trainer.step(4)
    after = net(x).asnumpy()
    assert not np.array_equal(before, after)
    net.hybridize()
    assert np.array_equal(net(x).asnumpy(), after)
    net.export(str(tmp_path / "net"))
    files = (str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    exported = gluon.SymbolBlock.imports(*files)
    assert np.array_equal(exported(x).asnumpy(), after)
    net.save_parameters(str(tmp_path / "net.params"))
    loaded = conv_net()
    loaded.load_parameters(str(tmp_path / "net.params"))
    assert np.array_equal(loaded(x).asnumpy(), after)


def test_an_imported_block_can_be_trained(tmp_path: Path) -> None:
    net, _, (x, y) = trained()
    expected = autograd_gradients(net, (x, y))
    net.hybridize()
    net(x)
    net.export(str(tmp_path / "net"))
    files = (str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    imported = gluon.SymbolBlock.imports(*files)
    for name, parameter in imported.collect_params().items():
        parameter.grad_req = net.collect_params()[name].grad_req
    train_step(imported)(x, y)
    assert_equal(expected, gradients(imported))


def freeze_the_first(net: Any) -> None:
    net[0].weight.grad_req = "null"


def reset_values(net: Any) -> None:
    net.initialize(mx.init.Normal(0.3), ctx=CPU, force_reinit=True)


def to_another_context_and_back(net: Any) -> None:
    net.collect_params().reset_ctx(mx.cpu(1))
    net.collect_params().reset_ctx(CPU)


def set_values(net: Any) -> None:
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * 0.5)


def load_values(net: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        net.save_parameters(f"{folder}/net.params")
        reset_values(net)
        net.load_parameters(f"{folder}/net.params", ctx=CPU)


def hybridize(net: Any) -> None:
    net.hybridize(static_alloc=True, static_shape=True)
    net(images(8)[0])


@pytest.mark.parametrize(
    "change",
    [
        freeze_the_first,
        accumulate,
        reset_values,
        set_values,
        load_values,
        hybridize,
        to_another_context_and_back,
    ],
)
def test_changed_parameters_are_noticed(change: Callable[[Any], Any]) -> None:
    net, step, batch = trained()
    change(net)
    expected = autograd_gradients(net, batch)
    step(*batch)
    assert_equal(expected, gradients(net))


def test_gradients_are_added_where_they_are_to_be() -> None:
    net, step, batch = trained()
    once = autograd_gradients(net, batch)
    accumulate(net)
    for count in (1, 2):
        step(*batch)
        assert_equal({name: count * grad for name, grad in once.items()}, gradients(net))
    for parameter in net.collect_params().values():
        parameter.grad_req = "write"
    accumulate(net)  # into new arrays
    step(*batch)
    assert_equal(once, gradients(net))


def test_arrays_that_are_no_longer_used_are_given_up() -> None:
    net, step, batch = trained()
    step(*images(8, batch=2))
    assert len(step._bound) == 2
    reset_values(net)
    step(*batch)
    assert len(step._bound) == 1


def test_a_cast_after_training_is_noticed() -> None:
    net, step, (x, y) = trained()
    net.cast("float64")
    batch = (x.astype("float64"), y)
    step(*batch)
    assert gradients(net)["net_conv0_weight"].dtype == np.float64
    assert_equal(autograd_gradients(net, batch), gradients(net))


def test_autograd_still_works_beside_it() -> None:
    net, _, batch = trained()
    expected = autograd_gradients(net, batch)
    for parameter in net.collect_params().values():
        parameter.zero_grad()
    with autograd.record():
        loss = SOFTMAX(net(batch[0]), batch[1])
    loss.backward()
    assert any(grad.any() for grad in expected.values())
    for name, grad in gradients(net).items():  # not hybridized: equal but for rounding
        np.testing.assert_allclose(grad, expected[name], rtol=1e-3, atol=1e-5)


def test_two_steps_may_share_a_block() -> None:
    net, step, (x, y) = trained()
    other = train_step(net, gluon.loss.SoftmaxCrossEntropyLoss(weight=3.0))
    step(x, y)
    once = gradients(net)
    other(x, y)
    assert not np.array_equal(gradients(net)["net_conv0_weight"], once["net_conv0_weight"])
    step(x, y)
    assert_equal(once, gradients(net))


def test_trainer_sees_which_gradients_are_fresh() -> None:
    net, step, (x, y) = trained()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    trainer.step(4)
    with pytest.raises(UserWarning, match="has not been updated"):
        trainer.step(4)
    step(x, y)
    trainer.step(4)


def test_lists_of_one_context_give_lists() -> None:
    _, step, (x, y) = trained()
    losses = step(*(gluon.utils.split_and_load(array, [CPU]) for array in (x, y)))
    assert isinstance(losses, list)
    assert np.array_equal(losses[0].asnumpy(), step(x, y).asnumpy())


def test_several_inputs_on_several_contexts() -> None:
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = Siamese()
    net.initialize(ctx=contexts)
    step = train_step(net, two_losses)
    inputs, labels = ([gluon.utils.split_and_load(a, contexts) for a in b] for b in pairs())
    losses = step(inputs, labels)
    again = step(list(zip(*inputs, strict=True)), list(zip(*labels, strict=True)))
    assert [[loss.context for loss in pair] for pair in losses] == [[c, c] for c in contexts]
    for one, other in zip(leaves(losses), leaves(again), strict=True):
        assert np.array_equal(one.asnumpy(), other.asnumpy())


@dataclass(frozen=True)
class Counting:
    """A strategy that counts how often it is asked."""

    asked: list[int | None]

    def solve(self, graph: Any, budget_nbytes: int | None) -> Outcome:
        self.asked.append(budget_nbytes)
        return Outcome(Status.FEASIBLE, Schedule.unplanned(graph))


def test_a_plan_serves_all_contexts_and_later_bindings() -> None:
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = conv_net()
    net.initialize(ctx=contexts)
    strategy = Counting([])
    step = train_step(net, strategy=strategy)
    batch = [gluon.utils.split_and_load(array, contexts) for array in images(8)]
    step.plan(*batch)
    step(*batch)
    net.initialize(ctx=contexts, force_reinit=True)
    step(*batch)
    assert len(strategy.asked) == 1


class WithWeights(gluon.loss.Loss):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(None, 0, prefix="loss_")
        self.factor = self.params.get("factor", shape=(1,), init="ones")

    def hybrid_forward(self, F: Any, x: Any, y: Any, factor: Any) -> Any:  # noqa: N803
        return F.broadcast_mul(SOFTMAX(x, y), factor)


def test_a_loss_may_have_parameters() -> None:
    loss = WithWeights()
    loss.initialize(ctx=CPU)
    _, step, batch = trained(loss=loss)
    value = step(*batch)
    assert np.isclose(loss.factor.grad().asscalar(), value.sum().asscalar())


AMP = """
import mxnet as mx
from mxnet.contrib import amp
amp.init("float16")
from train import test_gluon as t
from mxnet import autograd, gluon

class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.factor = self.params.get("factor", shape=(1, 3, 1, 1), init="ones")
            self.norm, self.half = t.nn.BatchNorm(), t.nn.BatchNorm()

    def hybrid_forward(self, F, x, factor):
        x = F.relu(self.norm(F.broadcast_mul(x, factor)))
        x = F.relu(self.half(F.cast(F.tanh(x) * 2, dtype="float16")))
        return F.mean(F.cast(x, dtype="float32"), axis=3)

def by_autograd(net, trainer, x, y):
    with autograd.record():
        loss = t.first_of_rows(net(x), y)
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)

steps = {}

def by_plan(net, trainer, x, y):
    with amp.scale_loss(1.0, trainer) as scale:
        steps.setdefault(net, t.train_step(net, t.first_of_rows))(x, y, scale=scale)

def run(way):
    mx.random.seed(1)
    net = Net()
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer)
    trainer._amp_loss_scaler._loss_scale = trainer._amp_loss_scaler._next_loss_scale = 8.0
    result = []
    for _ in range(3):
        way(net, trainer, *t.pictures())
        result.append(t.gradients(net))
        trainer.step(4)
    return result

one, other = run(by_autograd), run(by_plan)
(plan,) = next(iter(steps.values())).plans.values()
assert "amp_multicast" in {op.kind for op in plan.schedule.graph.ops}
assert any(grad.any() for grad in one[0].values())
assert not t.differences(one, other), t.differences(one, other)
"""


BFLOAT16 = """
from mxnet.contrib import amp
amp.init("bfloat16")
from train import test_gluon as t
try:
    t.trained()
except t.TraceError as error:
    assert "bfloat16" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.parametrize("script", [AMP, BFLOAT16], ids=["scaled loss", "bfloat16 is refused"])
def test_amp(script: str) -> None:
    """In a process of its own: AMP changes MXNet's operators for good."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


class Looks(gluon.HybridBlock):
    """Looks at a value, and cannot be hybridized."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return x * x.shape[0]


def sparse() -> Any:
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Embedding(30, 4, sparse_grad=True))
    return net


def with_gradient() -> Any:
    x, y = images(8)
    x.attach_grad()
    return x, y


def numpy_arrays() -> Any:
    return tuple(array.as_np_ndarray() for array in images(8))


def elsewhere() -> Any:
    return tuple(array.copyto(mx.cpu(1)) for array in images(8))


def half_elsewhere() -> Any:
    x, y = images(8)
    return x, y.copyto(mx.cpu(1))


def labels_not_split() -> Any:
    x, y = images(8)
    return gluon.utils.split_and_load(x, [mx.cpu(0), mx.cpu(1)]), y


def brain_floats() -> Any:
    x, y = images(8)
    return x.astype(np.dtype([("bfloat16", np.uint16)])), y


def no_loss(outputs: Any, labels: Any) -> Any:
    return None


def closure(outputs: Any, labels: Any) -> Any:
    return SOFTMAX(outputs, labels) * mx.sym.Variable("hidden")


@pytest.mark.parametrize(
    ("block", "batch", "loss", "error", "message"),
    [
        (nn.Sequential, images, SOFTMAX, ArgumentError, "HybridSequential"),
        (conv_net, images, "softmax", ArgumentError, "'softmax'"),
        (conv_net, images, [], ArgumentError, "loss must be"),
        (Looks, images, SOFTMAX, TraceError, "Looks 'looks.*' cannot be called with Symbols"),
        (conv_net, images, no_loss, TraceError, "must be Symbols"),
        (conv_net, images, closure, ArgumentError, "'hidden'.* as a Block"),
        (conv_net, images, [SOFTMAX, SOFTMAX], TraceError, "shorter|longer"),
        (sparse, images, SOFTMAX, ArgumentError, "sparse_grad"),
        (conv_net, brain_floats, SOFTMAX, ArgumentError, "bfloat16"),
        (conv_net, with_gradient, SOFTMAX, ArgumentError, "attach_grad"),
        (conv_net, numpy_arrays, SOFTMAX, ArgumentError, "mx.np"),
        (conv_net, elsewhere, SOFTMAX, ArgumentError, r"on cpu\(1\).*'net_conv0_weight'"),
        (conv_net, half_elsewhere, SOFTMAX, ArgumentError, "one context"),
        (conv_net, labels_not_split, SOFTMAX, ArgumentError, "split the labels"),
        (conv_net, lambda: (3, 4), SOFTMAX, ArgumentError, "got int"),
        (conv_net, lambda: ((), None), SOFTMAX, ArgumentError, "no arrays"),
        (conv_net, lambda: (vectors()[0], None), SOFTMAX, TraceError, "label"),
        (conv_net, vectors, SOFTMAX, ArgumentError, "memplan_input0.*do not fit"),
    ],
)
def test_errors(block: Any, batch: Any, loss: Any, error: Any, message: str) -> None:
    net = block()
    net.initialize(ctx=CPU)
    made = batch(8) if batch is images else batch()
    with pytest.raises(error, match=message):
        train_step(net, loss)(*made)


def test_a_block_that_is_not_initialised_is_named() -> None:
    strategy = Counting([])
    with pytest.raises(ArgumentError, match=r"'net_.*initialize\(\)"):
        train_step(conv_net(), strategy=strategy)(*images(8))
    assert not strategy.asked


def test_a_budget_that_nothing_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.job.LOWEST_SECONDS", 0.5)
    net = conv_net()
    net.initialize(ctx=CPU)
    with pytest.raises(BudgetError, match="lowest"):
        train_step(net, budget="1KiB")(*images(8))


def test_numpy_semantics_are_refused() -> None:
    net = conv_net()
    net.initialize(ctx=CPU)
    batch = images(8)
    mx.npx.set_np()
    try:
        with pytest.raises(ArgumentError, match="reset_np"):
            train_step(net)(*batch)
    finally:
        mx.npx.reset_np()
