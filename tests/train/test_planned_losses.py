"""Planned blocks whose outputs are losses, or have losses within."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.contrib import autograd as old_autograd

from helpers.block_runs import gradients
from helpers.blocks import CPU, conv_net, images
from helpers.training_runs import differences
from memplan.errors import UsageError
from memplan.mxnet.gluon import planned


def called(net: gluon.HybridBlock) -> tuple[gluon.HybridBlock, Any, Any]:
    """``net``, initialised, with the pictures and labels that it was called with once."""
    mx.random.seed(3)
    x, y = images(8)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net(x, y)
    return net, x, y


class WithLosses(gluon.HybridBlock):
    """A network as Module has them: its outputs are loss operators, and the scores."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.body = conv_net()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        scores = self.body(x)
        return F.SoftmaxOutput(scores, y), F.MakeLoss(F.square(scores)), F.BlockGrad(scores)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("heads", [[0], [1], [0, 1]])
def test_outputs_may_be_losses(heads: list[int], realisation: str) -> None:
    """They need no gradients of their own, whichever of them is differentiated."""
    results = []
    for plan in (False, True):
        net, x, y = called(WithLosses())
        net.hybridize()
        if plan:
            planned(net, strategy="chen_sqrt", realisation=realisation)
        with autograd.record():
            outputs = net(x, y)
        autograd.backward([outputs[place] for place in heads])
        results.append({str(i): g for i, g in enumerate(gradients(net).values())})
    assert not differences(results[:1], results[1:])


@pytest.mark.parametrize("heads", [[0], [0, 1], [0, 1, 2], [2]])
def test_losses_that_are_not_differentiated(heads: list[int]) -> None:
    """Not hybridized: MXNet computes the gradients of what it comes by, and a step of them all."""
    results = []
    for plan in (False, True):
        net, x, y = called(WithLosses())
        if plan:
            planned(net, strategy="chen_sqrt", realisation="packed")
        with autograd.record():
            outputs = net(x, y)
        if plan and not {0, 1}.issubset(heads):
            with pytest.raises(
                UsageError, match=r"does not read op .*, whose gradient may need none"
            ):
                autograd.backward([outputs[place] for place in heads])
            return
        autograd.backward([outputs[place] for place in heads])
        results.append({str(i): g for i, g in enumerate(gradients(net).values())})
    assert not differences(results[:1], results[1:])


class OfChild(gluon.HybridBlock):
    """Its outputs are those of a child, which MXNet runs as a graph."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.child = WithLosses()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return self.child(x, y)


def test_losses_of_a_graph_are_differentiated_together() -> None:
    results = []
    for plan in (False, True):
        net, x, y = called(OfChild())
        net.child.hybridize()
        if plan:
            planned(net, strategy="chen_sqrt", realisation="packed")
        with autograd.record():
            outputs = net(x, y)
        outputs[1].backward()
        results.append({str(i): g for i, g in enumerate(gradients(net).values())})
    assert not differences(results[:1], results[1:])


class WithinLosses(WithLosses):
    """One whose loss operators are not its outputs, which have no gradients that anything needs."""

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        scores, loss, _ = super().hybrid_forward(F, x, y)
        return F.sum(scores) * 2, F.mean(loss)


@pytest.mark.parametrize("head", [0, 1])
def test_losses_may_be_within(head: int) -> None:
    results = []
    for plan in (False, True):
        net, x, y = called(WithinLosses())
        net.hybridize()
        if plan:
            planned(net, strategy="chen_sqrt", realisation="packed")
        with autograd.record():
            outputs = net(x, y)
        outputs[head].backward()
        results.append({str(i): g for i, g in enumerate(gradients(net).values())})
    assert not differences(results[:1], results[1:])


@pytest.mark.parametrize("named", [False, True])
def test_the_autograd_of_scripts_for_older_versions(named: bool) -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(3)
        net, (x, _) = conv_net(), images(8)
        net.initialize(mx.init.Xavier(), ctx=CPU)
        net(x)
        if plan:
            planned(net, strategy="chen_sqrt")
        with old_autograd.train_section():
            loss = (net(x) ** 2).sum()
        if named:
            old_autograd.backward(outputs=[loss], out_grads=[mx.nd.array([2], ctx=CPU)])
        else:
            old_autograd.compute_gradient([loss])
        results.append({str(i): g for i, g in enumerate(gradients(net).values())})
    assert not differences(results[:1], results[1:])


class Beside(gluon.HybridBlock):
    """What a loss reads, and what it does not read, of a layer of its own."""

    def __init__(self, beside: Callable[..., Any]) -> None:
        super().__init__()
        self.beside = beside
        with self.name_scope():
            self.body, self.head = conv_net(), gluon.nn.Dense(4)

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        scores = self.body(x)
        return F.square(scores), self.beside(F, self.head(scores), y)


@pytest.mark.parametrize(
    "beside",
    [
        lambda op, scores, y: op.argmax(scores, axis=1),
        lambda op, scores, y: op.BlockGrad(scores),
        lambda op, scores, y: op.zeros_like(scores),
        lambda op, scores, y: scores > 0,
    ],
    ids=["places", "no gradient", "zeros", "comparison"],
)
def test_outputs_without_a_gradient_need_not_be_differentiated(beside: Any) -> None:
    results = []
    for plan in (False, True):
        net, x, y = called(Beside(beside))
        if plan:
            planned(net, strategy="chen_sqrt")
        with autograd.record():
            outputs = net(x, y)
        outputs[0].backward()
        found = gradients(net).values()
        results.append({str(i): g for i, g in enumerate(found)})
    assert not differences(results[:1], results[1:])


def test_a_hybridized_child_that_no_loss_reads_is_no_reason_to_train_by_it() -> None:
    class Child(gluon.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.layer = gluon.nn.Dense(4)

        def hybrid_forward(self, F: Any, scores: Any, y: Any) -> Any:  # noqa: N803
            return F.SoftmaxOutput(F.sin(self.layer(scores)) * 2, y)

    net, (x, y) = Beside(lambda *_: None), images(8)
    with net.name_scope():
        net.child = Child()
    net.beside = lambda op, scores, y: net.child(scores, y)
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net(x, y)
    net.child.hybridize()
    planned(net, strategy="store_all")
    with autograd.record():
        outputs = net(x, y)
    with pytest.raises(UsageError, match="does not read op"):
        outputs[0].backward()
