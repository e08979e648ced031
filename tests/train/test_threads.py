"""Threads that train by plans, as GluonNLP's and GluonCV's parallel.py have them."""

from __future__ import annotations

import _thread
import queue
import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.amounts import long_except
from helpers.block_runs import gradients, train_step
from helpers.blocks import CPU, SOFTMAX, conv_net, images
from helpers.other_threads import amid_weak_dictionaries
from helpers.training_runs import differences
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.planned_calls import with_second_halves
from memplan.mxnet.train.taking_turns import is_mxnets_thread

TWO = [mx.cpu(0), mx.cpu(1)]
STEPS = 4
# How often a thread lets others go on before it does: so they do, if nothing holds them.
YIELDS = 2000


def net_on(contexts: Sequence[mx.Context], *, adds: bool = False) -> Any:
    mx.random.seed(3)
    net = conv_net()
    net.initialize(mx.init.Xavier(), ctx=list(contexts))
    for ctx in contexts:
        net(images(8)[0].as_in_context(ctx))
    net.hybridize()
    for parameter in net.collect_params().values() if adds else ():
        if parameter.grad_req != "null":
            parameter.grad_req = "add"
    return net


def in_threads(function: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
    """What ``function`` returns for each of ``parts``, in a thread of its own."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(function, parts))


def in_bare_threads(function: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
    """One after the other in threads of which Python's ``threading`` does not know."""
    found: queue.Queue[Any] = queue.Queue()

    def work(part: Any) -> None:
        try:
            found.put(function(part))
        except BaseException as error:  # the test waits
            found.put(error)

    return [_thread.start_new_thread(work, (part,)) and found.get() for part in parts]


def one_by_one(function: Callable[..., Any], parts: Sequence[Any]) -> list[Any]:
    return list(map(function, parts))


def trained(net: Any, contexts: Sequence[mx.Context], work: Callable[..., Any]) -> list[Any]:
    """Losses and weights of some steps, of which ``work`` does a batch for each of ``contexts``."""
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    mx.random.seed(11)
    result = []
    for _ in range(STEPS):
        batches = [[a.as_in_context(ctx) for a in images(8)] for ctx in contexts]
        losses = [loss.asnumpy() for loss in work(net, batches)]
        trainer.step(8 * len(batches))
        net.collect_params().zero_grad()
        weights = {name: p.data(contexts[0]).asnumpy() for name, p in net.collect_params().items()}
        result.append({**weights, "loss": sum(losses) if contexts[0] == contexts[1] else losses[0]})
    return result


def loops(each: Callable[..., list[Any]]) -> dict[str, Callable[..., Any]]:
    def loss_of(net: Any, batch: Any) -> Any:
        with autograd.record():
            return SOFTMAX(net(batch[0]), batch[1])

    def both(net: Any, batch: Any) -> Any:
        loss = loss_of(net, batch)
        loss.backward()
        return loss

    def forward_only(net: Any, batches: Any) -> Any:
        losses = each(lambda batch: loss_of(net, batch), batches)
        autograd.backward(losses)
        return losses

    def apart(net: Any, batches: Any) -> Any:
        losses = each(lambda batch: loss_of(net, batch), batches)
        each(lambda loss: loss.backward(), losses)
        return losses

    return {
        "both": lambda net, batches: each(lambda batch: both(net, batch), batches),
        "forward": forward_only,
        "apart": apart,
    }


@pytest.mark.parametrize("name", loops(one_by_one))
def test_a_thread_for_each_context(name: str) -> None:
    expected = trained(net_on(TWO), TWO, loops(one_by_one)[name])
    net = planned(net_on(TWO), strategy="chen_sqrt", realisation="explicit")
    assert not differences(expected, trained(net, TWO, loops(in_threads)[name]))
    assert not net.planned_step.unfinished


def test_a_thread_that_another_library_has_started() -> None:
    """It is none of MXNet's, which Python's ``threading`` has not started either."""
    here = [CPU, CPU]
    expected = trained(net_on([CPU], adds=True), here, loops(one_by_one)["both"])
    net = planned(net_on([CPU], adds=True), strategy="chen_sqrt", realisation="packed")
    assert not differences(expected, trained(net, here, loops(in_bare_threads)["both"]))


def test_a_thread_that_begins_in_a_wrapped_function_is_none_of_mxnets() -> None:
    """Its first frame is in MXNet's module, as those are in which MXNet enters Python."""
    module, seen = types.ModuleType("mxnet.autograd"), queue.Queue[bool]()
    exec("def backward(): pass", vars(module))
    wrap(module, "backward", lambda _: lambda: seen.put(is_mxnets_thread()))
    _thread.start_new_thread(module.backward, ())
    assert not seen.get()


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_whole_steps_in_threads(realisation: str) -> None:
    """On one context: their gradients are added up."""
    here = [CPU, CPU]
    expected = trained(net_on([CPU], adds=True), here, loops(one_by_one)["both"])
    net = net_on([CPU], adds=True)
    step = train_step(net, SOFTMAX, realisation=realisation)

    def work(net: Any, batches: Any) -> Any:
        return in_threads(lambda batch: step(*batch), batches)

    assert not differences(expected, trained(net, here, work))


def test_a_step_is_finished_by_the_thread_that_differentiates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd has not yet asked for all gradients when it is known that it will."""
    net = planned(net_on(TWO), strategy="chen_sqrt", realisation="explicit")
    raw, seen = mx.autograd.backward.__wrapped__, []
    before = threading.Barrier(2)

    def slow(*arguments: Any) -> None:
        seen.append(threading.get_ident())
        raw(*arguments)
        for _ in range(YIELDS):
            time.sleep(0)
        seen.append(threading.get_ident())

    monkeypatch.setattr(mx.autograd, "backward", with_second_halves(slow))

    def both(ctx: mx.Context) -> None:
        x, y = (array.as_in_context(ctx) for array in images(8))
        with autograd.record():
            loss = SOFTMAX(net(x), y)
        before.wait()
        mx.autograd.backward(loss)

    in_threads(both, TWO)
    assert len(seen) == 4
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]


def test_two_threads_on_one_context_are_refused() -> None:
    net = planned(net_on([CPU]), strategy="chen_sqrt", realisation="packed")
    (x, y), losses = images(8), queue.Queue[Any]()
    has_failed = threading.Event()

    def first() -> None:
        with autograd.record():
            losses.put(SOFTMAX(net(x), y))
        has_failed.wait()

    thread = threading.Thread(target=first)
    thread.start()
    loss = losses.get()
    with autograd.record(), pytest.raises(UsageError, match=r"two threads.*cpu\(0\) at once"):
        net(x * 2)
    net.planned_step.abandon()  # of this thread, which has no step
    has_failed.set()
    thread.join()
    loss.backward()
    found = gradients(net)
    plain = net_on([CPU])
    with autograd.record():
        loss = SOFTMAX(plain(x), y)
    loss.backward()
    assert not differences([gradients(plain)], [found])


class Nested(mx.operator.CustomOp):
    """Squares, and has autograd compute the gradient."""

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0] ** 2)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        x = in_data[0].copy()
        x.attach_grad()
        for _ in range(YIELDS):
            time.sleep(0)
        with autograd.record():
            y = x**2
        y.backward(out_grad[0])
        self.assign(in_grad[0], req[0], x.grad)


@mx.operator.register("differentiates_itself")
class NestedProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Nested:
        return Nested()


@pytest.mark.parametrize("realisation", long_except(["explicit", "packed"], ["packed"]))
def test_a_custom_op_may_differentiate_what_is_its_own(realisation: str) -> None:
    """It runs in a thread of MXNet's, for which the step waits."""

    def square(net: Any, batches: Any) -> Any:
        losses = []
        for x, _ in batches:
            with autograd.record():
                losses.append(mx.nd.Custom(net(x), op_type="differentiates_itself").mean(axis=1))
            losses[-1].backward()
        return losses

    here = [CPU, CPU]
    expected = trained(net_on([CPU], adds=True), here, square)
    net = planned(net_on([CPU], adds=True), strategy="chen_sqrt", realisation=realisation)
    assert not differences(expected, trained(net, here, square))


def test_a_custom_op_cannot_train_a_planned_block() -> None:
    net = planned(net_on([CPU]), strategy="chen_sqrt", realisation="packed")
    found: list[Exception] = []

    class Trains(Nested):
        def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            try:
                with autograd.record():
                    net(in_data[0])
            except UsageError as error:
                found.append(error)
            self.assign(out_data[0], req[0], in_data[0])

    @mx.operator.register("trains_a_block")
    class TrainsProp(mx.operator.CustomOpProp):
        def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Trains:
            return Trains()

    x = images(8)[0]
    assert np.array_equal(mx.nd.Custom(x, op_type="trains_a_block").asnumpy(), x.asnumpy())
    assert "in a thread of MXNet's" in str(found[0])


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_seeds_are_those_of_the_thread_that_trains(realisation: str) -> None:
    """MXNet has generators for each thread; an executor would keep those of the first one."""

    def losses(*, is_planned: bool) -> list[Any]:
        mx.random.seed(0)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(8, in_units=6), gluon.nn.Dropout(0.5), gluon.nn.Dense(3, in_units=8))
        net.initialize(mx.init.Normal(0.4))
        net.hybridize()
        if is_planned:
            planned(net, strategy="evict", realisation=realisation)

        def step(seed: int) -> Any:
            mx.random.seed(seed)
            with autograd.record():
                loss = net(mx.nd.ones((4, 6)))
            loss.backward()
            return [loss.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())]

        found = [step(0)]
        found += [result for seed in (1, 2) for result in in_threads(step, [seed])]
        return [*found, step(3)]

    for one, other in zip(losses(is_planned=False), losses(is_planned=True), strict=True):
        assert all(map(np.array_equal, one, other))


