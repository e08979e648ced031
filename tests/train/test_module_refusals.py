"""How a Module stands after a plan was refused: as before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from memplan.errors import ArgumentError, BudgetError, MemplanError
from memplan.mxnet import BucketingModule, Module
from memplan.mxnet.train.modules import module_executor

S = mx.sym
ADVANCE = {"learning_rate": 0.1, "momentum": 0.9}
#: Enough for batches of 8, not for those of 4096. What is refused looks for what would be enough
#: for as long as the time limit lets it, and nothing here reads what that is.
OPTIONS: dict[str, Any] = {
    "budget": "64 KiB",
    "strategy": "store_all",
    "realisation": "packed",
    "time_limit": 0.1,
}
BOTH = pytest.mark.parametrize("bucketing", [False, True])


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.least.SEARCH_SECONDS", 0.1)


def network(width: int = 6) -> mx.sym.Symbol:
    x = S.relu(S.FullyConnected(S.Variable("data"), num_hidden=width, name="hidden"))
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="scores"), name="softmax")


def shapes(size: int) -> tuple[Any, Any]:
    return [("data", (size, 5))], [("softmax_label", (size,))]


def batch(size: int, key: int = 1) -> Any:
    random = np.random.default_rng(size)
    data, label = random.normal(size=(size, 5)), random.integers(0, 3, size)
    result = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)], bucket_key=key)
    result.provide_data, result.provide_label = shapes(size)
    return result


def generated(_: int) -> Any:
    return network(), ["data"], ["softmax_label"]


def made(bucketing: bool, planned: bool = True, **more: Any) -> Any:
    """A module that is bound to batches of 8."""
    options = {**OPTIONS, **more} if planned else {}
    if bucketing:
        kind: Any = BucketingModule if planned else mx.mod.BucketingModule
        module = kind(generated, default_bucket_key=1, **options)
    else:
        module = (Module if planned else mx.mod.Module)(network(), **options)
    module.bind(*shapes(8))
    mx.random.seed(2)
    module.init_params(mx.init.Uniform(0.3))
    module.init_optimizer(optimizer_params=ADVANCE)
    return module


def weights(module: Any) -> dict[str, np.ndarray]:
    mx.nd.waitall()
    return {name: array.asnumpy() for name, array in module.get_params()[0].items()}


def run(module: Any, between: Callable[[Any], None]) -> dict[str, np.ndarray]:
    """Weights after two steps, with something between the first one and its update."""
    for number in range(2):
        module.forward_backward(batch(8))
        if number == 0:
            between(module)
        module.update()
    return weights(module)


def refused(module: Any, **options: Any) -> None:
    with pytest.raises(MemplanError):
        module.bind(*shapes(4096), force_rebind=True, **options)


@BOTH
@pytest.mark.parametrize("options", [{}, {"inputs_need_grad": True, "grad_req": "add"}])
def test_a_bind_that_is_refused(bucketing: bool, options: dict[str, Any]) -> None:
    names = ("binded", "data_shapes", "label_shapes", "for_training", "inputs_need_grad")

    def refuse(module: Any) -> None:
        before = [getattr(module, name) for name in names]
        refused(module, **options)
        with pytest.raises(ValueError, match="Data provided by"):
            module.bind([("other", (8, 5))], shapes(8)[1], force_rebind=True)
        assert [getattr(module, name) for name in names] == before

    ours = run(module := made(bucketing), refuse)
    stock = run(made(bucketing, planned=False), lambda _: None)
    assert all(np.array_equal(stock[name], ours[name]) for name in stock)
    module.bind(*shapes(4), force_rebind=True)
    module.init_optimizer(force_init=True)
    module.forward_backward(batch(4))
    module.update()


def test_one_that_would_have_ended_updates_within() -> None:
    module = made(bucketing=False, realisation="updating")
    module.forward_backward(batch(8))
    with pytest.warns(UserWarning, match="gradients of inputs or states are wanted"):
        refused(module, inputs_need_grad=True)
    module.update()
    assert module.plan.realisation == module._plans.realisation == "updating"
    module.bind(*shapes(4), force_rebind=True)
    assert module.plan.realisation == "updating"


@BOTH
def test_the_memory_is_free_before_that_of_another_is_taken(
    bucketing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, found = made(bucketing), []
    inner = module._curr_module if bucketing else module
    held = weakref.ref(inner._exec_group.execs[0]._training)
    del inner
    train_executor = module_executor.TrainExecutor

    def noting(*arguments: Any, **options: Any) -> Any:
        found.append(held())
        return train_executor(*arguments, **options)

    monkeypatch.setattr(module_executor, "TrainExecutor", noting)
    module.bind(*shapes(4), force_rebind=True)
    assert found == [None]


@BOTH
def test_a_step_that_is_refused(bucketing: bool) -> None:
    """The gradients of the one before are still there, and the shapes are those before."""

    def refuse(module: Any) -> None:
        with pytest.raises(BudgetError):
            module.forward_backward(batch(4096, key=2))
        assert [tuple(shape) for _, shape in module.data_shapes] == [(8, 5)]

    ours = run(module := made(bucketing), refuse)
    stock = run(made(bucketing, planned=False), lambda _: None)
    assert all(np.array_equal(stock[name], ours[name]) for name in stock)
    refuse(module)
    module.init_optimizer(force_init=True)
    inner = module._curr_module if bucketing else module
    assert inner._optimizer.rescale_grad == 1 / 8
    monitor = mx.mon.Monitor(1, pattern=".*output")
    module.install_monitor(monitor)
    monitor.tic()
    module.forward_backward(batch(8))
    assert monitor.toc()


def test_shapes_that_no_parameters_are_for() -> None:
    module = made(bucketing=False)
    with pytest.raises(ArgumentError, match="'hidden_weight'"):
        module.reshape([("data", (4, 7))], [("softmax_label", (4,))])
    assert (module._exec_group.batch_size, module.data_shapes[0].shape) == (8, (8, 5))
    module.forward_backward(batch(8))
    module.update()


def test_a_bucket_with_a_parameter_that_the_default_one_lacks() -> None:
    """MXNet refuses it, too: nobody initialises it."""

    def renamed(key: int) -> Any:
        x = S.FullyConnected(S.Variable("data"), num_hidden=3, name="scores" if key == 1 else "new")
        return S.SoftmaxOutput(x, name="softmax"), ["data"], ["softmax_label"]

    module = BucketingModule(renamed, 1, **OPTIONS)
    module.bind(*shapes(8))
    module.init_params(mx.init.Uniform(0.3))
    module.init_optimizer()
    with pytest.raises(ArgumentError, match=r"'new_bias', 'new_weight'.* default bucket"):
        module.forward_backward(batch(8, key=2))
    module.forward_backward(batch(8))
    module.update()


@pytest.mark.parametrize("budget", ["1 kB", None])
def test_contexts_on_which_no_step_can_run_are_refused_before_a_budget_is(budget: Any) -> None:
    """Or a script would raise its budget in vain."""
    two = [mx.cpu(0), mx.cpu(1)]
    module = Module(network(), context=two, **{**OPTIONS, "budget": budget})
    with pytest.raises(ArgumentError, match=r"packed memory is on cpu\(0\) or a GPU, not on cpu"):
        module.bind(*shapes(8))
    module.bind(*shapes(8), for_training=False)
