"""What one TrainStep leaves, and what it notices: gradients, arrays, changed parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.block_runs import assert_equal, autograd_gradients, gradients, train_step, trained
from helpers.blocks import CPU, SOFTMAX, accumulate, images

REALISATIONS = pytest.mark.parametrize("realisation", ["explicit", "packed"])


@REALISATIONS
def test_shapes_are_planned_once_and_share_memory(realisation: str) -> None:
    net, step, large = trained(realisation=realisation)
    trained_parameters = [p for p in net.collect_params().values() if p.grad_req != "null"]
    # Views of the memory: the arrays themselves stay the gradients.
    before = [p.grad().reshape(-1) for p in trained_parameters]
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


@REALISATIONS
def test_the_loss_and_outputs_are_the_callers(realisation: str) -> None:
    """The next step does not write into them; the kept outputs change no gradient."""
    net, step, (x, y) = trained(keep_outputs=True, realisation=realisation)
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


@REALISATIONS
def test_scale_multiplies_the_gradients(realisation: str) -> None:
    net, step, (x, y) = trained(realisation=realisation)
    loss, once = step(x, y), gradients(net)
    scaled, twice = step(x, y, scale=2.0), gradients(net)
    assert np.array_equal(loss.asnumpy(), scaled.asnumpy())
    assert_equal({name: 2 * grad for name, grad in once.items()}, twice)
    step(x, y)
    assert_equal(once, gradients(net))


def test_a_scale_may_be_an_array_that_the_script_changes() -> None:
    net, step, (x, y) = trained(realisation="packed")
    step(x, y)
    once = gradients(net)
    for scale in (mx.nd.array([1.0]), np.array(1.0), np.float32(1.0)):
        for times in (1, 2):
            step(x, y, scale=scale)
            assert_equal({name: times * grad for name, grad in once.items()}, gradients(net))
            scale *= 2


@REALISATIONS
def test_gradients_are_added_where_they_are_to_be(realisation: str) -> None:
    net, step, batch = trained(realisation=realisation)
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


@REALISATIONS
def test_arrays_that_are_no_longer_used_are_given_up(realisation: str) -> None:
    net, step, batch = trained(realisation=realisation)
    step(*images(8, batch=2))
    assert len(step._bound) == 2
    reset_values(net)
    step(*batch)
    assert len(step._bound) == 1


@REALISATIONS
def test_a_cast_after_training_is_noticed(realisation: str) -> None:
    net, step, (x, y) = trained(realisation=realisation)
    net.cast("float64")
    batch = (x.astype("float64"), y)
    step(*batch)
    assert gradients(net)["net_conv0_weight"].dtype == np.float64
    assert_equal(autograd_gradients(net, batch), gradients(net))


@REALISATIONS
def test_autograd_still_works_beside_it(realisation: str) -> None:
    net, _, batch = trained(realisation=realisation)
    expected = autograd_gradients(net, batch)
    for parameter in net.collect_params().values():
        parameter.zero_grad()
    with autograd.record():
        loss = SOFTMAX(net(batch[0]), batch[1])
    loss.backward()
    assert any(grad.any() for grad in expected.values())
    for name, grad in gradients(net).items():  # not hybridized: equal but for rounding
        np.testing.assert_allclose(grad, expected[name], rtol=1e-3, atol=1e-5)


@REALISATIONS
@pytest.mark.parametrize("place", [mx.Context("cpu_shared", 0), mx.cpu_pinned(0)])
def test_batches_as_a_data_loader_hands_them_over(realisation: str, place: mx.Context) -> None:
    """Shared between processes, or pinned: they are copied, as MXNet's operators take them."""
    net, step, (x, y) = trained(realisation=realisation)
    losses = [step(*batch) for batch in ((x, y), [array.as_in_context(place) for array in (x, y)])]
    assert np.array_equal(*(loss.asnumpy() for loss in losses))
    assert losses[1].ctx == CPU
    assert_equal(autograd_gradients(net, (x, y)), gradients(net))
    assert len(step.plans) == 1


def test_a_loss_of_two_labels() -> None:
    """They arrive as one argument."""
    net, _, (x, y) = trained()
    pair = [y, mx.nd.ones_like(y) * 2]

    def loss(scores: Any, one: Any, other: Any) -> Any:
        return SOFTMAX(scores, one) * other

    step = train_step(net, lambda scores, labels: loss(scores, *labels))
    with autograd.pause(train_mode=True):
        expected = SOFTMAX(net(x), y) * 2
    assert np.array_equal(step(x, pair).asnumpy(), expected.asnumpy())


@REALISATIONS
def test_two_steps_may_share_a_block(realisation: str) -> None:
    net, step, (x, y) = trained(realisation=realisation)
    other = train_step(net, gluon.loss.SoftmaxCrossEntropyLoss(weight=3.0), realisation=realisation)
    step(x, y)
    once = gradients(net)
    other(x, y)
    assert not np.array_equal(gradients(net)["net_conv0_weight"], once["net_conv0_weight"])
    step(x, y)
    assert_equal(once, gradients(net))


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
