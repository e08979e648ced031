"""Random numbers of threads: MXNet has generators for each, which executors and graphs keep."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import memplan
from memplan.mxnet import BucketingModule, Module
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.gluon import planned

# What the warnings of executors, and of static graphs, begin with.
OF_ANOTHER = "random numbers are those of the thread"
OF_GRAPH = "MXNet's graph of it draws the random numbers"


def here(act: Callable[[], Any]) -> Any:
    return act()


def in_thread(act: Callable[[], Any]) -> Any:
    """What ``act`` returns in a thread with a seed of its own."""
    found: list[Any] = []

    def work() -> None:
        mx.random.seed(8)
        found.append(act())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def symbol(*, always: bool = False) -> mx.sym.Symbol:
    mode = "always" if always else "training"
    net = mx.sym.Dropout(mx.sym.tanh(mx.sym.Variable("data")), p=0.5, mode=mode)
    net = mx.sym.FullyConnected(net, num_hidden=2, name="scores")
    return mx.sym.LinearRegressionOutput(net, mx.sym.Variable("label"), name="loss")


def module(realisation: str | None, net: mx.sym.Symbol) -> mx.mod.Module:
    mx.random.seed(7)
    options = {"label_names": ["label"]}
    if realisation is None:
        return mx.mod.Module(net, **options)
    # There is room for steps of two shapes: neither is bound anew for want of memory.
    plan = {"realisation": realisation, "strategy": "store_all", "budget": "1GiB"}
    return Module(net, **plan, **options)


def bind(mod: Any) -> None:
    mod.bind([("data", (4, 20))], [("label", (4, 2))])
    mod.init_params(mx.init.One())
    mod.init_optimizer(kvstore=None, optimizer_params={"learning_rate": 0.01})


def run(mod: Any, count: int = 4, *, trains: bool = True) -> Any:
    """The outputs of a step, or of inference, on a batch of so many."""
    label = [mx.nd.zeros((count, 2))]
    mod.forward(mx.io.DataBatch([mx.nd.ones((count, 20))], label), is_train=trains)
    if trains:
        mod.backward()
        mod.update()
    return mod.get_outputs()[0].asnumpy()


def outcomes(work: Callable[[str | None], list[Any]], realisation: str) -> tuple[bool, int]:
    """Are the numbers of a plan MXNet's, and how many warnings tell of threads?"""
    expected = work(None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = work(realisation)
    told = [w for w in seen if re.search(f"{OF_ANOTHER}|{OF_GRAPH}", str(w.message))]
    return all(map(np.array_equal, expected, found)), len(told)


@pytest.mark.parametrize("realisation", ["packed", "updating", "explicit"])
def test_a_module_that_another_thread_has_bound_tells_of_other_random_numbers(
    realisation: str,
) -> None:
    """Once. Explicit steps keep the generators of the thread that binds, as MXNet's do."""

    def work(realisation: str | None) -> list[Any]:
        mod = module(realisation, symbol())
        bind(mod)
        return [where(lambda: run(mod)) for where in (here, in_thread, in_thread, here)]

    is_kept = realisation == "explicit"
    assert outcomes(work, realisation) == (is_kept, 0 if is_kept else 1)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_module_that_is_bound_in_the_thread_that_trains_it_draws_as_mxnets(
    realisation: str,
) -> None:
    """Nor is anything told where nothing is drawn: in inference, and of a rate of zero."""

    def work(realisation: str | None) -> list[Any]:
        mod = module(realisation, symbol())
        in_thread(lambda: bind(mod))
        idle = module(realisation, mx.sym.MakeLoss(mx.sym.Dropout(mx.sym.Variable("data"), p=0)))
        idle.bind([("data", (4, 20))])
        idle.init_params()
        batch = mx.io.DataBatch([mx.nd.ones((4, 20))], [])
        in_thread(lambda: idle.forward_backward(batch))
        both = in_thread(lambda: [bind_anew(mod), run(mod), run(mod)][1:])
        return [*both, run(mod, trains=False)]

    def bind_anew(mod: Any) -> None:
        mod.bind([("data", (4, 20))], [("label", (4, 2))], force_rebind=True)

    assert outcomes(work, realisation) == (True, 0)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_reshape_draws_as_the_thread_that_reshapes(realisation: str) -> None:
    """So it is of shapes that were trained before, in another thread."""

    def work(realisation: str | None) -> list[Any]:
        mod = module(realisation, symbol())
        bind(mod)
        first = [run(mod), run(mod, 2)]
        return [*first, *in_thread(lambda: [run(mod), run(mod, 2), run(mod)])]

    assert outcomes(work, realisation) == (True, 0)


def test_inference_that_draws_keeps_the_generators_of_the_thread_that_binds() -> None:
    """It is bound when first run: in another thread it has others, of which a warning tells."""

    def work(realisation: str | None, *first: Any) -> list[Any]:
        mod = module(realisation, symbol(always=True))
        bind(mod)
        return [where(lambda: run(mod, trains=False)) for where in (*first, in_thread, here)]

    assert outcomes(lambda realisation: work(realisation, here), "explicit") == (True, 0)
    assert outcomes(work, "explicit") == (False, 1)


def test_a_bucket_that_is_trained_first_in_another_thread_tells_so() -> None:
    """MXNet binds it where it is asked for, and a planned one is bound when it is first trained."""

    def work(realisation: str | None, *, trains_here: bool = False) -> list[Any]:
        mx.random.seed(7)
        kind: Any = mx.mod.BucketingModule
        options = {}
        if realisation is not None:
            kind, options = BucketingModule, {"realisation": realisation, "strategy": "store_all"}
        mod = kind(lambda _: (symbol(), ["data"], ["label"]), 4, **options)
        bind(mod)
        mod.switch_bucket(2, [("data", (2, 20))], [("label", (2, 2))])
        batch = mx.io.DataBatch(
            [mx.nd.ones((2, 20))],
            [mx.nd.zeros((2, 2))],
            bucket_key=2,
            provide_data=[("data", (2, 20))],
            provide_label=[("label", (2, 2))],
        )

        def step() -> Any:
            mod.forward_backward(batch)
            mod.update()
            return mod.get_outputs()[0].asnumpy()

        return [where(step) for where in (*[here] * trains_here, in_thread)]

    assert outcomes(work, "explicit") == (False, 1)
    assert outcomes(lambda name: work(name, trains_here=True), "explicit") == (True, 0)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_an_executor_of_ones_own_tells_of_another_thread(realisation: str) -> None:
    shapes = {"data": (4, 20), "label": (4, 2)}
    plan = memplan.plan(
        symbol(always=True), realisation=realisation, strategy="store_all", **shapes
    )
    executor = TrainExecutor(plan.trace, plan.schedule)
    for trains, is_told in ((True, realisation == "packed"), (False, True)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            in_thread(lambda trains=trains: executor.forward(is_train=trains))
        assert any(OF_ANOTHER in str(w.message) for w in seen) is is_told


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("is_static", [True, False])
def test_a_static_graph_that_draws_tells_of_a_second_thread(
    realisation: str, is_static: bool
) -> None:
    """It keeps the generators of the first one; other graphs draw as the thread that runs them."""

    def work(realisation: str | None) -> list[Any]:
        mx.random.seed(7)
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(20, in_units=20), gluon.nn.Dropout(0.5))
        net.add(gluon.nn.Dense(2, in_units=20))
        net.initialize(mx.init.One())
        net.hybridize(static_alloc=is_static, static_shape=is_static)
        if realisation is not None:
            planned(net, strategy="store_all", realisation=realisation)

        def step() -> Any:
            with autograd.record():
                loss = net(mx.nd.ones((4, 20)))
            loss.backward()
            return loss.asnumpy()

        return [where(step) for where in (here, here, in_thread, in_thread)]

    assert outcomes(work, realisation) == (not is_static, 1 if is_static else 0)
