"""Parameters that get other arrays between the call of a planned block and ``backward``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from helpers.amounts import long_unless
from helpers.blocks import chain_net
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned

Change = Callable[[Any], None]
Found = dict[str, Any]


def pictures(step: int) -> Any:
    return mx.nd.arange(600).reshape((2, 3, 10, 10)) / (600 + step)


def network(before: str) -> Any:
    net = chain_net(pictures(0))
    net.collect_params().setattr("grad_req", before)
    return net


def add(net: Any) -> None:
    net.collect_params().setattr("grad_req", "add")


def add_one(net: Any) -> None:
    net[3].weight.grad_req = "add"


def freeze(net: Any) -> None:
    for block in net[:5]:
        block.collect_params().setattr("grad_req", "null")


def there_and_back(net: Any) -> None:
    for request in ("null", "add", "write"):
        net[3].collect_params().setattr("grad_req", request)


def initialize(net: Any) -> None:
    net.initialize(mx.init.Constant(0.1), force_reinit=True)


def reset(net: Any) -> None:
    net.collect_params().reset_ctx(mx.cpu())


def cast(net: Any) -> None:
    net.cast("float64")


CHANGES = [add, add_one, freeze, there_and_back, initialize, reset]


def train(
    how: str, change: Change, before: str, ignore_stale_grad: bool, momentum: float = 0.9
) -> Found:
    """What is found in three steps, of which the second has the change within."""
    net, found = network(before), {}
    if how == "planned":
        planned(net, strategy="chen_sqrt", realisation="packed")
    step = TrainStep(net, strategy="chen_sqrt", realisation="packed") if how == "halves" else None
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": momentum})
    for n in range(3):
        x = pictures(n).astype(net[0].weight.dtype)
        with autograd.record():
            loss = ((net if step is None else step.forward)(x) ** 2).sum()
        if n == 1:
            change(net)
        loss.backward() if step is None else step.backward(loss)
        for p in net.collect_params().values():
            found[f"gradient {n} of {p.name}"] = None if p._grad is None else p.grad().asnumpy()
        try:
            trainer.step(2, ignore_stale_grad)
        except UserWarning as error:
            found[f"error {n}"] = np.array(str(error))
        for p in net.collect_params().values():
            found[f"{p.name} after {n}"] = p.data().asnumpy()
    return found


@functools.lru_cache(maxsize=2)  # one run serves both ways of planning
def without_a_plan(change: Change, before: str, ignore_stale_grad: bool) -> Found:
    return train("", change, before, ignore_stale_grad)


@pytest.mark.parametrize(
    ("change", "before", "how"),
    long_unless(
        itertools.product(CHANGES, ["write", "add"], ["planned", "halves"]),
        lambda case: case[1:] == ("write", "planned") or case[0] in (add_one, there_and_back),
    ),
)
def test_what_was_recorded_before_goes_where_mxnet_lets_it_go(
    change: Change, before: str, how: str
) -> None:
    for ignore_stale_grad in (False, True):
        expected = without_a_plan(change, before, ignore_stale_grad)
        found = train(how, change, before, ignore_stale_grad)
        assert expected.keys() == found.keys()
        assert not [n for n in expected if not np.array_equal(expected[n], found[n])]


def test_a_penalty_recorded_behind_the_change_has_its_gradient_alone() -> None:
    def gradients(is_planned: bool) -> list[Any]:
        net = network("write")
        if is_planned:
            planned(net, strategy="chen_sqrt", realisation="packed")
        for n in range(2):
            with autograd.record():
                loss = (net(pictures(n)) ** 2).sum()
                there_and_back(net)
                loss = loss + (net[3].weight.data() ** 2).sum()
            loss.backward()
        return [p.grad().asnumpy() for p in net.collect_params().values()]

    assert all(map(np.array_equal, gradients(False), gradients(True)))


@pytest.mark.parametrize("how", ["planned", "halves"])
def test_a_cast_leaves_no_gradient_of_that_step(how: str) -> None:
    expected, found = (train(h, cast, "write", True, 0) for h in ("", how))
    # MXNet casts the gradients of the step before, which a planned step has written over.
    before = [name for name in found if name.startswith("gradient 1")]
    assert all(
        np.isnan(found.pop(name)).all() and expected.pop(name) is not None for name in before
    )
    assert expected.keys() == found.keys()
    assert not [n for n in expected if not np.array_equal(expected[n], found[n])]
    assert found["net_conv0_weight after 2"].dtype == np.float64


@pytest.mark.parametrize("before", ["write", "add"])
def test_a_gradient_attached_after_the_call_is_refused(before: str) -> None:
    net = planned(network(before), strategy="chen_sqrt", realisation="packed")
    with autograd.record():
        loss = net(pictures(0)).sum()
    net[3].weight.data().attach_grad()
    with pytest.raises(UsageError, match=f"attach_grad of parameter '{net[3].weight.name}'"):
        loss.backward()


def test_gradients_that_a_script_attaches_before_the_call_are_written() -> None:
    def trained(is_planned: bool) -> list[Any]:
        net = network("write")
        if is_planned:
            planned(net, strategy="chen_sqrt", realisation="packed")
        arrays = [p.data() for p in net.collect_params().values() if p.grad_req != "null"]
        for n in range(3):
            for array in arrays:
                array.attach_grad()
            with autograd.record():
                loss = (net(pictures(n)) ** 2).sum()
            loss.backward()
            for array in arrays:
                array[:] = array - 0.01 * array.grad
        return [array.asnumpy() for array in arrays]

    assert all(map(np.array_equal, trained(False), trained(True)))
