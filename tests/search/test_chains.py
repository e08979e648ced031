"""Moves of whole chains: what they change at once, and which plans only they find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.graphs import UNIT, unit_chain
from helpers.planning import NEVER_SECONDS
from memplan.search.kernels.model import sequence_model
from memplan.search.kernels.moves import propose
from memplan.search.kernels.sequence import load, undo
from memplan.search.kernels.state import CHANGES, LENGTH, sequence_state
from memplan.search.rematerialize import repeatable
from memplan.search.round_kinds import CHAIN_ROUNDS, ROUNDS, Round
from memplan.search.rounds import Rounds, Rules
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import spaces
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem
from memplan.strategies.spaces import Moves
from memplan.util.stop import Stop

PLENTY = 1e6
RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())


def test_one_move_recomputes_a_long_chain_and_another_takes_it_back() -> None:
    graph = unit_chain(24)
    model = sequence_model(graph, repeatable(graph), reorder=True)
    state = sequence_state(model, 400, 0)
    nops = len(model.seconds)
    load(model, state, np.arange(nops), nops, 6 * UNIT)
    for is_done in (lambda length: length > nops + 15, lambda length: length <= nops + 3):
        for _ in range(20_000):
            state.totals[CHANGES] = 0
            propose(model, state, True)
            if is_done(state.totals[LENGTH]):
                break
            undo(model, state)
        assert is_done(state.totals[LENGTH])


@pytest.mark.parametrize("seed", [0, 1])
def test_near_the_least_memory_only_they_find_a_plan(seed: int) -> None:
    graph, budget = unit_chain(32), 5 * UNIT
    found = {}
    for chains in (False, True):
        search = Rounds(graph, RULES, seed=seed, stop=Stop.after(PLENTY))
        search.round(Round(False, 1.0, 0.5, chains=chains), budget)
        found[chains] = search.best()
    assert found[False] is None
    best = found[True]
    assert best is not None
    assert validate(best).valid
    assert simulate(best).peak_nbytes <= budget


def test_they_begin_with_the_unplanned_step_and_with_a_weight_of_their_own() -> None:
    """Elsewhere they would go on from what other rounds got stuck in."""
    graph, budget = unit_chain(24), 6 * UNIT
    ends = []
    for weight, first in ((1.0, None), (1e45, 40)):
        search = Rounds(graph, RULES, seed=0, stop=Stop.after(PLENTY))
        search.weight = weight
        if first is not None:
            search.first = np.array([*search.first[:first], 3, *search.first[first:]])
        ends.append(search.round(Round(False, 1.0, 0.1, chains=True), budget).tolist())
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("units", "kinds"), [(5, CHAIN_ROUNDS), (7, ROUNDS)])
def test_the_last_search_makes_them_where_plans_cost_more_than_a_forward_pass(
    monkeypatch: pytest.MonkeyPatch, units: int, kinds: tuple[Round, ...]
) -> None:
    asked: list[tuple[Round, ...]] = []

    def improve(*arguments: Any) -> Schedule | None:
        start, _, moves = arguments[2:]
        assert isinstance(moves, Moves)
        asked.append(moves.kinds)
        return start

    graph = unit_chain(24)
    monkeypatch.setattr(spaces.Sequences, "improve", improve)
    Auto(effort=0.03, gap=0.0).solve(Problem(graph, units * UNIT, time_limit=NEVER_SECONDS))
    assert asked[-1] == kinds
