"""Drops what is cheapest to recompute wherever the peak is, and improves that by search."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from memplan.search.evicted_least import evicted_least_or_end
from memplan.search.eviction import Evictions
from memplan.step.schedule import Schedule
from memplan.strategies.base import MOST_OVERHEAD, Outcome, Problem, check_options
from memplan.util.stop import Stop


@dataclass(frozen=True)
class Evict:
    """Drops what is cheapest per byte where too much is alive, then improves what it dropped.

    By :mod:`memplan.search.eviction`, for graphs that are too large for a program. It ends after
    ``patience`` attempts in a row that found no cheaper schedule, at the latest after the usual
    work or ``time_limit`` seconds. Backward ops run once unless ``recompute_backward``. A schedule
    with more than three times the seconds of the step in recomputation does not count, unless
    ``max_overhead`` says otherwise.
    """

    time_limit: float | None = None
    patience: int = 500
    seed: int = 0
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
        stop = problem.stop(self.time_limit, effort=1.0)
        if problem.budget_nbytes is None:
            most_seconds = problem.most_seconds
            best: Schedule | None = evicted_least_or_end(
                problem.graph, stop, most_seconds=most_seconds
            )
        else:
            best = self.within(problem, stop)
        is_open = problem.max_overhead is None
        if best is not None and is_open and best.overhead > MOST_OVERHEAD:
            best = None
        best = problem.cheapest([best])
        if best is None and stop.is_ended:
            raise KeyboardInterrupt
        return Outcome.unproved(best, cut_by_clock=stop.cut_by_clock)

    def within(self, problem: Problem, stop: Stop) -> Schedule | None:
        """The cheapest schedule found within the budget; an interrupt ends ``stop``."""
        return problem.aim_lower(partial(self._fitted, problem), stop, share=0.5)

    def _fitted(self, problem: Problem, aim: int, until: Stop) -> Schedule | None:
        """The cheapest schedule found with at most ``aim`` live bytes."""
        search = Evictions(problem.graph, aim, recompute_backward=self.recompute_backward)
        online = search.cheapest_online(until)
        fit = search.first(online, until)
        if fit is None:
            return online
        fit = search.improve_or_end(fit, until, patience=self.patience, seed=self.seed)
        return fit.schedule
