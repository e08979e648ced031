"""Options have names: what is given without one is said by memplan's error, not by Python's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

import memplan
from memplan.errors import ArgumentError
from memplan.mxnet.gluon import TrainStep, planned

NET = mx.sym.Variable("data")
BLOCK = mx.gluon.nn.Dense(2, in_units=2)


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (memplan.plan, (NET, "60%"), r"plan\(\) takes only net .* '60%' .*, budget=\.\.\., "),
        (memplan.search_plan, (NET, 96, None, "60%"), r"net, ntrial, type_dict .*budget=\.\.\."),
        (memplan.compare, (NET, ["auto"]), r"\['auto'\] .*as strategies=\.\.\., budgets=\.\.\."),
        (memplan.frontier, (NET, [0.5, 1]), r"\[0\.5, 1\] .*budgets=\.\.\."),
        (memplan.max_batch_size, (NET, "1GiB", "auto"), r"only net, budget .* 'auto' "),
        (
            TrainStep,
            (BLOCK, None, "60%"),
            r"TrainStep\(\) takes only block, loss .*as budget=\.\.\.",
        ),
        (
            planned,
            (BLOCK, "60%"),
            r"only block .* '60%' .*option that is \(help\(planned\) has all",
        ),
    ],
)
def test_an_option_without_a_name_is_refused_with_the_names(
    function: Callable[..., Any], given: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        function(*given)


def test_who_asks_for_a_signature_gets_that_of_the_function() -> None:
    assert list(inspect.signature(memplan.plan).parameters)[:2] == ["net", "strategy"]
    assert list(inspect.signature(TrainStep).parameters)[:3] == ["block", "loss", "budget"]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            lambda: memplan.compare(NET, budget="60%", data=(2, 3)),
            r"compare has no option 'budget'",
        ),
        (lambda: memplan.compare(NET, strategy="auto", data=(2, 3)), r"it has strategies, budgets"),
        (
            lambda: memplan.frontier(NET, budget=0.5, data=(2, 3)),
            r"frontier has no option 'budget'",
        ),
        (lambda: memplan.plan(NET, budgt="60%", data=(2, 3)), r"'budgt'; it has strategy, budget,"),
        (lambda: memplan.search_plan(NET, "60%"), r"if that is the budget.*: budget='60%'"),
        (lambda: memplan.search_plan(NET, 6, strategy="store_all"), r"leave one of them out"),
    ],
)
def test_an_option_that_there_is_not_is_no_shape(run: Callable[[], Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        run()


def test_a_shape_that_can_be_read_once_is_one() -> None:
    net = mx.sym.MakeLoss(mx.sym.FullyConnected(NET, num_hidden=2))
    plan = memplan.plan(net, strategy="store_all", data=map(int, ("4", "3")))
    assert plan.trace.shapes["data"] == (4, 3)
