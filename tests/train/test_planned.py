"""A planned block in the loop that its user has: bit for bit as without the plan."""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import by_autograd, gradients, train
from helpers.blocks import CASES, CPU, SOFTMAX, conv_net, dropout_net, images
from helpers.halves import by_planned
from helpers.training_runs import differences
from memplan.errors import ArgumentError, TraceError, UsageError
from memplan.mxnet.gluon import planned
from memplan.mxnet.train.first_half import FirstHalf

QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.loss is not None])
def test_identical_to_the_same_loop(name: str) -> None:
    realisation = "packed" if len(CASES[name].contexts) == 1 else "explicit"
    case = dataclasses.replace(CASES[name], options={"realisation": realisation})
    assert not differences(train(case, by_autograd(case)), train(case, by_planned(case)))


def started() -> tuple[Any, Any]:
    mx.random.seed(3)
    net = conv_net()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    batch = images(8)
    net(batch[0])
    return planned(net, **QUICKLY), batch


def test_the_rest_of_the_block_is_as_before() -> None:
    """Inference, names, children, saving: only training is planned."""
    net, (x, _) = started()
    other = conv_net()
    other.initialize(ctx=CPU)
    other(x)
    for name, parameter in net.collect_params().items():
        other.collect_params()[name].set_data(parameter.data())
    assert isinstance(net, nn.HybridSequential)
    assert list(net.collect_params()) == list(other.collect_params())
    assert list(net._collect_params_with_prefix()) == list(other._collect_params_with_prefix())
    with autograd.record(train_mode=False):
        shown = net(x)
    assert np.array_equal(shown.asnumpy(), other(x).asnumpy())
    assert not net.planned_step.plans


@pytest.mark.parametrize(
    ("fails_late", "error", "message"),
    [(False, TraceError, "nobody knows"), (True, ArgumentError, "'nobody', no parameter")],
)
def test_a_block_that_has_no_graph(fails_late: bool, error: Any, message: str) -> None:
    """The step says why, and the block is left as it was."""

    class Fails(nn.HybridSequential):
        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            # MXNet refuses a graph with a variable of which it knows nothing, once it is there.
            assert fails_late, "nobody knows"
            return super().hybrid_forward(F, x) + F.var("nobody")

    net = Fails()
    net.add(nn.Dense(3))
    net.initialize()
    net.hybridize()
    planned(net, strategy="chen_sqrt")
    with autograd.record(), pytest.raises(error, match=message):
        net(mx.nd.ones((2, 4)))
    assert not net._cached_graph


def test_a_block_that_is_no_child_is_to_be_registered() -> None:
    class Grows(nn.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.grown = nn.Dense(4, in_units=4), {"last": nn.Dense(2, in_units=4)}

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            return self.grown["last"](self.first(x))

    net = planned(Grows(), **QUICKLY)
    net.initialize()
    net.grown["last"].initialize()
    with autograd.record(), pytest.raises(ArgumentError, match=r"register_child\(\)") as caught:
        net(mx.nd.ones((2, 4)))
    assert "loss" not in str(caught.value)


def test_a_hybridized_block_can_be_exported_after_training(tmp_path: Path) -> None:
    """As without a plan: a call of the block in training is enough."""
    net, (x, y) = started()
    net.hybridize()
    for _ in range(2):
        with autograd.record():
            loss = SOFTMAX(net(x), y)
        loss.backward()
    assert len(net.planned_step.plans) == 1
    net.export(str(tmp_path / "net"))
    files = (str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    assert np.array_equal(gluon.SymbolBlock.imports(*files)(x).asnumpy(), net(x).asnumpy())


class Implementation(abc.ABC, nn.Dense):
    """Python lays out its objects as those of no other HybridBlock."""


def test_the_class_of_a_block_may_have_other_bases() -> None:
    results = []
    for plan in (False, True):
        net = Implementation(4, in_units=3, prefix="net_")
        net.initialize(mx.init.One())
        if plan:
            assert isinstance(planned(net, **QUICKLY), Implementation)
        with autograd.record():
            loss = net(mx.nd.ones((2, 3)))
        loss.backward()
        results.append(gradients(net))
    assert not differences(results[:1], results[1:])


def test_hooks_see_arrays_only() -> None:
    net, (x, _) = started()
    seen: list[Any] = []
    net.register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].asnumpy().tolist()))
    net.register_forward_hook(lambda block, _, outputs: seen.append(outputs.asnumpy().tolist()))
    with autograd.record():
        outputs = net(x)
    assert seen == [x.asnumpy().tolist(), outputs.asnumpy().tolist()]
    assert net.planned_step.plans


