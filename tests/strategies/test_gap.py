"""A search, and what is proved in it, ends where a plan is good enough, as ``gap`` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.graphs import UNIT, in_mxnets_order, unit_chain
from helpers.planning import NEVER_SECONDS
from memplan.memory.memory import Live
from memplan.programs.proof import Fact, ProofOptions
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import Status
from memplan.strategies.auto import WIDE, Auto
from memplan.strategies.base import DEFAULT_GAP, Problem
from memplan.strategies.spaces import flags, sequences
from memplan.strategies.spaces.flags import Flags
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Proving

GRAPH = unit_chain(16)
BUDGET = 8 * UNIT


@pytest.fixture(autouse=True)
def programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of all schedules would prove all there is before the first program."""
    monkeypatch.setattr(sequences, "MOST_OPS", 0)


def fitted(budget_nbytes: int = BUDGET) -> Schedule:
    """A schedule within the budget."""
    problem = Problem(GRAPH, budget_nbytes, time_limit=NEVER_SECONDS)
    schedule = Auto(effort=0.02).solve(problem).schedule
    assert schedule is not None
    return schedule


class Programs:
    """In place of the programs of moments: ever higher bounds, and how many were asked for."""

    def __init__(self, *facts: Fact) -> None:
        self.facts, self.asked = facts, list[int]()

    def __call__(self, graph: Any, aim: int, *_: Any, **__: Any) -> Iterator[Fact]:
        del graph
        for fact in self.facts:
            self.asked.append(aim)
            yield fact


def bounds(*seconds: float) -> Programs:
    return Programs(*(Fact(None, bound) for bound in seconds))


@pytest.mark.parametrize(("below", "asked"), [(1.0, 1), (3.0, 3), (9.0, 4)])
def test_a_known_plan_ends_the_proof(
    below: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = fitted()
    programs = bounds(*(known.seconds - below + n for n in range(4)))
    monkeypatch.setattr(sequences, "refine_moments", programs)
    problem = Problem(GRAPH, BUDGET, start=known, time_limit=NEVER_SECONDS)
    gap = 1.0 / GRAPH.seconds
    outcome = Auto(gap=gap, rounds=1).solve(problem)
    assert len(programs.asked) == asked
    assert not outcome.cut_by_clock
    assert outcome.lower_bound_seconds is not None
    assert outcome.lower_bound_seconds >= known.seconds - below + asked - 1
    if asked < 4:
        assert outcome.schedule == known


@pytest.mark.parametrize("gap", [WIDE, DEFAULT_GAP])
def test_with_a_wide_gap_the_proof_ends_at_what_a_search_begins_with(
    gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first program said that it is good enough, and more of them took half a minute."""
    known, searched = fitted(), list[Any]()
    programs = bounds(*[known.seconds - 0.5 * gap * GRAPH.seconds] * 3)
    monkeypatch.setattr(sequences, "refine_moments", programs)
    monkeypatch.setattr(Sequences, "beginnings", lambda *_: [known])
    monkeypatch.setattr(Sequences, "improve", lambda *arguments: searched.append(arguments))
    outcome = Auto(gap=gap).solve(Problem(GRAPH, BUDGET, time_limit=NEVER_SECONDS))
    assert len(programs.asked) == (1 if gap >= WIDE else 3)
    assert outcome.schedule == known
    assert not searched
    assert not outcome.cut_by_clock


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_of_less_than_the_budget_is_judged_by_the_bound_of_the_budget(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own programs have less effort, and may prove less."""
    small = fitted(BUDGET - UNIT)

    class Larger(Live):
        """What fits is over the budget by a tensor, as where it is packed badly."""

        @property
        def is_exact(self) -> bool:
            return False

        def excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
            del roughly
            is_over = schedule is not small or not fits
            return UNIT if is_over else super().excess(schedule, budget_nbytes)

    first = fitted()
    at_budget = Programs(Fact(first, small.seconds - 1.0))
    lower = Programs(*[Fact(small, GRAPH.seconds)] * 3)

    def refine(graph: Any, aim: int, *_: Any) -> Iterator[Fact]:
        return (at_budget if aim == BUDGET else lower)(graph, aim)

    monkeypatch.setattr(sequences, "refine_moments", refine)
    problem = Problem(GRAPH, BUDGET, memory=Larger(), time_limit=NEVER_SECONDS)
    facts: list[Fact] = []
    options = ProofOptions(gap_seconds=1.0)
    problem.space.prove(Proving(problem, problem.stop(None), options, facts))
    ntries = len(set(lower.asked))
    assert len(at_budget.asked) == 1
    assert len(lower.asked) == (1 if fits else 3 * ntries)
    assert max(fact.bound_seconds for fact in facts) == small.seconds - 1.0


def test_a_known_mirrored_plan_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = in_mxnets_order(GRAPH)
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * 3 // 4
    problem = Problem(graph, budget, space=Flags(), time_limit=NEVER_SECONDS)
    known = Auto(effort=0.1).solve(problem).schedule
    assert known is not None
    programs = bounds(*[known.seconds - 0.5] * 3)
    monkeypatch.setattr(flags, "refine_flags", programs)
    started = dataclasses.replace(problem, start=known)
    outcome = Auto(gap=1.0 / graph.seconds).solve(started)
    assert len(programs.asked) == 1
    assert outcome.schedule == known
    assert outcome.status is Status.FEASIBLE
    assert not outcome.cut_by_clock


def test_where_no_plan_fits_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan the first program ends it, and looking for one took a quarter of a minute."""
    monkeypatch.setattr(sequences, "refine_moments", bounds(float("inf")))
    monkeypatch.setattr(Sequences, "beginnings", None)  # and is not called
    outcome = Auto(gap=WIDE).solve(Problem(GRAPH, BUDGET, time_limit=NEVER_SECONDS))
    assert outcome.status is Status.INFEASIBLE


def test_what_a_search_begins_with_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known, made = fitted(), list[Any]()

    def beginnings(*arguments: Any) -> list[Schedule]:
        made.append(arguments)
        return [known]

    monkeypatch.setattr(sequences, "refine_moments", bounds(GRAPH.seconds, GRAPH.seconds))
    monkeypatch.setattr(Sequences, "beginnings", beginnings)
    Auto(gap=WIDE, rounds=1).solve(Problem(GRAPH, BUDGET, time_limit=NEVER_SECONDS))
    assert len(made) == 1
