"""Checkmate's approximation: the linear relaxation, rounded, and improved by a local search.

Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020
(arXiv:1910.02653), section 5. The program is :mod:`memplan.programs.stage_program`, the rounding
:mod:`memplan.programs.stage_rounding`. The search, which is not Checkmate's, is
:mod:`memplan.search.eviction`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from memplan.memory.memory import Live, cheapest
from memplan.programs.solver import DEFAULT_SOLVER, Program
from memplan.programs.stage_program import PAIRS, StageProgram
from memplan.programs.stage_rounding import relaxation, roundings
from memplan.search.evicted_least import evicted_least_or_end
from memplan.search.eviction import Evictions
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Outcome, Problem, Status, check_options
from memplan.util.stop import Stop


@dataclass(frozen=True)
class CheckmateLP:
    """Rounds the optimum of the relaxation at ``thresholds`` thresholds, the best one counts.

    As a rounded schedule may need more memory than the relaxation, that is solved again with
    the share 1 - a of the budget for every a of ``allowances``. A search, for which half of the
    time is left, then improves the best one until ``patience`` attempts in a row have not made it
    cheaper; with 0 there is none, and the schedule is as Checkmate's rounding makes it.
    ``solver`` is "HIGHS" or "CBC"; backward ops run once unless
    ``recompute_backward``.
    """

    time_limit: float | None = None
    solver: str = DEFAULT_SOLVER
    thresholds: int = 24
    allowances: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.03)
    patience: int = 200
    recompute_backward: bool = False

    def __post_init__(self) -> None:
        check_options(self)

    def solve(self, problem: Problem) -> Outcome:
        """The best rounded schedule, with the value of the relaxation as its proven bound.

        The bound holds for all schedules that advance the frontier in base order. Without a
        budget: within the peak that :func:`memplan.search.evicted_least.evicted_least` reaches. An
        interrupt ends the search with what is found so far.
        """
        if (unplanned := problem.unplanned()) is not None:
            return unplanned
        stop = problem.stop(self.time_limit, effort=1.0)
        graph = problem.graph
        if problem.budget_nbytes is None:
            least = evicted_least_or_end(graph, stop.share(0.3), most_seconds=problem.most_seconds)
            schedule = self._round(graph, simulate(least).peak_nbytes, stop).schedule
            best = problem.cheapest([least, schedule])
            return Outcome.unproved(best, cut_by_clock=stop.cut_by_clock)
        outcomes: list[Outcome] = []

        def solve(aim: int, until: Stop) -> Schedule | None:
            outcomes.append(self._round(graph, aim, until))
            return outcomes[-1].schedule

        schedule = problem.aim_lower(solve, stop, share=0.5)
        # Nothing is aimed at where the budget is below zero.
        first = next(iter(outcomes), Outcome(Status.NO_PLAN_FOUND, in_order=True))
        return self._outcome(problem, first, schedule, stop)

    def _outcome(
        self, problem: Problem, first: Outcome, schedule: Schedule | None, stop: Stop
    ) -> Outcome:
        """What ``schedule`` is; ``first`` tells what is proved for the budget itself."""
        if first.status is Status.INFEASIBLE:
            return first
        best = problem.cheapest([schedule])
        if best is None and stop.is_ended:
            raise KeyboardInterrupt
        bound = first.lower_bound_seconds
        status = Status.NO_PLAN_FOUND if best is None else Status.FEASIBLE
        if bound is not None and problem.is_closed(best, bound):
            status = Status.OPTIMAL
        return Outcome(status, best, bound, in_order=True, cut_by_clock=stop.cut_by_clock)

    def _round(self, graph: TrainingGraph, budget_nbytes: int, stop: Stop) -> Outcome:
        """The best rounded schedule in ``budget_nbytes`` of live bytes.

        An interrupt ends it, and ``stop``, with what is found so far.
        """
        found = Outcome(Status.NO_PLAN_FOUND, in_order=True)
        try:
            for outcome in self._rounded(graph, budget_nbytes, stop):
                found = outcome
        except KeyboardInterrupt:
            stop.end()
        return found

    def _rounded(self, graph: TrainingGraph, budget_nbytes: int, stop: Stop) -> Iterator[Outcome]:
        """What is known after the relaxation, each better rounding and the search."""
        best: Schedule | None = None
        bound: float | None = None
        contents: list[set[int]] = []
        halfway = stop.share(0.5) if self.patience else stop
        allowances = self.allowances if len(graph.ops) ** 2 <= PAIRS else ()
        for allowance in allowances:
            with Program(self.solver) as program:
                try:
                    stages = StageProgram(
                        graph,
                        int((1.0 - allowance) * budget_nbytes),
                        program,
                        recompute_backward=self.recompute_backward,
                        stop=halfway,
                    )
                except TimeoutError:
                    break
                answer = relaxation(stages, halfway if allowance else stop)
            if answer is not None and answer.infeasible and not allowance:
                yield Outcome(Status.INFEASIBLE, in_order=True)
                return
            if answer is None or answer.values is None:
                break
            if not allowance:
                bound = stages.seconds(answer.bound)
                contents = stages.contents(answer.values)
                yield _unproved(best, bound)
            schedules = roundings(
                stages,
                answer.values,
                thresholds=self.thresholds,
                stop=stop,
                within_nbytes=budget_nbytes,
            )
            for schedule in schedules:
                is_cheaper = best is None or schedule.seconds < best.seconds
                if is_cheaper and Live().is_within(schedule, budget_nbytes):
                    best = schedule
                    yield _unproved(best, bound)
        if self.patience and contents:
            yield _unproved(self._improved(graph, budget_nbytes, best, contents, stop), bound)

    def _improved(
        self,
        graph: TrainingGraph,
        budget_nbytes: int,
        best: Schedule | None,
        contents: Sequence[AbstractSet[int]],
        stop: Stop,
    ) -> Schedule | None:
        """The search from ``best``, if there is one, else from what the relaxation retains."""
        evictions = Evictions(graph, budget_nbytes, recompute_backward=self.recompute_backward)
        drops = evictions.drops_of(contents) if best is None else evictions.drops_in(best)
        fit = evictions.fit(drops, stop)
        if fit is None:
            return best
        fit = evictions.improve_or_end(fit, stop, patience=self.patience)
        return cheapest([*([best] if best else []), fit.schedule], budget_nbytes, Live())


def _unproved(best: Schedule | None, bound: float | None) -> Outcome:
    status = Status.NO_PLAN_FOUND if best is None else Status.FEASIBLE
    return Outcome(status, best, bound, in_order=True)
