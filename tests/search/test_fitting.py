"""Rounds that pack attempt by attempt: what they find has offsets, and is the same again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import training_graphs
from helpers.held_out import held_out
from memplan.search import speed
from memplan.search.kernels.arrays import Array
from memplan.search.kernels.packing import list_buffers, quick_nbytes
from memplan.search.kernels.sequence import load
from memplan.search.mending import MENDING
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequences import Rules
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())
FIRST = Round(False, 2.0, 0.1, recreates=True)


def begun(graph: TrainingGraph, share: float, seed: int) -> tuple[Rounds, int]:
    """A search that has found something in this share of the unplanned peak, if it can."""
    budget = int(share * simulate(Schedule.unplanned(graph)).peak_nbytes)
    search = Rounds(graph, RULES, seed=seed, stop=Stop.after(1e6))
    search.round(FIRST, budget)
    return search, budget


def mended(seed: int) -> tuple[Rounds, Array, Array, int]:
    """What a first round finds, what a longer one that packs does, and the budget."""
    search, budget = begun(dict(held_out())["wide tree"], 0.5, seed)
    start, best = best_sequence(search.found), search.nothing()
    kind = MENDING._replace(length=0.5)
    search.round(kind, budget, best=best, start=start, packed_nbytes=budget)
    return search, start, best_sequence(best), budget


def quickly_placed(search: Rounds, sequence: Array) -> int:
    """The fewest bytes of quick placements."""
    load(search.model, search.state, sequence, len(sequence), 0)
    count, on_top = list_buffers(search.model, search.state, search.packing, 0)
    return int(quick_nbytes(search.packing, count, 0)[0]) + on_top


@pytest.mark.parametrize("seed", [0, 24])
def test_a_round_that_packs_finds_what_quick_placements_fit(seed: int) -> None:
    search, first, found, budget = mended(seed)
    assert quickly_placed(search, first) > budget
    assert quickly_placed(search, found) <= budget
    assert validate(search.schedule(found)).valid
    assert search.seconds(found) < search.seconds(first) + 0.03 * search.unit


@examples(30)
@given(training_graphs(), st.floats(0.5, 1.0), st.integers(0, 100))
def test_what_it_finds_is_valid_and_placed_within_the_budget(
    graph: TrainingGraph, share: float, seed: int
) -> None:
    search, budget = begun(graph, share, seed)
    best = search.nothing()
    search.round(FIRST, budget, best=best, packed_nbytes=max(1, budget))
    sequence = best_sequence(best)
    if not len(sequence):
        return
    found = search.schedule(sequence)
    assert validate(found).valid
    assert simulate(found).peak_nbytes <= budget
    assert quickly_placed(search, sequence) <= max(1, budget)


def test_the_same_seed_finds_the_same_however_often_the_clock_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for seconds in (0.0, 1e6):
        monkeypatch.setattr(speed, "CHUNK_SECONDS", seconds)
        found.append(mended(24)[2].tolist())
    assert found[0] == found[1]
