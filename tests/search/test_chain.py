"""Chains of slices: what a plan says is what its sequence takes, and no worse than revolve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import UNIT, unit_chain
from memplan.search.chain import Chain, ChainPlans, corrected
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


@pytest.mark.parametrize("nslots", [2, 5])
def test_a_plan_says_what_is_held_when(nslots: int) -> None:
    """Of a chain of equal points to a point or so; corrected, exactly."""
    graph = unit_chain(24)
    slices = SlicedGraph(graph, range(1, graph.nforward))
    budget = (nslots + 4) * UNIT
    plans = ChainPlans(slices.chain(), budget)
    plan = plans.plan(0)
    ops = slices.sequence(plan, MOST_STEPS)
    assert ops is not None
    live_nbytes = np.array(simulate(Schedule.sequence(graph, ops)).live_nbytes)
    making, backward = slices.most_held(ops, live_nbytes)
    assert max(np.nanmax(making), np.nanmax(backward)) == live_nbytes.max()
    chain = corrected(plans.chain, plan, making, backward)
    more_backward = chain.backward_nbytes - plans.chain.backward_nbytes
    more_making = chain.waiting_nbytes - plans.chain.waiting_nbytes
    ncompared = 0
    for part in plan:
        s = part.slice
        if np.isfinite(backward[s]):  # some slice has no backward op
            assert part.backward_nbytes >= backward[s] - 1.5 * UNIT
            assert part.backward_nbytes + more_backward[s] == pytest.approx(backward[s])
            ncompared += 1
        if part.making_nbytes and np.isfinite(making[s]):
            assert part.making_nbytes >= making[s] - 1.5 * UNIT
            assert part.making_nbytes + more_making[s] == pytest.approx(making[s])
            ncompared += 1
    assert ncompared > len(plan)


@examples(30)
@given(st.integers(0, 2**32 - 1), st.floats(0.5, 3.0))
def test_no_choice_is_cheaper_than_the_one_taken(seed: int, share: float) -> None:
    """By the recurrence, over all cuts and parts of the budget, with what it says of less."""
    random, n = np.random.default_rng(seed), 6
    crossing, kept = random.integers(0, 4, (n, n, n)), random.integers(0, 4, (n, n))
    read = np.cumsum(random.integers(0, 3, (n, n)), axis=1)
    rows = (row.astype(float) for row in random.integers(1, 9, (5, n)))
    seconds, running, keeping, waiting, backward = rows
    chain = Chain(
        seconds, 1.0 * crossing, running, keeping, 1.0 * kept, 1.0 * read, waiting, backward
    )
    plans = ChainPlans(chain, int(20 * share))
    unit, known = plans.unit, plans.seconds
    parts = [np.rint(nbytes / unit).astype(int) for nbytes in (crossing, kept, read)]

    def choices(s: int, t: int, held: int) -> Iterator[float]:
        own = max(waiting[t] + keeping[s], backward[s] - (read[s, t] - read[s, s]))
        rest = held + parts[1][s, t]
        if own <= unit * (PARTS - held) and rest <= PARTS:
            yield seconds[s] + known[s + 1, t, rest]
        for k in range(s + 1, t + 1):
            need = waiting[t] + max(crossing[s, j, t] + running[j] for j in range(s, k))
            more, dead = parts[0][s, k, t], parts[2][s, t] - parts[2][s, k - 1]
            if need <= unit * (PARTS - held) and held + more <= PARTS:
                before = known[s, k - 1, max(0, held - dead)]
                yield seconds[s:k].sum() + known[k, t, held + more] + before

    for s, t in itertools.combinations(range(n), 2):
        for held in range(0, PARTS + 1, 7):
            least = min(choices(s, t, held), default=np.inf)
            assert known[s, t, held] == pytest.approx(least)
