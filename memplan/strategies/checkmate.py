"""Checkmate: the cheapest schedule within a budget, by an integer program.

Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020
(arXiv:1910.02653), section 4. For mirroring the program decides over flags
(:mod:`memplan.programs.mirror_program`), else over all of the step
(:mod:`memplan.programs.stage_program`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from memplan.programs.proof import Fact, ProofOptions
from memplan.programs.solver import DEFAULT_SOLVER
from memplan.step.schedule import Schedule
from memplan.strategies.base import (
    DEFAULT_GAP,
    Outcome,
    Problem,
    Status,
    check_options,
)
from memplan.strategies.least import least
from memplan.strategies.spaces.space import Proving, SearchOptions
from memplan.util.stop import Stop

# Without a budget, the part of the time in which the least memory is looked for.
LEAST_SHARE = 0.4


@dataclass(frozen=True)
class Checkmate:
    """Solves the integer program, then repairs its schedule where other bytes must fit.

    The program bounds live bytes. What is added to it, for every realisation: a schedule to begin
    with (``start``, the problem's, or one made by eviction); a bound by a few moments of the step,
    which is often enough; and where MXNet's blocks or packed memory are what must fit, at most
    ``program_share`` of the time goes into the program and the rest into annealing in those bytes.

    A schedule that is proved to be within ``gap`` (seconds / seconds of the unplanned step) of the
    cheapest ends it; else it ends after ``effort`` times the usual work (infinite: when time is
    up). ``solver`` is "HIGHS" or "CBC". The relaxation of the program over the step is rounded at
    ``thresholds`` thresholds, and at most ``search_share`` of the time goes into a better first
    schedule; backward ops run once unless ``recompute_backward``. An optimum of that program is one
    among the schedules that advance the frontier in base order
    (:mod:`memplan.search.rematerialize`), and so is the bound; what a few moments prove
    (:mod:`memplan.programs.moments`) holds for any order.
    """

    time_limit: float | None = None
    gap: float = DEFAULT_GAP
    effort: float = 1.0
    solver: str = DEFAULT_SOLVER
    program_share: float = 0.3
    thresholds: int = 12
    search_share: float = 0.3
    recompute_backward: bool = False
    seed: int = 0
    start: Schedule | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def solve(self, problem: Problem) -> Outcome:
        """The cheapest schedule found within the budget, with a proven bound.

        Without a budget: the least memory that annealing finds, then the cheapest schedule in it.
        An interrupt ends the search with what is found so far.
        """
        if (unplanned := problem.unplanned()) is not None:
            return unplanned
        stop = problem.stop(self.time_limit, effort=self.effort)
        starts = problem.starts(self.start)
        if problem.budget_nbytes is None:
            smallest = least(problem, starts, stop.share(LEAST_SHARE), SearchOptions(self.seed))
            if stop.is_over():
                return Outcome(Status.FEASIBLE, smallest, cut_by_clock=True)
            in_least = problem.within(problem.memory.nbytes(smallest))
            outcome = self._cheapest(in_least, [smallest], stop)
            # What was proved holds for that memory, not for a budget that the user named.
            schedule = problem.cheapest([smallest, outcome.schedule])
            return Outcome(Status.FEASIBLE, schedule, cut_by_clock=outcome.cut_by_clock)
        return self._cheapest(problem, starts, stop)

    def _cheapest(self, problem: Problem, starts: list[Schedule], stop: Stop) -> Outcome:
        facts = [Fact(start, problem.graph.seconds) for start in starts]
        share = 1.0 if problem.counts_live else self.program_share
        options = ProofOptions(
            self.solver,
            self.recompute_backward,
            self.thresholds,
            self.search_share,
            self.effort,
            self.gap * problem.graph.seconds,
        )
        try:
            problem.space.program(Proving(problem, stop.share(share), options, facts))
            outcome = _outcome(problem, facts)
            if outcome.status in (Status.OPTIMAL, Status.INFEASIBLE) or problem.counts_live:
                return dataclasses.replace(outcome, cut_by_clock=stop.cut_by_clock)
            start = outcome.schedule or next(iter(starts), None)
            search_options = SearchOptions(
                self.seed, reorder=False, recompute_backward=self.recompute_backward
            )
            schedule = problem.space.improve(problem, start, stop, search_options)
            if schedule is not None:
                facts.append(Fact(schedule, 0.0))
        except KeyboardInterrupt:
            if problem.cheapest(fact.schedule for fact in facts) is None:
                raise
        outcome = _outcome(problem, facts)
        return dataclasses.replace(outcome, cut_by_clock=stop.cut_by_clock)


def _outcome(problem: Problem, facts: list[Fact]) -> Outcome:
    """What the program's bounds and schedules amount to."""
    best = problem.cheapest(fact.schedule for fact in facts)
    # A schedule in another order may be there although none in base order is within the budget.
    bounds = [fact for fact in facts if best is None or not math.isinf(fact.bound_seconds)]
    highest = max(bounds, key=lambda fact: fact.bound_seconds, default=None)
    bound = problem.graph.seconds if highest is None else highest.bound_seconds
    in_order = highest is not None and highest.in_order
    if math.isinf(bound):
        return Outcome(Status.INFEASIBLE, in_order=in_order)
    if best is None:
        return Outcome(Status.NO_PLAN_FOUND, None, bound, in_order)
    status = Status.OPTIMAL if problem.is_closed(best, bound) else Status.FEASIBLE
    return Outcome(status, best, min(bound, best.seconds), in_order)
