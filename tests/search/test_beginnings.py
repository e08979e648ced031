"""What a search begins with beside a schedule that it is given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from helpers.graphs import UNIT, unit_chain
from memplan.search.eviction import Evictions
from memplan.search.kernels.annealing import BEST_SECONDS
from memplan.search.kernels.arrays import Array
from memplan.search.mending import MENDING
from memplan.search.round_kinds import FIRST_TO_MEND, Round
from memplan.search.rounds import Rounds
from memplan.search.sequence_search import cheapest
from memplan.search.sequences import Rules
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())


class Noting(Rounds):
    """Rounds that note their kinds and what they were told to begin with."""

    noted: list[tuple[Round, Array | None]]

    def round(self, kind: Round, *args: Any, start: Array | None = None, **options: Any) -> Array:
        self.noted.append((kind, start))
        return super().round(kind, *args, start=start, **options)


def begun(start: Schedule, budget: int, excess: Any = None, **options: Any) -> Noting:
    """One round of a search that began with ``start``."""
    stop = Stop.after(1e6, work=1e6)
    searching = Noting(start.graph, RULES, seed=0, stop=stop, excess=excess, **options)
    searching.noted = []
    searching.start_from(start, budget)
    cheapest(searching, budget, 1)
    return searching


def expensive(budget: int) -> Schedule:
    """What greedy eviction makes of a chain within the budget, with the loss run twice more."""
    graph = unit_chain(30)
    graph = graph.with_seconds([1.3 if i == 30 else op.seconds for i, op in enumerate(graph.ops)])
    fit = Evictions(graph, budget).fit((), Stop(math.inf))
    assert fit is not None
    again = [op for op in fit.schedule.ops for _ in range(3 if op == 30 else 1)]
    return Schedule.sequence(graph, again)


def test_beside_a_beginning_a_short_round_begins_with_nothing() -> None:
    start = expensive(24 * UNIT)
    searching = begun(start, 24 * UNIT)
    assert searching.noted[0] == (FIRST_TO_MEND, None)
    assert not FIRST_TO_MEND.from_best
    assert searching.found.figures[BEST_SECONDS] < start.seconds
    assert not begun(start, 24 * UNIT, enough_seconds=start.seconds).noted


def test_what_a_search_began_with_is_not_lost_to_what_does_not_fit() -> None:
    start = expensive(24 * UNIT)

    def excess(schedule: Schedule, _: int, **__: Any) -> int:
        return int(not math.isclose(schedule.seconds, start.seconds))

    found = begun(start, 24 * UNIT, excess).best()
    assert found is not None
    assert found.seconds == pytest.approx(start.seconds)


def test_a_beginning_that_does_not_fit_is_mended() -> None:
    start = expensive(24 * UNIT)

    def excess(schedule: Schedule, _: int, **__: Any) -> int:
        return int(schedule.seconds > start.seconds - 1.0)

    searching = begun(start, 24 * UNIT, excess)
    kind, begins_with = searching.noted[0]
    assert kind == MENDING
    assert begins_with is not None
    assert searching.seconds(begins_with) > start.seconds - 1.0
    found = searching.best()
    assert found is not None
    assert found.seconds < start.seconds