@pytest.mark.parametrize("block", [conv_net, dropout_net])
def test_a_step_may_be_left_out(block: Any) -> None:
    """Autograd keeps nothing of it, not of ops with a state either."""
    results = []
    for plan in (False, True):
        mx.random.seed(3)
        net, (x, y) = block(), images(8)
        net.initialize(mx.init.Xavier(), ctx=CPU)
        net(x)
        net.hybridize()
        if plan:
            planned(net, **QUICKLY)
        for _ in range(2):
            with autograd.record():
                net(x * 2)  # of which no loss is wanted
        with autograd.record():
            loss = SOFTMAX(net(x), y)
        loss.backward()
        results.append(gradients(net))
    assert not differences(results[:1], results[1:])


def test_a_gradient_attached_to_an_output_ends_there() -> None:
    """As in MXNet, for Grad-CAM say: the block is no part of what is differentiated."""
    net, (x, _) = started()
    before = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
    with autograd.record():
        outputs = net(x)
        outputs.attach_grad()
        loss = (outputs**2).sum()
    loss.backward()
    assert np.array_equal(outputs.grad.asnumpy(), 2 * outputs.asnumpy())
    assert not any(p.data()._fresh_grad for p in net.collect_params().values())
    mx.nd.waitall()
    after = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
    assert not differences([before], [after])


def test_an_output_may_be_sparse() -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(3)
        net = nn.HybridSequential()
        net.add(nn.Dense(4), nn.HybridLambda(lambda f, x: f.cast_storage(x, "row_sparse")))
        net.initialize()
        net.hybridize()
        net(mx.nd.ones((2, 3)))
        if plan:
            planned(net, strategy="chen_sqrt", realisation="explicit")
        with autograd.record():
            outputs = net(mx.nd.ones((2, 3)))
            loss = (outputs.tostype("default") ** 2).sum()
        loss.backward()
        assert outputs.stype == "row_sparse"
        results.append({str(i): g for i, g in enumerate(gradients(net).values())})
    assert not differences(results[:1], results[1:])


def test_other_networks_are_let_alone() -> None:
    net, (x, y) = started()
    other = nn.Dense(10, in_units=192)
    other.initialize(ctx=CPU)
    with autograd.record():
        loss = SOFTMAX(net(x), y)
    with autograd.record():
        another = other(mx.nd.ones((4, 192))).sum()
    another.backward()
    assert len(net.planned_step.unfinished) == 1
    loss.backward()
    assert not net.planned_step.unfinished


def test_two_calls_in_one_graph_are_an_error() -> None:
    net, (x, y) = started()
    with autograd.record():
        loss = SOFTMAX(net(x), y) + SOFTMAX(net(x * 2), y)
    with pytest.raises(UsageError, match="an earlier call"):
        loss.backward()


def test_block_grad_of_an_earlier_output_goes_through_it_and_detach_does_not() -> None:
    net, (x, y) = started()
    with autograd.record():
        earlier = net(x)
        later = SOFTMAX(net(x * 2), y)
        blocked = later + mx.nd.BlockGrad(earlier).sum()
        detached = later + earlier.detach().sum()
    with pytest.raises(UsageError, match=r"F\.BlockGrad of .* counts as .* detach\(\) does not"):
        blocked.backward(retain_graph=True)
    detached.backward()


def test_two_backwards_through_one_call_are_an_error() -> None:
    net, (x, y) = started()
    with autograd.record():
        outputs = net(x)
        one, two = SOFTMAX(outputs, y), (outputs**2).sum()
    one.backward(retain_graph=True)
    with pytest.raises(UsageError, match="second time"):
        autograd.backward([two])


def test_an_earlier_call_is_not_forgotten_when_a_later_one_is_finished() -> None:
    net, _ = started()
    batches = [images(8)[0] for _ in range(3)]
    with autograd.record():
        losses = [(net(x) ** 2).sum() for x in batches]
    losses[2].backward()
    for loss in losses[:2]:
        with pytest.raises(UsageError, match="an earlier call"):
            loss.backward()


def test_a_backward_that_is_refused_writes_no_gradient_of_others() -> None:
    """And the later call can still be finished."""
    net, _ = started()
    factor = mx.nd.ones((1,), ctx=CPU)
    factor.attach_grad()
    with autograd.record():
        loss, later = ((net(images(8)[0]) * factor).sum() for _ in range(2))
        both = loss + later
    with pytest.raises(UsageError, match="an earlier call"):
        both.backward()
    assert factor.grad.asscalar() == 0
    later.backward()
    assert factor.grad.asscalar() != 0


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    """The second loss reads what autograd has let go of after the first."""
    net, (x, _) = started()
    factor = mx.nd.ones((1,))
    factor.attach_grad()
    with autograd.record():
        twice = factor * 2
        loss, other = (net(x) * twice).sum(), twice.sum()
    other.backward()
    with pytest.raises(mx.MXNetError):
        loss.backward()
    assert not net.planned_step.unfinished
    another = mx.nd.ones((2,))
    another.attach_grad()
    with autograd.record():
        loss = (another * 3).sum()
    loss.backward()
    assert another.grad.asnumpy().tolist() == [3, 3]


