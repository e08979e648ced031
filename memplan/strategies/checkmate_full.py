"""Checkmate: the cheapest schedule within a budget, by an integer program over all of the step.

Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020
(arXiv:1910.02653), section 4. The program is :mod:`memplan.stage_program`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from memplan.graph import TrainingGraph
from memplan.rematerialize import cheapest, quick_schedules
from memplan.rounding import relaxation, roundings
from memplan.schedule import Schedule
from memplan.simulate import simulate
from memplan.solver import Solved, check_solver
from memplan.stage_program import StageProgram
from memplan.strategies.base import Outcome, Status

# A rounded schedule may need more than the relaxation: it is also rounded for less memory by these
# shares, unless the best schedule is this close to the bound.
ALLOWANCES = (0.01, 0.03, 0.1)
ENOUGH = 0.002


@dataclass(frozen=True)
class CheckmateFull:
    """Solves the relaxation, rounds it for a first schedule, then solves the integer program.

    ``solver`` is "CBC" or "HIGHS" (extra ``highs``), ``start`` a schedule to start from. At most
    ``rounding_share`` of the time goes into a better first schedule. Backward ops run once unless
    ``recompute_backward``. An optimum is one among the schedules that advance
    the frontier in base order (:mod:`memplan.rematerialize`), and so is the bound.
    """

    time_limit: float = 60.0
    solver: str = "CBC"
    threads: int = 2
    thresholds: int = 12
    rounding_share: float = 0.3
    recompute_backward: bool = False
    start: Schedule | None = None

    def __post_init__(self) -> None:
        check_solver(self.solver)

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest schedule found whose peak of live bytes is within the budget.

        Without a budget: the lowest peak of :func:`memplan.rematerialize.quick_schedules`, then
        the cheapest schedule within it. An interrupt ends the search with what is found so far.
        """
        deadline = time.monotonic() + self.time_limit
        if budget_nbytes is None:
            least = cheapest(quick_schedules(graph), None)
            assert least is not None  # without a limit every schedule will do
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

    def outcome(self) -> Outcome:
        """FEASIBLE or NO_PLAN_FOUND: nothing more is proved."""
        if self.best is None:
            return Outcome(Status.NO_PLAN_FOUND, None, self.bound)
        return Outcome(Status.FEASIBLE, self.best, self.bound)

    def offer(self, *schedules: Schedule) -> None:
        """Remember the cheapest within the budget."""
        known = [] if self.best is None else [self.best]
        self.best = cheapest([*known, *schedules], self.budget_nbytes)

    def run(self) -> Outcome:
        """Heuristics, the relaxation and its roundings, the integer program."""
        options = self.options
        self.offer(*quick_schedules(self.graph))
        if options.start is not None:
            self.offer(options.start)
        program = self._program(self.budget_nbytes)
        relaxed = relaxation(program, self.deadline)
        if relaxed is None:
            return self.outcome()
        if relaxed.infeasible:
            return Outcome(Status.INFEASIBLE)
        self.bound = max(self.bound, program.seconds(relaxed.bound))
        self._round(program, relaxed, self.deadline)
        stop = time.monotonic() + options.rounding_share * (self.deadline - time.monotonic())
        for allowance in ALLOWANCES:
            if self._gap() > ENOUGH and time.monotonic() < stop:
                tighter = self._program(int((1.0 - allowance) * self.budget_nbytes))
                self._round(tighter, relaxation(tighter, stop), stop)
        return self._solve_program(program)

    def _program(self, budget_nbytes: int) -> StageProgram:
        return StageProgram(
            self.graph,
            budget_nbytes,
            solver=self.options.solver,
            threads=self.options.threads,
            recompute_backward=self.options.recompute_backward,
        )

    def _round(self, program: StageProgram, relaxed: Solved | None, deadline: float) -> None:
        if relaxed is not None and relaxed.values is not None:
            count = self.options.thresholds
            self.offer(*roundings(program, relaxed.values, thresholds=count, deadline=deadline))

    def _gap(self) -> float:
        """How far the best schedule may be from the optimum, in unplanned steps."""
        if self.best is None or not self.graph.seconds:
            return math.inf
        return (self.best.seconds - self.bound) / self.graph.seconds

    def _solve_program(self, program: StageProgram) -> Outcome:
        """Add rows until the program's optimum is a schedule within the budget, or time is up."""
        while (left := self.deadline - time.monotonic()) > 0:
            if self.best is not None:
                program.start_from(self.best)
            solved = program.solve(left)
            if solved.infeasible:
                return Outcome(Status.INFEASIBLE)
            self.bound = max(self.bound, program.seconds(solved.bound))
            if solved.values is None:
                break
            schedule = program.schedule(solved.values)
            self.offer(schedule)
            if simulate(schedule).peak_nbytes <= self.budget_nbytes:
                if solved.optimal:
                    return Outcome(Status.OPTIMAL, schedule, min(self.bound, schedule.seconds))
                break
            if not program.add_violated(solved.values):
                program.forbid(solved.values)
        return self.outcome()
