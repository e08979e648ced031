"""Gradients of parameters that the step of now does not read: as MXNet keeps them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.let_go import is_let_go
from helpers.training_runs import differences
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.realise.packed_memory import PackedMemory

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
REALISATIONS = ("packed", "explicit")


class WithExtra(gluon.HybridBlock):
    """Has a layer for an input that only some batches have."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = nn.HybridSequential()
            for _ in range(4):
                self.body.add(nn.Dense(32, activation="tanh"))
            self.extra = nn.Dense(32)
            self.out = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any, extra: Any = None) -> Any:  # noqa: N803
        hidden = self.body(x)
        return self.out(hidden if extra is None else hidden + self.extra(extra))


def clipped(net: Any, trainer: gluon.Trainer, run: Callable[..., Any]) -> None:
    """By the norm of all gradients, those of the steps before with them."""
    run()
    params = net.collect_params().values()
    gluon.utils.clip_global_norm([p.grad() for p in params], 1.0)
    trainer.step(8, ignore_stale_grad=True)


def penalised(net: Any, trainer: gluon.Trainer, run: Callable[..., Any]) -> None:
    """All weights, also those that the step does not read."""
    run(beside=lambda: sum((p.data() ** 2).sum() for p in net.collect_params(".*weight").values()))
    trainer.step(8, ignore_stale_grad=True)


def zeroed(net: Any, trainer: gluon.Trainer, run: Callable[..., Any]) -> None:
    run(between=net.collect_params().zero_grad)
    trainer.step(8, ignore_stale_grad=True)


def together(net: Any, trainer: gluon.Trainer, run: Callable[..., Any]) -> None:
    """One update for a batch with the input and one without, of what either has computed."""
    run()
    if all(p.data()._fresh_grad for p in net.collect_params().values()):
        trainer.step(8)


def trained(
    loop: Callable[..., None], wrap: Callable[[Any], Any], kinds: tuple[bool, ...]
) -> list[dict[str, np.ndarray]]:
    """Gradients and parameters after every batch, of which some have the ``extra`` input."""
    mx.random.seed(3)
    random = np.random.default_rng(5)
    net = WithExtra()
    net.initialize(mx.init.Xavier())
    net(mx.nd.ones((1, 16)), mx.nd.ones((1, 16)))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    model, found = wrap(net), []
    for has_extra in kinds:
        x, extra = (mx.nd.array(random.normal(size=(8, 16))) for _ in range(2))
        y = mx.nd.array(random.integers(0, 10, 8))
        inputs = (x, extra) if has_extra else (x,)

        def run(
            between: Callable[[], Any] = lambda: None,
            beside: Callable[[], Any] = lambda: 0,
            inputs: tuple[Any, ...] = inputs,
            y: Any = y,
        ) -> None:
            with autograd.record():
                loss = LOSS(model(*inputs), y) + beside()
            between()
            loss.backward()

        loop(net, trainer, run)
        weights = {f"weight of {p.name}": p.data().asnumpy() for p in net.collect_params().values()}
        found.append(gradients(net) | weights)
    return found


@pytest.mark.parametrize("realisation", REALISATIONS)
@pytest.mark.parametrize("loop", [clipped, penalised, zeroed, together])
def test_those_of_a_step_that_read_more(loop: Callable[..., None], realisation: str) -> None:
    kinds = (True, False, False, True, False, True)
    stock = trained(loop, lambda net: net, kinds)
    ours = trained(
        loop, lambda net: planned(net, realisation=realisation, strategy="chen_sqrt"), kinds
    )
    assert not differences(stock, ours)


@pytest.mark.parametrize("realisation", REALISATIONS)
def test_those_of_whole_steps(realisation: str) -> None:
    mx.random.seed(3)
    net = WithExtra()
    net.initialize()
    x, y = mx.nd.ones((8, 16)), mx.nd.ones((8,))
    step = TrainStep(net, LOSS, realisation=realisation, strategy="chen_sqrt")
    step((x, x), y)
    before = gradients(net)
    step(x, y)
    after = gradients(net)
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in before if "dense4" not in name}
    assert before["net_dense4_weight"].any()


def test_the_memory_of_a_plan_that_went_is_free() -> None:
    """The gradients that it leaves do not hold the array of the whole step."""
    net = WithExtra()
    net.initialize()
    step = TrainStep(net, LOSS, realisation="packed", budget="90%")
    x, y = mx.nd.ones((384, 16)), mx.nd.ones((384,))
    step((x, x), y)
    (bound,) = step._bound.values()
    (memory,) = bound.executor.memory._segments
    del bound
    step(mx.nd.ones((512, 16)), mx.nd.ones((512,)))  # there is no room for it beside the other
    assert len(step._bound) == 1
    assert is_let_go(lambda: sys.getrefcount(memory) == 2)


