"""The program over all of the step, solved with more and more rows until its answer fits.

Jain et al.: Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020
(arXiv:1910.02653), section 4. The program is :mod:`memplan.programs.stage_program`. A few moments
of the step (:mod:`memplan.programs.moment_refinement`) are often enough; what they prove holds for
schedules in any order, what the program proves for those that advance the frontier in base order.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

from memplan.memory.memory import Live, cheapest
from memplan.programs.moment_refinement import refine_moments
from memplan.programs.proof import Fact, ProofOptions
from memplan.programs.solver import TOLERANCE, Program
from memplan.programs.stage_program import PAIRS, StageProgram
from memplan.programs.stage_rounding import relaxation, roundings
from memplan.search.eviction import Drop, Evictions
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.progress import tell
from memplan.util.stop import Stop

# A first schedule is searched for until this many attempts in a row have not made it cheaper.
PATIENCE = 200

# Part of the time left that goes into the program of a few moments, and of that of all into
# building it.
MOMENTS_SHARE = 0.4
BUILDING_SHARE = 0.5

# The program with a stage for every op is solved this often at most, times the effort: one of few
# ops, which takes milliseconds, as often as makes this many pairs of ops.
SOLVES, SOLVED_PAIRS = 40, 400_000


class StageRefinement:
    """Solves the program for live bytes in a budget; what becomes known is added to a list.

    The last of ``facts`` has the cheapest schedule so far and the highest bound.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        budget_nbytes: int,
        stop: Stop,
        options: ProofOptions,
        facts: list[Fact],
    ) -> None:
        self.graph, self.budget_nbytes = graph, budget_nbytes
        self.stop, self.options, self.facts = stop, options, facts
        self.best = self._cheapest(*(fact.schedule for fact in facts))
        self.bound = graph.seconds
        self.in_order = False  # is the bound that of the program with a stage for every op?
        self.evictions = Evictions(
            graph, budget_nbytes, recompute_backward=options.recompute_backward
        )

    def run(self) -> None:
        """Evictions, a few moments, then the whole."""
        self._search(frozenset())
        self._refine()
        pairs = len(self.graph.ops) ** 2
        is_large = pairs > self.options.effort * PAIRS
        if not pairs or is_large or self._is_proved() or math.isinf(self.bound):
            return
        with Program(self.options.solver) as program:
            try:
                stages = StageProgram(
                    self.graph,
                    self.budget_nbytes,
                    program,
                    recompute_backward=self.options.recompute_backward,
                    stop=self.stop.share(BUILDING_SHARE),
                )
            except TimeoutError:
                return
            self._solve_all(stages)

    def _cheapest(self, *schedules: Schedule | None) -> Schedule | None:
        return cheapest((s for s in schedules if s is not None), self.budget_nbytes, Live())

    def _offer(self, *schedules: Schedule) -> None:
        """Remember the cheapest within the budget."""
        self.best = self._cheapest(self.best, *schedules)
        self._note()

    def _raise_bound(self, seconds: float, *, in_order: bool) -> None:
        if seconds > self.bound:
            self.bound, self.in_order = seconds, in_order
        self._note()

    def _note(self) -> None:
        self.facts.append(Fact(self.best, self.bound, self.in_order))
        tell(
            "checkmate",
            incumbent_seconds=None if self.best is None else self.best.seconds,
            bound_seconds=self.bound,
            unplanned_seconds=self.graph.seconds,
        )

    def _is_proved(self) -> bool:
        """Can no schedule be cheaper than the best one, or not by more than the gap?"""
        allowance = max(self.options.gap_seconds, 2 * TOLERANCE * self.graph.seconds)
        return self.best is not None and self.best.seconds <= self.bound + allowance

    def _search(self, drops: AbstractSet[Drop]) -> None:
        """Evict and improve from these drops, for half of the share of the time that is for it."""
        until = self.stop.share(0.5 * self.options.search_share)
        fit = self.evictions.fit(drops, until)
        if fit is not None:
            self._offer(self.evictions.improve(fit, until, patience=PATIENCE).schedule)

    def _refine(self) -> None:
        """A few moments instead of all: often that is enough."""
        until = self.stop.share(MOMENTS_SHARE)
        for fact in refine_moments(self.graph, self.budget_nbytes, until, self.options):
            self._raise_bound(fact.bound_seconds, in_order=False)
            if fact.schedule is not None:
                self._offer(fact.schedule)
            if self._is_proved():
                break

    def _solve_all(self, program: StageProgram) -> None:
        """The program with a stage for every op: relaxation, roundings, integer program."""
        relaxed = relaxation(program, self.stop, effort=self.options.effort)
        if relaxed is None:
            return
        if relaxed.infeasible:
            self._raise_bound(math.inf, in_order=True)
            return
        self._raise_bound(program.seconds(relaxed.bound), in_order=True)
        if relaxed.values is not None:
            count = self.options.thresholds
            self._offer(*roundings(program, relaxed.values, thresholds=count, stop=self.stop))
            self._search(self.evictions.drops_of(program.contents(relaxed.values)))
        self._solve_program(program)

    def _solve_program(self, program: StageProgram) -> None:
        """Add rows until the program's optimum is a schedule within the budget, or time is up."""
        options, solves = self.options, 0
        most = options.effort * max(SOLVES, SOLVED_PAIRS // len(self.graph.ops) ** 2)
        while solves < most and not self._is_proved():
            if self.stop.is_over():
                return
            solves += 1
            if self.best is not None:
                program.start_from(self.best)
            gap = options.program_gap * program.scale
            answer = program.program.solve(self.stop, effort=options.effort, gap=gap)
            if answer.infeasible:
                self._raise_bound(math.inf, in_order=True)
                return
            self._raise_bound(program.seconds(answer.bound), in_order=True)
            if answer.values is None:
                return
            schedule = program.schedule(answer.values)
            self._offer(schedule)
            if simulate(schedule).peak_nbytes <= self.budget_nbytes:
                if answer.optimal:  # as near to its bound as a solver can tell
                    self._raise_bound(schedule.seconds, in_order=True)
                return
            if not program.add_violated(answer.values):
                program.forbid(answer.values)
