"""Chains of slices: what a plan says is what its sequence takes, and no worse than revolve."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import UNIT, unit_chain
from memplan.search.chain import ChainPlans
from memplan.search.kernels.chain import PARTS
from memplan.search.revolve import forward_steps
from memplan.search.sliced_graph import SlicedGraph, descending
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate

MOST_STEPS = 10_000


@examples(200)
@given(st.lists(st.integers(0, 3), max_size=6))
def test_the_nearest_numbers_that_never_rise(numbers: list[int]) -> None:
    def distance(others: tuple[int, ...]) -> int:
        return sum(abs(a - b) for a, b in zip(numbers, others, strict=True))

    nearest = tuple(descending(numbers))
    falling = (
        others
        for others in itertools.product(range(4), repeat=len(numbers))
        if list(others) == sorted(others, reverse=True)
    )
    assert list(nearest) == sorted(nearest, reverse=True)
    assert distance(nearest) == min(map(distance, falling))


@pytest.mark.parametrize("nslots", [2, 3, 5])
def test_a_unit_chain_takes_no_more_than_revolve(nslots: int) -> None:
    """And its sequence takes as many seconds and bytes as the plan says, whatever is held."""
    graph = unit_chain(24)
    slices = SlicedGraph(graph, range(1, graph.nforward))
    budget = (nslots + 4) * UNIT
    plans = ChainPlans(slices.chain(), budget)
    npoints = graph.nforward - 1
    assert plans.seconds[0, -1, 0] <= npoints + forward_steps(npoints, nslots)
    for held in {plans.nearest(h) for h in range(0, PARTS, PARTS // 8)}:
        ops = slices.sequence(plans.plan(held), MOST_STEPS)
        assert ops is not None
        schedule = Schedule.sequence(graph, ops)
        assert simulate(schedule).peak_nbytes <= budget * (1.0 - held / PARTS) + UNIT
        forward = sum(graph.ops[op].seconds for op in ops if op < graph.nforward)
        assert forward <= plans.seconds[0, -1, held]