class Beside(gluon.HybridBlock):
    """A block of the script's with a hybridized one, that has something done ``beside`` a call."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.beside: list[Callable[[], None]] = []
        with self.name_scope():
            self.body = gluon.nn.HybridSequential()
            self.body.add(gluon.nn.Dense(7, activation="tanh"), gluon.nn.Dense(7))
            self.scores = gluon.nn.Dense(5)
        self.body.hybridize()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = F.tanh(x)
        while self.beside:
            self.beside.pop()()
        return self.scores(self.body(x))


@pytest.mark.parametrize("way", ["planned", "whole"])
def test_inference_in_another_thread_while_a_network_is_composed(way: str) -> None:
    """It finds the blocks as they are, with their hooks, and the step what it would have alone."""
    x, y = mx.nd.random.normal(shape=(4, 6)), mx.nd.arange(4)
    results, seen = [], []
    for beside in (False, True):
        mx.random.seed(1)
        net = Beside()
        net.initialize(mx.init.Normal(), ctx=CPU)
        expected = net(x).asnumpy()
        found: list[Any] = []

        def infer(net: Any = net, found: list[Any] = found) -> None:
            found.append(in_threads(lambda _: net(x).asnumpy(), [0])[0])

        step = planned(net, strategy="evict").planned_step if way == "planned" else None
        step = step or TrainStep(net, SOFTMAX, strategy="evict", keep_outputs=True)
        for block in (net, net.body):
            block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            block.register_forward_hook(lambda _, inputs, outputs: seen.append(outputs))
        for _ in range(2):
            seen.clear()
            net.beside += [infer] if beside else []
            step.plan(x) if way == "planned" else step.plan(x, y)
            assert sum(isinstance(array, mx.nd.NDArray) for array in seen) == 4 * len(found[-1:])
        if way == "planned":
            with autograd.record():
                loss = SOFTMAX(net(x), y)
            loss.backward()
        else:
            step(x, y)
        assert all((array == expected).all() for array in found)
        assert len(found) == 2 * beside
        results.append(gradients(net))
    assert not differences(results[:1], results[1:])


def test_a_thread_goes_on_while_another_plans_a_block() -> None:
    """One that trains nothing by a plan asks for a gradient, and differentiates."""
    nets = [gluon.nn.Dense(1, in_units=1, prefix=f"among_others{k}_") for k in range(9)]
    planned(nets.pop())

    def plan_one() -> None:
        if nets:
            planned(nets.pop())

    x = mx.nd.ones((2,))
    x.attach_grad()
    with amid_weak_dictionaries(plan_one):
        assert not x.grad.asnumpy().any()
    assert nets
    with autograd.record():
        y = (x * x).sum()
    with amid_weak_dictionaries(plan_one):
        y.backward()
    assert (x.grad.asnumpy() == 2).all()
