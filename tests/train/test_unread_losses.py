"""Loss operators among the outputs of a block whose loss does not read them."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon

from helpers.blocks import CPU
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned


class WithProbabilities(gluon.HybridBlock):
    """Something that a loss reads, and probabilities."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        with self.name_scope():
            self.w = self.params.get("w", shape=(3, 4), init=mx.init.Constant(0.5))

    def hybrid_forward(self, F: Any, y: Any, w: Any) -> Any:  # noqa: N803
        others = [y] if self.operator == "SoftmaxOutput" else []
        return F.exp(F.sin(w * 1)), getattr(F, self.operator)(w, *others)


def _first(outputs: Any, _: Any) -> Any:
    return (outputs[0] * outputs[0]).mean()


def _gradient(operator: str, *, hybridized: bool, **options: Any) -> list[Any]:
    """That of a step, with ``options`` of TrainStep, or of MXNet's own."""
    block = WithProbabilities(operator)
    block.initialize(ctx=CPU)
    block.hybridize(hybridized)
    return _gradient_of(block, **options)


def _gradient_of(block: Any, **options: Any) -> list[Any]:
    x, y = mx.nd.array([0, 1, 2], ctx=CPU), mx.nd.zeros((3,), ctx=CPU)
    if options:
        TrainStep(block, _first, strategy="store_all", **options)(x, y)
    else:
        with autograd.record():
            loss = _first(block(x), y)
        loss.backward()
    (weight,) = block.collect_params().values()
    gradient: list[Any] = weight.grad().asnumpy().tolist()
    return gradient


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("keep_outputs", [False, True])
@pytest.mark.parametrize("operator", ["SoftmaxOutput", "MakeLoss", "softmax"])
def test_a_step_trains_by_them_as_mxnet_does_or_not_at_all(
    operator: str, keep_outputs: bool, hybridized: bool
) -> None:
    if operator != "softmax" and keep_outputs != hybridized:
        with pytest.raises(TraceError, match=f"does not read op .*{operator}"):
            _gradient(operator, hybridized=hybridized, keep_outputs=keep_outputs)
        return
    expected = _gradient(operator, hybridized=hybridized)
    assert _gradient(operator, hybridized=hybridized, keep_outputs=keep_outputs) == expected


def test_hybridizing_the_block_later_is_seen() -> None:
    block = WithProbabilities("SoftmaxOutput")
    block.initialize(ctx=CPU)
    step = TrainStep(block, _first, strategy="store_all")
    x, y = mx.nd.array([0, 1, 2], ctx=CPU), mx.nd.zeros((3,), ctx=CPU)
    step(x, y)
    block.hybridize()
    with pytest.raises(TraceError, match="does not read op"):
        step(x, y)


class Untrained(WithProbabilities):
    """Probabilities by which no parameter is trained."""

    def hybrid_forward(self, F: Any, y: Any, w: Any) -> Any:  # noqa: N803
        return F.exp(F.sin(w * 1)), F.SoftmaxOutput(F.BlockGrad(w * 1), y)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("keep_outputs", [False, True])
def test_one_by_which_nothing_is_trained_may_be_there(keep_outputs: bool, hybridized: bool) -> None:
    gradients = []
    for options in ({}, {"keep_outputs": keep_outputs}):
        block = Untrained("")
        block.initialize(ctx=CPU)
        block.hybridize(hybridized)
        gradients.append(_gradient_of(block, **options))
    assert gradients[0] == gradients[1]


class WithChild(gluon.HybridBlock):
    """A block that is not hybridized, with a child that is."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.child = WithProbabilities("SoftmaxOutput")

    def hybrid_forward(self, F: Any, y: Any) -> Any:  # noqa: N803
        return self.child(y)


def test_within_a_hybridized_child_they_are_kept_or_refused() -> None:
    found = []
    for options in ({}, {"keep_outputs": True}, {"keep_outputs": False}):
        block = WithChild()
        block.initialize(ctx=CPU)
        block.child.hybridize()
        if options.get("keep_outputs", True):
            found.append(_gradient_of(block, **options))
            continue
        with pytest.raises(TraceError, match="does not read op"):
            _gradient_of(block, **options)
    assert found[0] == found[1]


class Dropping(WithChild):
    """A block that drops the probabilities of its child."""

    def hybrid_forward(self, F: Any, y: Any) -> Any:  # noqa: N803
        return self.child(y)[:1]


class TwoOperators(WithProbabilities):
    """A graph that MXNet does not run as one."""

    def hybrid_forward(self, F: Any, y: Any, w: Any) -> Any:  # noqa: N803
        return F.exp(w), F.SoftmaxOutput(w, y)


def _dropping(child: type[WithProbabilities], *, hybridized: bool) -> gluon.HybridBlock:
    block = Dropping()
    with block.name_scope():
        block.child = child("SoftmaxOutput")
    block.initialize(ctx=CPU)
    block.child.hybridize(hybridized)
    return block


def _planned_gradient(block: Any) -> list[Any]:
    planned(block, strategy="store_all")
    return _gradient_of(block)


@pytest.mark.parametrize(
    "step", [_planned_gradient, lambda block: _gradient_of(block, keep_outputs=False)]
)
def test_one_that_a_block_drops_of_a_hybridized_child_is_refused(step: Any) -> None:
    block = _dropping(WithProbabilities, hybridized=True)
    with pytest.raises(TraceError, match="is dropped by what calls the block"):
        step(block)


@pytest.mark.parametrize(
    "step", [_planned_gradient, lambda block: _gradient_of(block, keep_outputs=False)]
)
@pytest.mark.parametrize(
    ("child", "hybridized"),
    [(WithProbabilities, False), (TwoOperators, True), (Untrained, True)],
)
def test_one_that_a_block_drops_and_mxnet_does_not_train_by_may_be_there(
    child: type[WithProbabilities], hybridized: bool, step: Any
) -> None:
    expected = _gradient_of(_dropping(child, hybridized=hybridized))
    assert step(_dropping(child, hybridized=hybridized)) == expected


class ReturningParameter(WithProbabilities):
    """A graph that returns what it got, beside probabilities."""

    def hybrid_forward(self, F: Any, y: Any, w: Any) -> Any:  # noqa: N803
        return w, F.SoftmaxOutput(F.exp(F.sin(w * 1)), y)


class ReturningData(WithProbabilities):
    """A graph that returns what no parameter is behind, beside probabilities."""

    def hybrid_forward(self, F: Any, y: Any, w: Any) -> Any:  # noqa: N803
        return y * 2, F.SoftmaxOutput(F.exp(F.sin(w * 1)), y)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("child", [ReturningParameter, ReturningData])
def test_a_loss_that_reads_what_a_graph_got_trains_by_all_of_the_graph(
    child: type[WithProbabilities], within: bool
) -> None:
    def block() -> gluon.HybridBlock:
        made = WithChild() if within else child("SoftmaxOutput")
        if within:
            with made.name_scope():
                made.child = child("SoftmaxOutput")
        made.initialize(ctx=CPU)
        (made.child if within else made).hybridize()
        return made

    expected = _gradient_of(block())
    assert any(any(row) for row in expected)
    assert _planned_gradient(block()) == expected
    assert _gradient_of(block(), keep_outputs=True) == expected
    with pytest.raises(TraceError, match="does not read op"):
        _gradient_of(block(), keep_outputs=False)
    if within:
        dropping = _dropping(child, hybridized=True)
        with pytest.raises(TraceError, match="is dropped by what calls the block"):
            _planned_gradient(dropping)
