"""A Module that updates the parameters within the step: as mx.mod.Module, bit for bit."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.fitting import wait
from helpers.module_runs import module_steps
from helpers.planning import NEVER_SECONDS
from helpers.training_runs import differences
from helpers.updating import NET, OPTIONS, SHAPES, batch
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet import BucketingModule, Module


def bound(**options: Any) -> Module:
    module = Module(NET, **OPTIONS)
    module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))], **options)
    module.init_params(mx.init.Xavier())
    return module


def ready(bind: dict[str, Any], optimizer: dict[str, Any]) -> Module:
    module = bound(**bind)
    module.init_optimizer(**optimizer)
    return module


@pytest.mark.parametrize("budget", [None, 0.8])
def test_steps_of_several_shapes(budget: Any) -> None:
    realisations: set[str] = set()

    def make(net: Any) -> Module:
        strategy = "evict" if budget else "store_all"
        return Module(
            net, budget=budget, time_limit=NEVER_SECONDS, **(OPTIONS | {"strategy": strategy})
        )

    def note(module: Module) -> None:
        realisations.update(plan.realisation for plan in module._plans.plans.values())

    ours = module_steps(make, (16, 8, 16), note)
    stock = module_steps(mx.mod.Module, (16, 8, 16), lambda _: None)
    assert not differences(stock, ours)
    assert realisations == {"updating"}


def test_fit_with_a_schedule_and_resume(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    x = random.normal(size=(48, 3, 16, 16)).astype("float32")
    y = random.integers(0, 10, 48).astype("float32")
    found = []
    for kind, more in ((mx.mod.Module, {}), (Module, OPTIONS)):
        mx.random.seed(3)
        np.random.seed(3)
        data = mx.io.NDArrayIter(x, y, batch_size=16)
        module = kind(NET, **more)
        for begin in (0, 2):
            schedule = mx.lr_scheduler.FactorScheduler(2, 0.5)
            module.fit(
                data,
                num_epoch=begin + 2,
                begin_epoch=begin,
                optimizer="adam",
                initializer=mx.init.Xavier(),
                optimizer_params={"learning_rate": 0.01, "wd": 0.1, "lr_scheduler": schedule},
                eval_metric="ce",
                batch_end_callback=wait,
            )
            prefix = str(tmp_path / "saved")
            module.save_checkpoint(prefix, begin + 2, save_optimizer_states=True)
            score = module.score(data, "acc")[0][1]
            data.reset()
            states = Path(f"{prefix}-{begin + 2:04d}.states").read_bytes()
            module = kind.load(prefix, begin + 2, load_optimizer_states=True, **more)
            found.append((score, states))
    assert found[:2] == found[2:]


def test_update_only_notes_that_a_step_has_run() -> None:
    module = bound()
    with pytest.raises(UsageError, match="init_optimizer before the first step"):
        module.forward_backward(batch())
    module.init_optimizer()
    with pytest.raises(UsageError, match="none has run since"):
        module.update()
    module.forward_backward(batch())
    weights = [array.copy() for [array] in module._exec_group.param_arrays]
    module.update()
    pairs = zip(weights, module._exec_group.param_arrays, strict=True)
    assert all(np.array_equal(one.asnumpy(), other.asnumpy()) for one, [other] in pairs)
    module.forward(batch(), is_train=False)
    with pytest.raises(UsageError, match="none has run since"):
        module.update()
    assert all(gradients == [None] for gradients in module._exec_group.grad_arrays)


@pytest.mark.parametrize(
    ("bind", "optimizer", "reason"),
    [
        ({}, {"optimizer": "nadam"}, "Nadam"),
        ({}, {"kvstore": mx.kv.create("local")}, "a kvstore"),
        ({"inputs_need_grad": True}, {}, "gradients of inputs or states"),
        ({"grad_req": "add"}, {}, "grad_req='add'"),
    ],
)
def test_what_is_refused_trains_behind_the_step(
    bind: dict[str, Any], optimizer: dict[str, Any], reason: str
) -> None:
    with pytest.warns(UserWarning, match=reason):
        module = ready(bind, optimizer)
    assert module.plan is not None
    assert module.plan.realisation == "packed"
    before = module._exec_group.param_arrays[0][0].asnumpy()
    for _ in range(2):
        module.forward_backward(batch())
        module.update()
    assert not np.array_equal(before, module._exec_group.param_arrays[0][0].asnumpy())
    [gradient] = module._exec_group.grad_arrays[0]
    assert gradient.asnumpy().any()


def test_a_gradient_of_a_state_is_one_of_an_input() -> None:
    """No optimizer updates it."""
    hidden = mx.sym.concat(mx.sym.Variable("data"), mx.sym.Variable("h", shape=(8, 3)), dim=1)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=5), name="softmax")
    module = Module(net, state_names=["h"], **OPTIONS)
    with pytest.warns(UserWarning, match="gradients of inputs or states"):
        module.bind([("data", (8, 6))], [("softmax_label", (8,))], grad_req={"h": "write"})
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    module.set_states(value=0.3)
    module.forward_backward(mx.io.DataBatch([mx.nd.ones((8, 6))], [mx.nd.ones(8)]))
    assert module._exec_group.execs[0].grad_dict["h"].asnumpy().any()


@pytest.mark.parametrize("bucketing", [False, True])
@pytest.mark.parametrize(
    ("contexts", "reason"),
    [([mx.cpu(0), mx.cpu(1)], "several contexts"), (mx.cpu(1), r"not on cpu\(1\)$")],
    ids=str,
)
def test_on_contexts_without_packed_memory_steps_are_those_of_auto(
    contexts: Any, reason: str, bucketing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(kind: type, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
        net: Any = (lambda _: (NET, ("data",), ("softmax_label",))) if bucketing else NET
        keys = {"default_bucket_key": 1} if bucketing else {}
        module = kind(net, context=contexts, **keys, **options)
        module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
        mx.random.seed(3)
        module.init_params(mx.init.Xavier())
        module.init_optimizer(kvstore=None, optimizer_params={"learning_rate": 0.1})
        step = batch()
        step.bucket_key, step.provide_data, step.provide_label = 1, None, None
        for _ in range(2):
            module.forward_backward(step)
            module.update()
        mx.nd.waitall()
        return module, [{n: array.asnumpy() for n, array in module.get_params()[0].items()}]

    with pytest.warns(UserWarning, match=reason):
        module, ours = trained(BucketingModule if bucketing else Module, **OPTIONS)
    assert (module._curr_module if bucketing else module).plan.realisation == "explicit"
    assert "memplan trains by explicit steps" in caplog.text
    stock = trained(mx.mod.BucketingModule if bucketing else mx.mod.Module)[1]
    assert not differences(stock, ours)


class Halved:
    """An updater of the user's, around MXNet's, as a script may put into a module."""

    def __init__(self, updater: Any) -> None:
        self.updater, self.ncalls = updater, 0

    def __call__(self, indices: Any, gradients: Any, weights: Any) -> None:
        self.ncalls += 1
        self.updater(indices, [gradient / 2 for gradient in gradients], weights)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["Halved", "of MXNet's"])
def test_the_updater_is_the_one_that_the_module_has(first: int, kind: str) -> None:
    """Whatever a script puts in its place, before the first step or later."""
    found = []
    for made in (mx.mod.Module(NET), Module(NET, **OPTIONS)):
        mx.random.seed(3)
        made.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
        made.init_params(mx.init.Xavier())
        made.init_optimizer(optimizer_params={"learning_rate": 0.1})
        is_told = isinstance(made, Module) and kind == "Halved"
        for number in range(3):
            told = pytest.warns(UserWarning, match="the updater is a Halved")
            if number == first and kind == "Halved":
                made._updater = Halved(made._updater)
            elif number == first:
                made._updater = mx.optimizer.get_updater(mx.optimizer.Adam(0.01))
            with told if is_told and number == first else contextlib.nullcontext():
                made.forward_backward(batch())
            mx.nd.waitall()  # or an update may meet a weight in a layout of oneDNN's
            made.update()
        found.append([{n: array.asnumpy() for n, array in made.get_params()[0].items()}])
    assert not differences(*found)
    assert kind != "Halved" or made._updater.ncalls == 3 - first
    assert made.plan is not None
    assert made.plan.realisation == ("packed" if kind == "Halved" else "updating")


SHAPES_BOUND = [("data", SHAPES["data"])], [("softmax_label", (16,))]


@pytest.mark.parametrize(
    "early",
    [
        lambda module: module.forward_backward(batch()),
        lambda module: module.forward(batch(), is_train=False),
        lambda module: module.get_params(),
        lambda module: module.save_optimizer_states(os.devnull),
        lambda module: module.bind(*SHAPES_BOUND, force_rebind=True),
    ],
)
def test_what_comes_before_update_is_told_of_it(early: Callable[[Module], Any]) -> None:
    """In MXNet it finds parameters and states as they were before the step."""
    module = ready({}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            module.forward_backward(batch())
            module.update()
            early(module)
            if module._updated_by.is_due:
                module.update()
    module.forward_backward(batch())
    with pytest.warns(UserWarning, match=r"update\(\) was not called.*right after.*is_train=False"):
        early(module)


@pytest.mark.parametrize("first", [0, 1])
def test_the_optimizer_may_be_given_another_method(first: int) -> None:
    """On the object that the module has: before the first step, or later."""
    module = ready({}, {})
    calls = []
    for number in range(3):
        if number == first:
            update = module._optimizer.update_multi_precision
            module._optimizer.update_multi_precision = lambda *a, f=update: calls.append(f(*a))
        told = pytest.warns(UserWarning, match="multi_precision of the optimizer was replaced")
        with told if number == first else contextlib.nullcontext():
            module.forward_backward(batch())
        module.update()
    assert module.plan is not None
    assert (module.plan.realisation, bool(calls)) == ("packed", True)


def test_update_may_be_replaced_on_the_class_of_mxnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """To clip gradients in every module, say, as a library may do after the first step."""
    module = ready({}, {})
    module.forward_backward(batch())
    module.update()
    update, calls = mx.mod.Module.update, []

    def clipped(self: Any) -> None:
        calls.append([gradient.asnumpy() for [gradient] in self._exec_group.grad_arrays])
        update(self)

    monkeypatch.setattr(mx.mod.Module, "update", clipped)
    with pytest.warns(UserWarning, match="update of the class Module was replaced"):
        module.forward_backward(batch())
    module.update()
    assert len(calls) == 1
    assert all(gradient.any() for gradient in calls[0][-2:])


@pytest.mark.parametrize("name", ["backward", "update"])
@pytest.mark.parametrize("bucketing", [False, True])
def test_a_class_of_the_scripts_may_look_at_gradients(name: str, bucketing: bool) -> None:
    """As one does that clips them where ``fit`` calls it: none would be there to clip."""

    def halve(module: Any) -> None:
        inner = module._curr_module if bucketing else module
        for gradient in (g for [g] in inner._exec_group.grad_arrays if g is not None):
            gradient *= 0.5

    def method(self: Any) -> None:
        if name == "update":
            halve(self)
        getattr(super(type(self), self), name)()
        if name == "backward":
            halve(self)

    def trained(kind: type, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        module = type("Halving", (kind,), {name: method})(*arguments, **options)
        module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
        mx.random.seed(3)
        module.init_params(mx.init.Xavier())
        module.init_optimizer(optimizer_params={"learning_rate": 0.1})
        step = batch()
        step.bucket_key, step.provide_data, step.provide_label = 1, None, None
        for _ in range(2):
            module.forward_backward(step)
            module.update()
        mx.nd.waitall()
        return [{n: array.asnumpy() for n, array in module.get_params()[0].items()}]

    made: tuple[Any, ...] = (NET,)
    kinds: tuple[type, type] = (mx.mod.Module, Module)
    if bucketing:
        made = (lambda _: (NET, ("data",), ("softmax_label",)), 1)
        kinds = (mx.mod.BucketingModule, BucketingModule)
    with pytest.warns(UserWarning, match=f"{name} of the class Halving was replaced"):
        ours = trained(kinds[1], *made, **OPTIONS)
    assert not differences(trained(kinds[0], *made), ours)


def test_a_network_that_is_refused_trains_behind_the_step() -> None:
    words = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=9, output_dim=4, sparse_grad=True, name="words"
    )
    scores = mx.sym.FullyConnected(words, num_hidden=3, name="scores")
    net = mx.sym.SoftmaxOutput(scores, name="softmax")
    random = np.random.default_rng(4)
    data = mx.io.NDArrayIter(random.integers(0, 9, (6, 5)), random.integers(0, 3, 6), batch_size=2)

    def trained(module: mx.mod.Module) -> list[dict[str, Any]]:
        mx.random.seed(5)
        adam = {"optimizer": "adam", "initializer": mx.init.Xavier()}
        module.fit(data, num_epoch=1, **adam, batch_end_callback=wait)
        data.reset()
        return [{name: array.asnumpy() for name, array in module.get_params()[0].items()}]

    with pytest.warns(UserWarning, match="the gradient of 'words_weight' is sparse"):
        ours = trained(Module(net, **OPTIONS))
    assert not differences(trained(mx.mod.Module(net)), ours)


def test_a_plan_that_was_given() -> None:
    plan = memplan.plan(NET, costs="roofline:cpu", **OPTIONS, **SHAPES)
    module = Module(NET, plan=plan)
    module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
    module.init_params(mx.init.Xavier())
    with pytest.raises(ArgumentError, match=r"SGLD.*realisation='packed'"):
        module.init_optimizer(optimizer="sgld")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        module.init_optimizer(optimizer="adam", force_init=True)
    module.forward_backward(batch())
    module.update()
    assert module.plan is plan
