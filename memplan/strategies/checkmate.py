"""Checkmate for what MXNet's mirroring can run: an integer program over the flags.

After Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys
2020 (arXiv:1910.02653), section 4: recompute seconds are minimised under a memory limit at every
step. The program is :mod:`memplan.programs.mirror_program`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memplan.memory.blocks import allocate
from memplan.programs.mirror_program import MirrorProgram
from memplan.programs.solver import DEFAULT_SOLVER, Program, check_solver
from memplan.search.flag_annealing import anneal
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, flags_of, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import Timeline, simulate
from memplan.strategies.base import Outcome, Status, best_of
from memplan.util.interrupts import noticing
from memplan.util.progress import tell

# How many moments that are over the budget join the program after each solve.
MOMENTS_PER_ROUND = 3


@dataclass(frozen=True)
class Checkmate:
    """Solves the integer program, then improves its plan under MXNet's real allocation.

    ``solver`` is "HIGHS" or "CBC", ``start`` a plan to start from. At most
    ``program_share`` of ``time_limit`` seconds goes into the program, whose bound is proven; the
    rest into annealing, as the program bounds live bytes and MXNet's blocks may need more.
    """

    time_limit: float = 60.0
    solver: str = DEFAULT_SOLVER
    program_share: float = 0.3
    seed: int = 0
    start: Schedule | None = None

    def __post_init__(self) -> None:
        check_solver(self.solver)

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest plan found within the budget, with a proven bound.

        Without a budget: the least memory that annealing finds, then the cheapest plan in it.
        An interrupt ends the search with what is found so far.
        """
        deadline = time.monotonic() + self.time_limit
        first = Schedule.unplanned(graph) if self.start is None else self.start
        if budget_nbytes is None:
            with noticing() as interrupt:
                least = _annealed(self, first, None, 0.4 * self.time_limit)
            if interrupt.noticed:
                return Outcome(Status.FEASIBLE, least)
            budget_nbytes = allocate(least).nbytes
            shorter = replace(self, time_limit=deadline - time.monotonic(), start=least)
            # What was proved holds for that memory, not for a budget that the user named.
            found = shorter.solve(graph, budget_nbytes)
            return replace(found, status=Status.FEASIBLE, lower_bound=None)
        known = best_of([Schedule.unplanned(graph), first], budget_nbytes)
        if known.schedule is not None and not known.schedule.recomputed:
            return Outcome(Status.OPTIMAL, known.schedule, graph.seconds)
        if not flaggable(graph):
            return Outcome(Status.INFEASIBLE)
        try:
            with Program(self.solver) as program:
                mirrors = MirrorProgram(graph, budget_nbytes, program)
                proved = self._solve_program(mirrors, known, deadline)
        except KeyboardInterrupt:
            if known.schedule is None:
                raise
            return known
        if proved.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return proved
        start = first if proved.schedule is None else proved.schedule
        improved = _annealed(self, start, budget_nbytes, deadline - time.monotonic())
        return replace(best_of([improved, start], budget_nbytes), lower_bound=proved.lower_bound)

    def _solve_program(self, program: MirrorProgram, known: Outcome, deadline: float) -> Outcome:
        """Add moments until the program's optimum is a plan within the budget, or time is up."""
        stop = deadline - (1.0 - self.program_share) * self.time_limit
        graph, budget_nbytes = program.graph, program.budget_nbytes
        unplanned = simulate(Schedule.unplanned(graph))
        program.add_moment(min(max(graph.nforward, unplanned.peak_step), len(graph.ops) - 1))
        plans = [] if known.schedule is None else [known.schedule]
        bound = 0.0
        while (left := stop - time.monotonic()) > 0:
            if known.schedule is not None:
                program.start_from(flags_of(known.schedule))
            solution = program.solve(left)
            bound = max(bound, solution.bound_seconds)
            seconds = graph.seconds
            tell("program", bound_seconds=seconds + bound, unplanned_seconds=seconds)
            if solution.infeasible:
                return Outcome(Status.INFEASIBLE)
            if solution.flags is None:
                break
            schedule = mirror(graph, solution.flags)
            plans.append(schedule)
            timeline = simulate(schedule)
            if timeline.peak_nbytes <= budget_nbytes:
                if not solution.optimal:
                    break
                if allocate(schedule).nbytes <= budget_nbytes:
                    return Outcome(Status.OPTIMAL, schedule, graph.seconds + bound)
                break
            if not _add_moments(program, schedule, timeline, budget_nbytes):
                program.forbid(solution.flags)
        return replace(best_of(plans, budget_nbytes), lower_bound=graph.seconds + bound)


def _annealed(
    strategy: Checkmate, start: Schedule, budget_nbytes: int | None, seconds: float
) -> Schedule:
    flags = flags_of(start)
    found = anneal(start.graph, flags, budget_nbytes, seconds=seconds, seed=strategy.seed)
    return start if found is None else found


def _add_moments(
    program: MirrorProgram, schedule: Schedule, timeline: Timeline, budget_nbytes: int
) -> bool:
    """Add the moments at which ``schedule`` is most over the budget; False if all are there."""
    worst = sorted(_moments(schedule), key=lambda moment: -timeline.live_nbytes[moment[0]])
    added = 0
    for step, k, copy in worst:
        if timeline.live_nbytes[step] <= budget_nbytes or added == MOMENTS_PER_ROUND:
            break
        added += program.add_moment(k, copy)
    return added > 0


def _moments(schedule: Schedule) -> Iterator[tuple[int, int, int | None]]:
    """For every step, its moment in the program: (step, op, None) or (step, next op, copy)."""
    graph = schedule.graph
    following = None
    for step in range(len(schedule.ops) - 1, -1, -1):
        op = schedule.ops[step]
        if op >= graph.nforward:
            following = op
            yield step, op, None
        elif step < graph.nforward:
            yield step, op, None
        elif following is not None:
            yield step, following, op
