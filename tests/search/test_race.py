"""Races: who goes on, how long, and what becomes of what was found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.graphs import UNIT, unit_chain
from memplan.search.kernels.annealing import Best
from memplan.search.kernels.arrays import Array
from memplan.search.race import BEGUN, CONTINUED, race
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds
from memplan.search.sequences import Rules
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())
BUDGET = 100 * UNIT


def searching(enough_seconds: float = 0.0) -> Rounds:
    stop = Stop.after(1e6)
    return Rounds(unit_chain(16), RULES, seed=0, stop=stop, enough_seconds=enough_seconds)


def with_copies(ncopies: int) -> Array:
    """A sequence that runs the last forward op again so often."""
    return np.array([*range(16), *ncopies * [15], *range(16, 33)])


class Noted:
    """In place of rounds: the first of each runner finds so many copies, the others one less."""

    def __init__(self, search: Rounds, ncopies: list[int]) -> None:
        self.search, self.ncopies, self.kinds = search, ncopies, list[Round]()
        self.found = list[int]()

    def __call__(self, kind: Round, _: int, *, best: Best, start: Array | None, stop: Stop) -> Any:
        ncopies = self.ncopies[len(self.kinds)] if start is not None else int(best.figures[0]) - 34
        self.kinds.append(kind)
        self.found.append(ncopies)
        sequence = with_copies(ncopies)
        best.sequence[: len(sequence)] = sequence
        best.figures[:] = len(sequence), self.search.seconds(sequence), 0
        return sequence


def test_the_better_half_goes_on_and_its_rounds_get_longer() -> None:
    search = searching()
    noted = Noted(search, [20, 9, 19, 10, 18, 11, 17, 12])
    search.round = noted  # type: ignore[method-assign, assignment]
    race(search, [search.unplanned], BUDGET, search.stop)
    lengths = [CONTINUED._replace(length=times * CONTINUED.length) for times in (1.0, 2.0, 4.0)]
    assert noted.kinds == [*8 * [BEGUN], *4 * lengths[:1], *2 * lengths[1:2], lengths[2]]
    assert noted.found[8:] == [8, 9, 10, 11, 7, 8, 6]
    assert search.found.figures[0] == len(with_copies(6))


def test_a_race_ends_with_what_is_enough() -> None:
    search = searching(enough_seconds=1e6)
    noted = Noted(search, [20])
    search.round = noted  # type: ignore[method-assign, assignment]
    race(search, [search.unplanned], BUDGET, search.stop)
    assert len(noted.kinds) == 1


def test_what_was_found_before_an_interrupt_is_offered() -> None:
    search = searching()
    noted = Noted(search, [20, 5])  # the third round is one too many

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if len(noted.kinds) == 2:
            raise KeyboardInterrupt
        return noted(*arguments, **options)

    search.round = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        race(search, [search.unplanned], BUDGET, search.stop)
    assert search.found.figures[0] == len(with_copies(5))


def test_starts_are_taken_in_turns() -> None:
    search, starts = searching(), [with_copies(1), with_copies(2)]
    begun: list[int] = []

    def noted(kind: Round, *_: Any, start: Array | None, **__: Any) -> Any:
        begun.append(0 if start is None else len(start))
        return start

    search.round = noted  # type: ignore[method-assign, assignment]
    race(search, starts, BUDGET, search.stop)
    assert begun[:4] == [34, 35, 34, 35]
    assert not search.found.figures[0]
