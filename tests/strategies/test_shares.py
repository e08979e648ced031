"""What parts of the time and work what goes before the searches of `auto` gets."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from helpers.graphs import UNIT, unit_chain
from memplan.memory.memory import Blocks, Live, Memory, Packed
from memplan.search.round_kinds import MOST_RECREATED_FIRST
from memplan.step.graph import TrainingGraph
from memplan.strategies.base import Problem
from memplan.strategies.shares import (
    BEGINNINGS_SHARE,
    BEGINNINGS_SHARE_OF_LARGE,
    LITTLE_FOR_BEGINNINGS,
    PROOF_SHARE,
    PROOF_SHARE_IN_BLOCKS,
    PROOF_SHARE_OF_OTHERS,
    of_beginnings,
    of_proof,
)
from memplan.strategies.spaces.space import LARGE
from memplan.util.stop import SHARED_OF_SEARCHES, Stop

WORK = 1e6


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shared out is all the time, however long a test takes."""
    monkeypatch.setattr("memplan.util.stop.time", SimpleNamespace(monotonic=lambda: 0.0))


def chain_of(nops: int) -> TrainingGraph:
    """A chain of about so many ops."""
    return unit_chain((nops - 1) // 2)


@pytest.mark.parametrize(
    ("memory", "nops", "of_time", "of_work"),
    [
        (Packed(), MOST_RECREATED_FIRST, LITTLE_FOR_BEGINNINGS, BEGINNINGS_SHARE),
        (Blocks(), MOST_RECREATED_FIRST, LITTLE_FOR_BEGINNINGS, BEGINNINGS_SHARE),
        (Packed(), MOST_RECREATED_FIRST + 3, BEGINNINGS_SHARE, BEGINNINGS_SHARE),
        (Packed(), LARGE + 3, BEGINNINGS_SHARE_OF_LARGE, BEGINNINGS_SHARE_OF_LARGE),
        (Blocks(), LARGE + 3, BEGINNINGS_SHARE, BEGINNINGS_SHARE),
    ],
)
def test_of_little_time_beginnings_get_less_where_a_search_begins_quickly(
    memory: Memory, nops: int, of_time: float, of_work: float
) -> None:
    problem, stop = Problem(chain_of(nops), UNIT, memory=memory), Stop.after(3.0, work=WORK)
    until = of_beginnings(problem, stop)
    assert until.work_left == pytest.approx(of_work * WORK)
    assert until.deadline == pytest.approx(3.0 * of_time)


def test_of_much_time_beginnings_get_all_that_is_not_shared_out() -> None:
    problem, stop = Problem(unit_chain(8), UNIT), Stop.after(1e4, work=WORK)
    until = of_beginnings(problem, stop)
    kept = (1.0 - LITTLE_FOR_BEGINNINGS) * SHARED_OF_SEARCHES
    assert stop.deadline - until.deadline == pytest.approx(kept)
    assert until.work_left == pytest.approx(BEGINNINGS_SHARE * WORK)


@pytest.mark.parametrize(
    ("memory", "share"),
    [
        (Live(), PROOF_SHARE),
        (Packed(), PROOF_SHARE_OF_OTHERS),
        (Blocks(), PROOF_SHARE_IN_BLOCKS),
    ],
)
def test_a_proof_gets_its_share_of_little_time(memory: Memory, share: float) -> None:
    problem = dataclasses.replace(Problem(unit_chain(8), UNIT), memory=memory)
    for ends_soon in (True, False):
        until = of_proof(problem, Stop.after(3.0, work=WORK), ends_soon=ends_soon)
        assert until.deadline == pytest.approx(3.0 * share)
    much = Stop.after(1e4, work=WORK)
    soon, late = (of_proof(problem, much, ends_soon=ends_soon) for ends_soon in (True, False))
    assert soon.deadline > late.deadline
