"""Losses that take turns: the backward pass of each runs before the forward pass of the next."""

from __future__ import annotations

import dataclasses

import pytest

from helpers.graphs import unit_chain
from helpers.heads import heads
from memplan.search.by_loss import best_order, loss_by_loss, losses_of, order_by_loss
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate


@pytest.mark.parametrize("once", [False, True])
def test_losses_take_turns(once: bool) -> None:
    graph = heads(3, once=once)
    order = order_by_loss(graph)
    assert order is not None
    assert losses_of(graph) == [3, 6, 9]
    assert [graph.ops[op].name for op in order[:7]] == [
        *("trunk", "f0_0", "f0_1", "f0_2", "b0_2", "b0_1", "b0_0")
    ]
    schedule = Schedule.sequence(graph, order)
    assert validate(schedule).valid
    assert simulate(schedule).peak_nbytes < simulate(Schedule.unplanned(graph)).peak_nbytes
    firsts = [op for op in order if graph.ops[op].name.endswith("_0") and op < graph.nforward]
    assert firsts == sorted(firsts), "as do random ops"


def test_no_op_runs_before_what_it_differentiates() -> None:
    """Which it need not depend on: it may read other tensors only."""
    graph = heads(3)
    ops = [
        dataclasses.replace(op, differentiates=9, after=()) for op in graph.ops if op.name == "b0_2"
    ]
    place = [op.name for op in graph.ops].index("b0_2")
    graph = dataclasses.replace(graph, ops=(*graph.ops[:place], *ops, *graph.ops[place + 1 :]))
    assert 9 not in graph.dependencies[place]
    other = loss_by_loss(graph, reorder=True, recompute_backward=False)
    assert other.graph is not graph
    assert other.order.index(9) < other.order.index(place)


def test_one_loss_has_no_turns() -> None:
    for graph in (heads(1), unit_chain(8)):
        assert order_by_loss(graph) is None
        assert loss_by_loss(graph, reorder=True, recompute_backward=False).graph is graph


def test_without_leave_no_op_moves() -> None:
    graph = heads(3)
    assert best_order(graph, reorder=False, recompute_backward=False).graph is graph


@pytest.mark.parametrize("recompute_backward", [False, True])
def test_the_same_ops_may_run_again(recompute_backward: bool) -> None:
    graph = heads(3, once=True)
    other = best_order(graph, reorder=True, recompute_backward=recompute_backward)
    assert other.graph is not graph
    for op, changed in zip(other.order, other.graph.ops, strict=True):
        allowed = graph.ops[op].recomputable and (recompute_backward or op < graph.nforward)
        assert changed.recomputable is allowed
    schedule = other.back(Schedule.unplanned(other.graph))
    assert other.there(schedule) == Schedule.unplanned(other.graph)
