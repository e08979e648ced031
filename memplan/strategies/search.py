"""Near-optimal schedules in seconds, of graphs of any size, in the bytes that are to count."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memplan.step.schedule import Schedule
from memplan.strategies.base import Outcome, Problem, check_options
from memplan.strategies.least import least
from memplan.strategies.spaces.space import SearchOptions


@dataclass(frozen=True)
class Search:
    """Simulated annealing, in the bytes that count, so nothing is proved.

    For mirroring over sets of flags (:mod:`memplan.search.flag_annealing`), else over sequences of
    executions (:mod:`memplan.search.sequence_search`), in which ops may change their order if
    ``reorder``, and backward ops run once unless ``recompute_backward``. It ends after ``effort``
    times the usual work (infinite: when time is up), or after ``rounds`` of annealing if they are
    given; unless ``time_limit`` seconds cut it, the same seed gives the same schedule on any
    machine. ``start`` is a schedule to start from: what is found is never worse.
    Where the installation could not compile for this machine, the first call does, in half a
    minute beyond the limit.
    """

    time_limit: float | None = None
    effort: float = 1.0
    rounds: int | None = None
    seed: int = 0
    start: Schedule | None = None
    reorder: bool = True
    recompute_backward: bool = False

    def __post_init__(self) -> None:
        check_options(self)

    def solve(self, problem: Problem) -> Outcome:
        """The cheapest schedule found within the budget; without one, that of least memory.

        An interrupt ends the search with what is found so far.
        """
        if (unplanned := problem.unplanned()) is not None:
            return unplanned
        problem.space.prepare()
        stop = problem.stop(self.time_limit, effort=math.inf if self.rounds else self.effort)
        options = SearchOptions(self.seed, self.rounds, self.reorder, self.recompute_backward)
        starts = problem.starts(self.start)
        if problem.budget_nbytes is None:
            best: Schedule | None = least(problem, starts, stop, options)
        else:
            start = problem.cheapest(starts) or next(reversed(starts), None)
            best = problem.space.improve(problem, start, stop, options)
        return Outcome.unproved(best, cut_by_clock=stop.cut_by_clock)
