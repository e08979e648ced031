"""Checkmate's approximation: the linear relaxation, rounded.

Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020
(arXiv:1910.02653), section 5. The program is :mod:`memplan.stage_program`, the rounding
:mod:`memplan.rounding`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from memplan.eviction import lowest
from memplan.graph import TrainingGraph
from memplan.rematerialize import cheapest
from memplan.rounding import relaxation, roundings
from memplan.schedule import Schedule
from memplan.simulate import simulate
from memplan.solver import TOLERANCE, check_solver
from memplan.stage_program import StageProgram
from memplan.strategies.base import Outcome, Status


@dataclass(frozen=True)
class CheckmateLP:
    """Rounds the optimum of the relaxation at ``thresholds`` thresholds, the best one counts.

    As a rounded schedule may need more memory than the relaxation, that is solved again with
    the share 1 - a of the budget for every a of ``allowances``. ``solver`` is "CBC" or "HIGHS"
    (extra ``highs``); backward ops run once unless ``recompute_backward``.
    """

    time_limit: float = 60.0
    solver: str = "CBC"
    threads: int = 2
    thresholds: int = 24
    allowances: tuple[float, ...] = (0.0, 0.01, 0.03, 0.1, 0.2)
    recompute_backward: bool = False

    def __post_init__(self) -> None:
        check_solver(self.solver)

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The best rounded schedule, with the value of the relaxation as its proven bound.

        The bound holds for all schedules that advance the frontier in base order. Without a
        budget: within the lowest peak that :func:`memplan.eviction.lowest` finds.
        """
        deadline = time.monotonic() + self.time_limit
        if budget_nbytes is None:
            least = lowest(graph, time.monotonic() + 0.3 * self.time_limit)
            shorter = replace(self, time_limit=deadline - time.monotonic())
            found = shorter.solve(graph, simulate(least).peak_nbytes).schedule
            return Outcome(Status.FEASIBLE, least if found is None else found)
        unplanned = Schedule.unplanned(graph)
        if simulate(unplanned).peak_nbytes <= budget_nbytes:
            return Outcome(Status.OPTIMAL, unplanned, graph.seconds)
        return self._round(graph, budget_nbytes, deadline)

    def _round(self, graph: TrainingGraph, budget_nbytes: int, deadline: float) -> Outcome:
        best: Schedule | None = None
        bound: float | None = None
        for allowance in self.allowances:
            program = StageProgram(
                graph,
                int((1.0 - allowance) * budget_nbytes),
                solver=self.solver,
                threads=self.threads,
                recompute_backward=self.recompute_backward,
            )
            solved = relaxation(program, deadline)
            if solved is not None and solved.infeasible and not allowance:
                return Outcome(Status.INFEASIBLE)
            if solved is None or solved.values is None:
                break
            if not allowance:
                bound = program.seconds(solved.bound)
            rounded = roundings(
                program, solved.values, thresholds=self.thresholds, deadline=deadline
            )
            best = cheapest([*([best] if best else []), *rounded], budget_nbytes)
        if best is None:
            return Outcome(Status.NO_PLAN_FOUND, None, bound)
        if bound is not None and best.seconds <= bound + TOLERANCE * graph.seconds:
            return Outcome(Status.OPTIMAL, best, bound)
        return Outcome(Status.FEASIBLE, best, bound)
