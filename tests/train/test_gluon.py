"""Gluon blocks trained by a plan: bit for bit as by autograd and Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import (
    assert_equal,
    assert_identical_to_autograd,
    autograd_gradients,
    by_autograd,
    by_plan,
    gradients,
    leaves,
    train,
    train_step,
    trained,
)
from helpers.blocks import (
    CASES,
    CPU,
    QUICK,
    SOFTMAX,
    Case,
    Siamese,
    conv_net,
    images,
    pairs,
    two_losses,
)
from helpers.strategies import Counting
from helpers.training_runs import Values, differences


def normal(*shape: int) -> Any:
    return mx.nd.random.normal(shape=shape, ctx=CPU)


@pytest.mark.parametrize("name", CASES)
def test_identical_to_autograd(name: str) -> None:
    assert_identical_to_autograd(CASES[name], by_plan)


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


@pytest.mark.long
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


def test_plan_before_the_first_batch() -> None:
    net = conv_net()
    step = train_step(net, budget=0.8, **QUICK)
    made = step.plan((16, 3, 16, 16), (16,))
    assert made.realisation == "packed"
    assert made.schedule.recomputed
    assert made.total_nbytes <= 0.8 * made.unplanned.total_nbytes
    net.initialize(ctx=CPU)
    batch = images(16, batch=16)
    step(*batch)
    assert step.plans == {((16, 3, 16, 16), (16,)): made}
    assert_equal(autograd_gradients(net, batch), gradients(net))


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


class Doubled(gluon.SymbolBlock):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def test_a_block_of_a_graph_may_have_a_forward_of_the_script_s() -> None:
    data = mx.sym.Variable("data")
    net = Doubled(mx.sym.FullyConnected(data, num_hidden=2, name="layer"), data)
    net.initialize()
    x, y = normal(4, 3), mx.nd.arange(4) % 2
    with autograd.record():
        loss = SOFTMAX(net(x), y)
    loss.backward()
    expected = gradients(net)
    train_step(net)(x, y)
    assert_equal(expected, gradients(net))


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_graph_may_say_the_shapes_of_its_variables(is_inner: bool, hybridized: bool) -> None:
    """Of parameters that MXNet cannot infer them of, before the block was called."""

    x, y, found = normal(4, 3), mx.nd.arange(4) % 2, []
    for is_planned in (False, True):
        data, scale = mx.sym.Variable("data"), mx.sym.Variable("scale", shape=(1, 3))
        net: Any = gluon.SymbolBlock(mx.sym.broadcast_mul(data, scale), data)
        if is_inner:
            inner, net = net, nn.HybridSequential()
            net.add(inner, nn.Dense(2, prefix="outer_"))
        net.initialize(mx.init.Xavier())
        if hybridized:
            net.hybridize()
        mx.random.seed(3)
        if is_planned:
            train_step(net)(x, y)
        else:
            with autograd.record():
                loss = SOFTMAX(net(x), y)
            loss.backward()
        found.append(gradients(net))
    assert_equal(*found)


def test_an_imported_parameter_keeps_the_shape_that_it_was_saved_with(tmp_path: Path) -> None:
    """MXNet infers a slope for every channel where it is not told that all share one."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.PReLU(), nn.Dense(2))
    net.initialize()
    net.hybridize()
    x, y = normal(2, 3, 6, 6), mx.nd.arange(2)
    net(x)
    net.export(str(tmp_path / "net"))
    files = (str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    expected, imported = gluon.SymbolBlock.imports(*files), gluon.SymbolBlock.imports(*files)
    with autograd.record():
        loss = SOFTMAX(expected(x), y)
    loss.backward()
    train_step(imported)(x, y)
    assert_equal(gradients(expected), gradients(imported))


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


def test_a_seed_initialises_what_it_does_in_a_hybridized_block() -> None:
    """Whichever of the block's outputs the loss reads first."""

    def last_first(outputs: Any, labels: Any) -> Any:
        return two_losses(outputs, labels)[::-1]

    blocks = []
    for ending in (lambda net, x, y: net(*x), lambda net, x, y: train_step(net, last_first)(x, y)):
        net, batch = Siamese(), pairs()
        net.initialize(mx.init.Xavier(), ctx=CPU)
        net.hybridize()
        mx.random.seed(3)
        ending(net, *batch)
        blocks.append(net.collect_params())
    for one, other in zip(*(params.values() for params in blocks), strict=True):
        assert np.array_equal(one.data().asnumpy(), other.data().asnumpy()), one.name
