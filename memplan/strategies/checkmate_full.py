"""Checkmate: the cheapest schedule within a budget, by an integer program over all of the step.

Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020
(arXiv:1910.02653), section 4. The program is :mod:`memplan.programs.stage_program`.
"""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from memplan.programs.refinement import refine
from memplan.programs.rounding import relaxation, roundings
from memplan.programs.solver import DEFAULT_SOLVER, TOLERANCE, Program, check_solver
from memplan.programs.stage_program import StageProgram
from memplan.search.eviction import Drop, Evictions, lowest
from memplan.search.rematerialize import cheapest
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Outcome, Status
from memplan.util.progress import tell

# A first schedule is searched for until so many attempts in a row have not made it cheaper.
PATIENCE = 200

# Part of the time left that goes into the program of a few moments.
MOMENTS_SHARE = 0.4


@dataclass(frozen=True)
class CheckmateFull:
    """The integer program, first at the few moments that matter, then if need be at all of them.

    ``solver`` is "HIGHS" or "CBC", ``start`` a schedule to start from. At most
    ``search_share`` of the time goes into a better first schedule. Backward ops run once unless
    ``recompute_backward``. An optimum is one among the schedules that advance the frontier in
    base order (:mod:`memplan.search.rematerialize`), and so is the bound; what a few moments prove
    (:mod:`memplan.programs.moments`) holds for any order.
    """

    time_limit: float = 60.0
    solver: str = DEFAULT_SOLVER
    thresholds: int = 12
    search_share: float = 0.3
    recompute_backward: bool = False
    start: Schedule | None = None

    def __post_init__(self) -> None:
        check_solver(self.solver)

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest schedule found whose peak of live bytes is within the budget.

        Without a budget: the lowest peak that :func:`memplan.search.eviction.lowest` finds, then
        the cheapest schedule within it. An interrupt ends the search with what is found so far.
        """
        deadline = time.monotonic() + self.time_limit
        if budget_nbytes is None:
            least = lowest(graph, time.monotonic() + 0.3 * self.time_limit)
            shorter = replace(self, time_limit=deadline - time.monotonic(), start=least)
            found = shorter.solve(graph, simulate(least).peak_nbytes)
            # What was proved holds for that memory, not for a budget that the user named.
            return replace(found, status=Status.FEASIBLE, lower_bound=None)
        unplanned = Schedule.unplanned(graph)
        if simulate(unplanned).peak_nbytes <= budget_nbytes:
            return Outcome(Status.OPTIMAL, unplanned, graph.seconds)
        search = _Search(self, graph, budget_nbytes, deadline)
        try:
            return search.run()
        except KeyboardInterrupt:
            if search.best is None:
                raise
            return search.outcome()


class _Search:
    """What is known so far: a schedule within the budget, and a bound."""

    def __init__(
        self, options: CheckmateFull, graph: TrainingGraph, budget_nbytes: int, deadline: float
    ) -> None:
        self.options = options
        self.graph = graph
        self.budget_nbytes = budget_nbytes
        self.deadline = deadline
        self.best: Schedule | None = None
        self.bound = graph.seconds
        self.in_order = False  # is the bound that of the program with a stage for every op?
        self.evictions = Evictions(
            graph, budget_nbytes, recompute_backward=options.recompute_backward
        )

    def outcome(self) -> Outcome:
        """FEASIBLE or NO_PLAN_FOUND: nothing more is proved."""
        status = Status.NO_PLAN_FOUND if self.best is None else Status.FEASIBLE
        return Outcome(status, self.best, self.bound, self.in_order)

    def offer(self, *schedules: Schedule) -> None:
        """Remember the cheapest within the budget."""
        known = [] if self.best is None else [self.best]
        self.best = cheapest([*known, *schedules], self.budget_nbytes)
        self._tell()

    def _tell(self) -> None:
        tell(
            "checkmate",
            incumbent_seconds=None if self.best is None else self.best.seconds,
            bound_seconds=self.bound,
            unplanned_seconds=self.graph.seconds,
        )

    def run(self) -> Outcome:
        """Evictions, a few moments, then the whole."""
        options = self.options
        if options.start is not None:
            self.offer(options.start)
        self._search(frozenset())
        self._refine()
        if self.bound == float("inf"):
            return Outcome(Status.INFEASIBLE)
        if self._is_proved():
            return Outcome(Status.OPTIMAL, self.best, self.bound)
        with Program(options.solver) as program:
            try:
                stages = StageProgram(
                    self.graph,
                    self.budget_nbytes,
                    program,
                    recompute_backward=options.recompute_backward,
                    deadline=0.5 * (time.monotonic() + self.deadline),
                )
            except TimeoutError:
                return self.outcome()
            return self._solve_all(stages)

    def _solve_all(self, program: StageProgram) -> Outcome:
        """The program with a stage for every op: relaxation, roundings, integer program."""
        relaxed = relaxation(program, self.deadline)
        if relaxed is None:
            return self.outcome()
        if relaxed.infeasible:
            return Outcome(Status.INFEASIBLE, in_order=True)
        self._raise_bound(program.seconds(relaxed.bound))
        if relaxed.values is not None:
            count = self.options.thresholds
            self.offer(
                *roundings(program, relaxed.values, thresholds=count, deadline=self.deadline)
            )
            self._search(self.evictions.drops_of(program.retained(relaxed.values)))
        return self._solve_program(program)

    def _refine(self) -> None:
        """Few moments instead of all (:mod:`memplan.programs.refinement`): often that is enough."""
        options = self.options
        refined = refine(
            self.graph,
            self.budget_nbytes,
            time.monotonic() + MOMENTS_SHARE * (self.deadline - time.monotonic()),
            solver=options.solver,
            recompute_backward=options.recompute_backward,
        )
        for found in refined:
            self.bound = max(self.bound, found.bound_seconds)
            self._tell()
            if found.schedule is not None:
                self.offer(found.schedule)
            if self._is_proved():
                break

    def _raise_bound(self, seconds: float) -> None:
        """Of the program with a stage for every op, which keeps the order of first executions."""
        if seconds > self.bound:
            self.bound, self.in_order = seconds, True

    def _is_proved(self) -> bool:
        allowance = 2 * TOLERANCE * self.graph.seconds
        return self.best is not None and self.best.seconds <= self.bound + allowance

    def _search(self, drops: AbstractSet[Drop]) -> None:
        """Evict and improve from these drops, for half of the share of the time that is for it."""
        share = 0.5 * self.options.search_share
        deadline = time.monotonic() + share * (self.deadline - time.monotonic())
        found = self.evictions.fit(drops, deadline)
        if found is not None:
            self.offer(self.evictions.improve(found, deadline, patience=PATIENCE).schedule)

    def _solve_program(self, program: StageProgram) -> Outcome:
        """Add rows until the program's optimum is a schedule within the budget, or time is up."""
        while (left := self.deadline - time.monotonic()) > 0:
            if self.best is not None:
                program.start_from(self.best)
            solved = program.solve(left)
            if solved.infeasible:
                return Outcome(Status.INFEASIBLE, in_order=True)
            self._raise_bound(program.seconds(solved.bound))
            if solved.values is None:
                break
            schedule = program.schedule(solved.values)
            self.offer(schedule)
            if simulate(schedule).peak_nbytes <= self.budget_nbytes:
                if solved.optimal:
                    bound = min(self.bound, schedule.seconds)
                    return Outcome(Status.OPTIMAL, schedule, bound, self.in_order)
                break
            if not program.add_violated(solved.values):
                program.forbid(solved.values)
        return self.outcome()