@pytest.mark.parametrize("change", ["larger", "frozen"])
@pytest.mark.parametrize("wrap", [planned, TrainStep])
def test_the_memory_is_free_before_there_is_another(
    wrap: Callable[..., Any], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are kept beside it, also where there is no memory for the next step."""
    net = on_two_contexts([mx.cpu()])
    step = wrap(net, realisation="packed", strategy="store_all")

    def run(nrows: int) -> None:
        with autograd.record():
            loss = getattr(step, "forward", step)(mx.nd.ones((nrows, 4))).sum()
        (step if isinstance(step, TrainStep) else autograd).backward(loss)

    segments, are_free = [], []
    init = PackedMemory.__init__

    def noted(memory: PackedMemory, nbytes: int, ctx: mx.Context) -> None:
        if segments and not are_free:
            is_free = is_let_go(lambda: sys.getrefcount(segments[0]) == 2, collects=False)
            are_free.append(is_free)
            raise mx.MXNetError("out of memory")
        init(memory, nbytes, ctx)
        segments.extend(memory._segments)

    monkeypatch.setattr(PackedMemory, "__init__", noted)
    run(384)
    gradient = net[1].weight.grad()
    if change == "frozen":
        net[0].weight.grad_req = "null"
    nrows = 512 if change == "larger" else 384
    before = gradients(net)
    assert before["net_dense1_weight"].any()
    with pytest.raises(mx.MXNetError, match="out of memory"):
        run(nrows)
    assert are_free == [True]
    assert not differences([before], [gradients(net)])
    run(nrows)
    assert gradient is net[1].weight.grad()
    assert bool(differences([before], [gradients(net)])) == (change == "larger")


def test_a_penalty_recorded_before_would_write_into_the_step() -> None:
    net = WithExtra()
    net.initialize()
    net(mx.nd.ones((1, 16)), mx.nd.ones((1, 16)))
    planned(net, realisation="packed", strategy="chen_sqrt")
    x = mx.nd.ones((8, 16))
    with autograd.record():
        loss = net(x, x).sum()
    loss.backward()
    with autograd.record():
        penalty = (net.extra.weight.data() ** 2).sum()
        loss = net(x).sum() + penalty
    with pytest.raises(UsageError, match="before the block was called"):
        loss.backward()


@pytest.mark.parametrize("realisation", REALISATIONS)
@pytest.mark.parametrize("sizes", [(8, 6, 4), (4, 6, 8), (8, 6, 6), (8, 6, 8)])
def test_a_penalty_of_several_steps_before(sizes: tuple[int, ...], realisation: str) -> None:
    """Whatever the shapes of the steps since: that memory is another's now."""
    net = WithExtra()
    net.initialize()
    net(mx.nd.ones((1, 16)), mx.nd.ones((1, 16)))
    planned(net, realisation=realisation, strategy="chen_sqrt")
    *first, last = sizes
    for place, size in enumerate(first):
        with autograd.record():
            loss = net(mx.nd.ones((size, 16))).sum()
        loss.backward()
        if place == 0:
            with autograd.record():
                penalty = (net.out.weight.data() ** 2).sum()
    with autograd.record():
        loss = net(mx.nd.ones((last, 16))).sum() + penalty
    with pytest.raises(UsageError, match="before the block was called"):
        loss.backward()


def on_two_contexts(contexts: list[mx.Context]) -> nn.HybridSequential:
    mx.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, activation="tanh", in_units=4), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    return net


@pytest.mark.parametrize("wrap", [planned, TrainStep])
def test_parameters_that_leave_a_context(wrap: Callable[..., Any]) -> None:
    """The array of a context stands in another place then."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    found = []
    for is_planned in (False, True):
        net = on_two_contexts(contexts)
        step = wrap(net, strategy="chen_sqrt") if is_planned else net
        for used in (contexts, contexts[1:]):
            net.collect_params().reset_ctx(used)
            for ctx in used:
                x = mx.nd.ones((2, 4), ctx)
                with autograd.record():
                    loss = (getattr(step, "forward", step)(x) ** 2).sum()
                (step if isinstance(step, TrainStep) else autograd).backward(loss)
        found.append([gradients(net)])
    assert not differences(*found)


def test_parameters_that_leave_a_context_before_backward() -> None:
    """MXNet computes gradients into the arrays that they had, and the parameters have zeros."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = on_two_contexts(contexts)
    planned(net, strategy="chen_sqrt")
    with autograd.record():
        losses = [net(mx.nd.ones((2, 4), ctx)).sum() for ctx in contexts]
    net.collect_params().reset_ctx(contexts[1:])
    autograd.backward(losses)
    assert not any(gradient.any() for gradient in gradients(net).values())
