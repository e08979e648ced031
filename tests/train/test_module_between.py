"""What a script changes between a step that updates the parameters and ``update()``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.training_runs import differences
from helpers.updating import NET, OPTIONS, SHAPES, batch
from memplan.errors import UsageError
from memplan.mxnet import Module


def ready(**optimizer: Any) -> Module:
    module = Module(NET, **OPTIONS)
    module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(**optimizer)
    return module


class Halved:
    """An updater of the user's, around MXNet's, as a script may put into a module."""

    def __init__(self, updater: Any) -> None:
        self.updater = updater

    def __call__(self, indices: Any, gradients: Any, weights: Any) -> None:
        self.updater(indices, [gradient / 2 for gradient in gradients], weights)


def set_to(name: str, value: Any) -> Callable[[Module], None]:
    return lambda module: setattr(module._optimizer, name, value)


def set_again(module: Module) -> None:
    module.set_params(*module.get_params())


def written(module: Module) -> None:
    for [weight] in module._exec_group.param_arrays:
        weight *= 0.5


def copied(module: Module) -> None:
    [executor] = module._exec_group.execs
    executor.copy_params_from({"first_weight": mx.nd.zeros_like(executor.arg_dict["first_weight"])})


def state_written(module: Module) -> None:
    module._updater.states[1][:] = 0


def state_replaced(module: Module) -> None:
    module._updater.states[1] = module._updater.states[1].copy()


CHANGES: dict[str, Callable[[Module], Any]] = {
    "lr": set_to("lr", 0.3),
    "rescale_grad": set_to("rescale_grad", 1 / 3),
    "wd": set_to("wd", 0.1),
    "momentum": set_to("momentum", 0.5),
    "clip_gradient": set_to("clip_gradient", 1),
    "lr_mult": lambda module: module._optimizer.set_lr_mult({"conv0_weight": 0.1}),
    "wd_mult": lambda module: module._optimizer.wd_mult.update(first_weight=0.1),
    "lr_scheduler.base_lr": lambda module: setattr(module._optimizer.lr_scheduler, "base_lr", 1),
    "lr_scheduler.step": lambda module: module._optimizer.lr_scheduler.step.append(9),
    "states": lambda module: module._updater.set_states(module._updater.get_states()),
    "states ": state_written,
    "states  ": state_replaced,
    "states   ": lambda module: module._updater.states.clear(),
    "num_update": set_to("num_update", 50),
    "_index_update_count": lambda module: module._optimizer._index_update_count.update({0: 7}),
    "parameters": set_again,
    "parameters ": written,
    "parameters  ": copied,
    "updater": lambda module: setattr(module, "_updater", Halved(module._updater)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_updates_depend_on_is_set_before_the_step(name: str) -> None:
    """Not between the step and ``update``, which MXNet's Module would obey."""
    scheduler = mx.lr_scheduler.MultiFactorScheduler([1, 2, 7], 0.5)
    options = {"momentum": 0.9, "lr_scheduler": scheduler}
    module = ready(optimizer_params=options)
    for _ in range(3):
        module.forward_backward(batch())
        assert module._optimizer.learning_rate == scheduler.base_lr
        module.update()
    module.forward_backward(batch())
    CHANGES[name](module)
    with pytest.raises(UsageError, match=rf"^{name.strip()} changed after.*before the step"):
        module.update()
    is_told = pytest.warns(UserWarning, match="the updater is a Halved")
    with is_told if name == "updater" else contextlib.nullcontext():
        module.forward_backward(batch())
    module.update()


def test_what_others_change_is_no_change() -> None:
    """Modules that have one optimizer count its updates together; a weight may be frozen."""

    def run(make: Callable[..., Any]) -> list[dict[str, Any]]:
        optimizer = mx.optimizer.create("adam", learning_rate=0.01, rescale_grad=1 / 16)
        modules = [make(NET, fixed_param_names=["first_weight"]) for _ in range(2)]
        mx.random.seed(3)
        for module in modules:
            module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
            module.init_params(mx.init.Xavier())
            module.init_optimizer(optimizer=optimizer)
        for _ in range(3):
            for module in modules:
                module.forward_backward(batch())
            mx.nd.waitall()
            for module in modules:
                module._exec_group.execs[0].arg_dict["first_weight"][:] += 0.01
                module.init_params()  # says that they are initialised, and does nothing
                module.update()
            mx.nd.waitall()
        return [{n: a.asnumpy() for n, a in m.get_params()[0].items()} for m in modules]

    assert not differences(run(mx.mod.Module), run(lambda *a, **o: Module(*a, **OPTIONS, **o)))