def test_the_step_after_an_interrupted_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook goes on after Ctrl-C, wherever that came."""
    results = []
    for interrupt in (False, True):
        net, (x, y) = started()
        if interrupt:
            with autograd.record():
                loss = SOFTMAX(net(x), y)
            with monkeypatch.context() as patch:
                patch.setattr(FirstHalf, "finish", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    loss.backward()
        with autograd.record():
            loss = SOFTMAX(net(x), y)
        loss.backward()
        results.append(gradients(net))
    assert not differences(results[:1], results[1:])


def interrupted(half: FirstHalf, **_: Any) -> None:
    raise KeyboardInterrupt


def test_autograd_s_grad_of_a_parameter_is_an_error() -> None:
    """Where the loss reads the parameter, too, it would be a part of the gradient."""
    net, (x, y) = started()
    weight = next(iter(net.collect_params(".*weight").values())).data(CPU)
    with autograd.record():
        loss = SOFTMAX(net(x), y).mean() + (weight**2).sum()
    with pytest.raises(UsageError, match=r"does not reach parameter .*weight.*backward\(\)"):
        autograd.grad(loss, [weight])
    loss.backward()
    with autograd.record():
        penalty = (weight**2).sum()
    [gradient] = autograd.grad(penalty, [weight])
    assert np.array_equal(gradient.asnumpy(), 2 * weight.asnumpy())


def test_inputs_that_want_gradients_are_an_error() -> None:
    net, (x, _) = started()
    before = nn.Conv2D(3, 3, padding=1, in_channels=3)
    before.initialize(ctx=CPU)
    with autograd.record(), pytest.raises(ArgumentError, match=r"detach\(\) it"):
        net(before(x))


@pytest.mark.parametrize("is_numpy", [False, True], ids=["sparse gradients", "mx.np"])
def test_other_arrays(is_numpy: bool) -> None:
    """A row_sparse gradient, which explicit plans train, and NumPy semantics."""
    results = []
    if is_numpy:
        mx.npx.set_np()
    try:
        for options in (None, QUICKLY if is_numpy else QUICKLY | {"realisation": "explicit"}):
            mx.random.seed(3)
            net = nn.HybridSequential(prefix="net_")
            with net.name_scope():
                net.add(nn.Embedding(20, 8, sparse_grad=not is_numpy), nn.Dense(16))
                net.add(nn.Dropout(0.3), nn.Dense(10))
            net.initialize(mx.init.Xavier(), ctx=CPU)
            words = (mx.np if is_numpy else mx.nd).ones((4, 3))
            net(words)
            net.hybridize()
            if options is not None:
                planned(net, **options)
            for _ in range(2):
                with autograd.record():
                    outputs = net(words)
                    loss = (outputs * outputs).sum()
                loss.backward()
            results.append({"outputs": outputs.asnumpy(), **gradients(net)})
    finally:
        mx.npx.reset_np()
    assert not differences(results[:1], results[1:])


def test_a_part_of_a_network_may_be_planned() -> None:
    """A backbone, which may be frozen for a while; what comes after it is MXNet's."""
    results = []
    for options in (None, QUICKLY):
        mx.random.seed(3)
        backbone, head = conv_net(), nn.Dense(3, in_units=10, prefix="head_")
        for block in (backbone, head):
            block.initialize(mx.init.Xavier(), ctx=CPU)
            block.hybridize()
        if options is not None:
            planned(backbone, **options)
        x, _ = images(8)
        for request in ("null", "write", "write", "null", "write"):
            backbone.collect_params().setattr("grad_req", request)
            with autograd.record():
                loss = (head(backbone(x)) ** 2).mean()
            loss.backward()
        results.append({**gradients(backbone), **gradients(head)})
    assert not differences(results[:1], results[1:])


def test_gluons_estimator_trains_it() -> None:
    from mxnet.gluon.contrib.estimator import Estimator

    net, (x, y) = started()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    before = net[0].weight.data().asnumpy()
    made = Estimator(net, SOFTMAX, train_metrics=mx.metric.Accuracy(), trainer=trainer, context=CPU)
    made.fit(gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), 4), epochs=1)
    assert net.planned_step.plans
    assert not np.array_equal(before, net[0].weight.data().asnumpy())
