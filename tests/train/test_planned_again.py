"""A planned block that is planned again, by options that it takes, or copied."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest
from mxnet.gluon import nn

from helpers.block_runs import assert_equal, autograd_gradients, gradients
from helpers.blocks import CPU, SOFTMAX, conv_net, images
from helpers.training_runs import differences
from memplan.errors import ArgumentError, BudgetError
from memplan.mxnet.gluon import planned

QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}
# How often a thread lets another one go on, which it does if nothing holds it.
YIELDS = 2000


def started() -> tuple[Any, Any]:
    mx.random.seed(3)
    net = conv_net()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    batch = images(8)
    net(batch[0])
    return net, batch


def backward(net: Any, batch: tuple[Any, Any]) -> None:
    x, y = batch
    with mx.autograd.record():
        loss = SOFTMAX(net(x), y)
    loss.backward()


def within(net: Any) -> Any:
    """The copy of a child."""
    parent = nn.HybridSequential(prefix="parent_")
    parent.add(net)
    return copy.deepcopy(parent)[0]


def test_a_block_may_be_planned_again_as_it_is() -> None:
    """As in a notebook whose cell runs again; by other options it says what to do."""
    net, (x, _) = started()
    assert planned(net, **QUICKLY) is net
    step = net.planned_step
    with mx.autograd.record():
        net(x).sum().backward()
    assert planned(net, **dict(reversed(QUICKLY.items()))) is net
    assert net.planned_step is step
    for options in ({}, QUICKLY | {"budget": "1GiB"}):
        with pytest.raises(ArgumentError, match=r"chen_sqrt.*make the block anew"):
            planned(net, **options)
    assert net.planned_step is step


def test_a_block_whose_budget_was_refused_is_planned_by_another_one() -> None:
    net, batch = started()
    expected = autograd_gradients(net, batch)
    planned(net, budget="1KiB", **QUICKLY)
    with pytest.raises(BudgetError):
        backward(net, batch)
    assert planned(net, budget=1.0, **QUICKLY) is net
    backward(net, batch)
    assert len(net.planned_step.plans) == 1
    assert_equal(expected, gradients(net))


def test_a_block_whose_plan_is_being_searched_is_not_planned_by_other_options() -> None:
    """Another thread waits for the search, and then is told that there is a plan."""
    net, batch = started()
    step, found = planned(net, **QUICKLY).planned_step, list[Any]()

    def plan_again() -> None:
        try:
            found.append(planned(net, strategy="evict"))
        except ArgumentError as error:
            found.append(error)

    threads = [threading.Thread(target=plan_again)]
    begun = list[threading.Thread]()

    def while_searched(*_: Any) -> None:
        while threads:
            begun.append(threads.pop())
            begun[0].start()
            for _ in range(YIELDS):
                time.sleep(0)

    net[0].register_forward_pre_hook(while_searched)
    backward(net, batch)
    begun[0].join()
    assert "is planned already, by other options" in str(found[0])
    assert net.planned_step is step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer": object()}, "the loop calls trainer.step"),
        ({"loss": SOFTMAX}, r"take TrainStep\(block, loss\)"),
        ({"keep_outputs": True}, "returns its outputs"),
        ({"optimizer": "adam"}, "leave room for its states by reserve="),
    ],
)
def test_what_the_loop_does_itself_is_refused(options: dict[str, Any], message: str) -> None:
    net, _ = started()
    with pytest.raises(ArgumentError, match=f"needs no {next(iter(options))}: .*{message}"):
        planned(net, **QUICKLY, **options)
    assert not hasattr(net, "planned_step")
    planned(net, **QUICKLY, trainer=None, loss=None, keep_outputs=False, optimizer=None)


def test_what_is_no_option_is_refused_by_name() -> None:
    net, _ = started()
    with pytest.raises(ArgumentError, match=r"planned has no option 'foo'; it has budget, strat"):
        planned(net, foo=1)


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), within],
    ids=["deepcopy", "pickle", "child"],
)
def test_a_copy_is_a_block_that_is_not_planned(
    copied: Callable[[Any], Any], is_trained: bool
) -> None:
    """Its own parameters are trained, which MXNet wants initialised for that."""
    results = []
    for is_planned in (False, True):
        net, batch = started()
        if is_planned:
            planned(net, **QUICKLY)
        if is_trained:
            backward(net, batch)
        other = copied(net)
        assert type(other) is nn.HybridSequential
        assert not hasattr(other, "planned_step")
        other.initialize(mx.init.Xavier(), ctx=CPU, force_reinit=True)
        backward(other, batch)
        results.append(gradients(other))
        backward(net, batch)
        results.append(gradients(net))
        assert not is_planned or net.planned_step.plans
    assert not differences(results[:2], results[2:])