def weights_of_two(make: Callable[..., Any], order: tuple[int, int], shared: str) -> Any:
    """Those of two Modules that share what counts; ``order`` is that of their updates.

    Of the ``lr_scheduler`` the first one is ahead by a step, and turns it in its third one.
    """
    options = {"learning_rate": 0.01, "rescale_grad": 1 / 16}
    scheduler = mx.lr_scheduler.FactorScheduler(2, 0.1)
    optimizer = mx.optimizer.create("adam", **options)
    modules = [make(NET) for _ in range(2)]
    mx.random.seed(3)
    for module in modules:
        module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
        module.init_params(mx.init.Xavier())
        if shared == "optimizer":
            module.init_optimizer(optimizer=optimizer)
        else:
            module.init_optimizer(optimizer_params=options | {"lr_scheduler": scheduler})
    if shared == "lr_scheduler":
        modules[0].forward_backward(batch())
        modules[0].update()
    for _ in range(2):
        for module in modules:
            module.forward_backward(batch())
        for place in order:
            modules[place].update()
    return [{n: a.asnumpy() for n, a in m.get_params()[0].items()} for m in modules]


@pytest.mark.parametrize("shared", ["optimizer", "lr_scheduler"])
def test_modules_that_share_what_counts_are_updated_in_the_order_of_their_steps(
    shared: str,
) -> None:
    def planned(net: Any) -> Module:
        return Module(net, **OPTIONS)

    stock, ours = (weights_of_two(make, (0, 1), shared) for make in (mx.mod.Module, planned))
    assert not differences(stock, ours)
    with pytest.raises(UsageError, match=r"another Module .* in that, or .*='packed'"):
        weights_of_two(planned, (1, 0), shared)


SCHEDULES: dict[str, Callable[[], Any]] = {
    "poly": lambda: mx.lr_scheduler.PolyScheduler(4, base_lr=0.01),
    "cosine": lambda: mx.lr_scheduler.CosineScheduler(4, base_lr=0.01),
    "factor": lambda: mx.lr_scheduler.FactorScheduler(9, 0.1, base_lr=0.01),
}


def by_one_schedule(make: Callable[..., Any], scheduler: Any, *rounds: tuple[str, str]) -> Any:
    """The weights of b, one of the Modules a and b, each with an optimizer of its own.

    Every round says of which Modules a step runs, and for which ``update()`` is called then.
    """
    modules = {name: make(NET) for name in "ab"}
    mx.random.seed(3)
    for module in modules.values():
        module.bind([("data", SHAPES["data"])], [("softmax_label", (16,))])
        module.init_params(mx.init.Xavier())
        module.init_optimizer(optimizer_params={"learning_rate": 0.01, "lr_scheduler": scheduler})
    for steps, updates in rounds:
        for name in steps:
            modules[name].forward_backward(batch())
        for name in updates:
            modules[name].update()
    return [{name: a.asnumpy() for name, a in modules["b"].get_params()[0].items()}]


def updating(net: Any) -> Module:
    return Module(net, **OPTIONS)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rounds", [[("ab", "ba")] * 3, [("ab", "b"), ("b", "b")]])
def test_a_schedule_that_no_step_turns_for_another_is_shared_in_any_order(
    schedule: str, rounds: Any
) -> None:
    """Two Modules updated in the other order than their steps, and one whose step is left out."""
    make = SCHEDULES[schedule]
    stock, ours = (by_one_schedule(m, make(), *rounds) for m in (mx.mod.Module, updating))
    assert not differences(stock, ours)


@pytest.mark.parametrize(
    ("schedule", "ahead"),
    [
        (lambda: mx.lr_scheduler.MultiFactorScheduler([1], 0.1, base_lr=0.01), "a"),
        # Behind its last update it says what it has said before.
        (lambda: mx.lr_scheduler.PolyScheduler(2, base_lr=0.01), "bb"),
    ],
)
def test_a_step_left_out_that_turned_the_schedule_of_another_is_told(
    schedule: Callable[[], Any], ahead: str
) -> None:
    rounds = [(name, name) for name in ahead]
    with pytest.raises(UsageError, match=r"another Module .* in that, or .*='packed'"):
        by_one_schedule(updating, schedule(), *rounds, ("ab", "b"))
