"""One strategy at one budget: solved, checked, realised, measured, or why there is no plan."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from memplan.errors import BudgetError
from memplan.planning.answer import check_bound, checked
from memplan.planning.apart import Do
from memplan.planning.job import Job
from memplan.planning.known import remember
from memplan.planning.plan import Attempt, Plan
from memplan.planning.realised import Realised, realise
from memplan.planning.refusal import refusal
from memplan.programs.moment_program import moment_bound
from memplan.programs.moments import Moments
from memplan.programs.proof import ProofOptions
from memplan.programs.solver import DEFAULT_SOLVER
from memplan.search.aiming import aim_lower
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Problem, Status, Strategy, create, name_of, options_of
from memplan.strategies.quick import QUICK_SHARE, quick_schedule
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.nbytes import format_nbytes
from memplan.util.progress import tell
from memplan.util.stop import Stop

# What part of the time that is left a strategy gets. The rest is for another try with less, where
# MXNet allocates more than the strategy counts.
SHARE_OF_TIME = 0.9

# What part of the time limit a strategy gets in any case.
LEAST_SHARE_OF_TIME = 0.1

# What part of the time limit goes into a bound in any case, if the strategy itself has none.
BOUND_SHARE_OF_TIME = 0.05

# What part of the time that is left may go there, as its work ends it before.
BOUND_SHARE_OF_REST = 0.5

# What part of the usual effort that takes.
BOUND_EFFORT = 0.25


def try_strategy(
    job: Job,
    strategy: str | Strategy,
    budget_nbytes: int | None,
    *,
    start: Schedule | None = None,
    bound_seconds: float = 0.0,
    since: float | None = None,
    spent: float = 0.0,
    name: str | None = None,
    proves: bool = True,
) -> Attempt:
    """What ``strategy`` finds within the budget, checked, realised and measured.

    ``start`` is a schedule that is known already, for strategies that take one;
    ``bound_seconds`` are proven: no schedule within the budget that it may return takes fewer. The
    time limit counts from ``since`` (of time.monotonic()), or from now, and this many seconds of it
    are ``spent`` already. ``name`` is what the strategy is called (None: its own name). Unless it
    ``proves``, no bound is looked for beside that of the strategy. An interrupt ends the search
    with the best plan so far; without any, it is raised.
    """
    problem = job.problem(budget_nbytes, start, bound_seconds=bound_seconds)
    begin = (time.monotonic() if since is None else since) - spent
    name = name or name_of(strategy)
    tell(f"{name}, {'least' if budget_nbytes is None else format_nbytes(budget_nbytes)}")
    with noticing() as interrupt:
        trial = _Trial(job, strategy, problem, begin, interrupt, proves=proves)
        outcome, realised = trial.run()
    # Where no other plan can be cheaper, more time would have been for nothing.
    is_cheapest = outcome.status is Status.OPTIMAL and not outcome.in_order
    was_cut = outcome.cut_by_clock or trial.was_cut or interrupt.has_come
    outcome = dataclasses.replace(outcome, cut_by_clock=was_cut and not is_cheapest)
    seconds = time.monotonic() - begin
    plan = None
    if outcome.schedule is not None and realised is not None:
        plan = plan_of(job, name, outcome, realised, budget_nbytes, seconds)
    status, cut = outcome.status, outcome.cut_by_clock
    return Attempt(name, budget_nbytes, status, plan, seconds, outcome.in_order, cut_by_clock=cut)


def plan_of(
    job: Job,
    name: str,
    outcome: Outcome,
    realised: Realised,
    budget_nbytes: int | None,
    seconds: float,
) -> Plan:
    """The plan that is the ``outcome`` of the strategy ``name``, planned in ``seconds``."""
    assert outcome.schedule is not None
    bound, unplanned_seconds = None, job.graph.seconds
    if outcome.lower_bound_seconds is not None and unplanned_seconds:
        extra = outcome.lower_bound_seconds - unplanned_seconds
        # More says a solver for want of precision, and what holds for plans in order of another.
        bound = min(max(0.0, extra / unplanned_seconds), outcome.schedule.overhead)
    return Plan(
        status=outcome.status,
        schedule=outcome.schedule,
        strategy=name,
        costs=job.costs,
        realisation=job.realisation.name,
        trace=job.trace,
        budget_nbytes=budget_nbytes,
        footprint=realised.footprint,
        packing=realised.packing,
        unplanned=job.unplanned,
        lower_bound_overhead=bound,
        bound_in_order=outcome.in_order,
        planning_seconds=seconds,
        cut_by_clock=outcome.cut_by_clock,
    )


def refused(do: Do, attempt: Attempt, strategy: str | Strategy, better: str = "") -> BudgetError:
    """As :func:`budget_error`, by ``do``; a plan for the bytes that it names is known then."""
    error: BudgetError = do(budget_error, attempt, strategy, better)
    lucky: tuple[Schedule, int] | None = do(_lucky_least, strategy)
    if lucky is not None:
        remember(*lucky)
    return error


def _lucky_least(job: Job, strategy: str | Strategy) -> tuple[Schedule, int] | None:
    """The schedule of least memory, and its bytes, if the clock has cut its search.

    Else it is found again.
    """
    least = job.least_by(create(strategy, realisation=job.realisation.name))
    if not least.cut_by_clock:
        return None
    return least.schedule, least.footprint.allocated_nbytes


def budget_error(
    job: Job, attempt: Attempt, strategy: str | Strategy, better: str = ""
) -> BudgetError:
    """Why ``strategy`` found no plan, with the least memory that memplan can reach.

    ``better`` is a sentence on another realisation.
    """
    solver = create(strategy, realisation=job.realisation.name)
    return refusal(job, attempt, moments_of(job, solver).floor, job.least_by(solver), better)


def moments_of(job: Job, solver: Strategy) -> Moments:
    """What holds for every schedule that ``solver`` may return."""
    repeats_backward = job.space.repeats_backward
    if repeats_backward:  # unless the strategy says that its schedules do not
        repeats_backward = getattr(solver, "recompute_backward", True)
    return Moments(job.graph, recompute_backward=repeats_backward)


class _Trial:
    """A strategy on a problem of a job."""

    def __init__(
        self,
        job: Job,
        strategy: str | Strategy,
        problem: Problem,
        begin: float,
        interrupt: Interrupt,
        *,
        proves: bool,
    ) -> None:
        self.job, self.problem, self.interrupt, self.proves = job, problem, interrupt, proves
        self.solver = create(strategy, realisation=job.realisation.name)
        self.stop = Stop(begin + job.time_limit - job.realisation.binds * job.realising_seconds)
        self.outcomes: list[Outcome] = []
        self.realised: dict[int, Realised] = {}

    def run(self) -> tuple[Outcome, Realised | None]:
        """The outcome, its schedule as a network and what that holds."""
        limit = self.problem.budget_nbytes
        if limit is not None and limit < moments_of(self.job, self.solver).floor.nbytes:
            return Outcome(Status.INFEASIBLE), None
        options = options_of(self.solver)
        takes_start = "start" in options
        if takes_start or "seed" in options:  # what draws at random is compiled
            self._prepare()
        if takes_start:
            quick = self.problem.memory.executed(self._start(limit))
            self.problem = dataclasses.replace(self.problem, start=quick)
            if limit is not None and self.problem.memory.is_within(quick, limit):
                unplanned = self.job.graph.seconds
                tell("start", incumbent_seconds=quick.seconds, unplanned_seconds=unplanned)
        best = self._least() if limit is None else self._within(limit)
        first = self.outcomes[0]
        if best is not None:
            status = first.status if best is first.schedule else Status.FEASIBLE
            return self._with(best, status)
        if first.status is Status.INFEASIBLE and not first.in_order:
            return first, None
        if takes_start and limit is not None:
            best = self._in_hand(limit)
            if best is not None:
                return self._with(best, Status.FEASIBLE)
        if self.interrupt.has_come:
            raise KeyboardInterrupt
        return dataclasses.replace(
            first,
            status=Status.INFEASIBLE if first.status is Status.INFEASIBLE else Status.NO_PLAN_FOUND,
            schedule=None,
        ), None

    def _with(self, best: Schedule, status: Status) -> tuple[Outcome, Realised]:
        """The first outcome, which is that of the whole budget, with this schedule."""
        outcome = dataclasses.replace(self.outcomes[0], status=status, schedule=best)
        check_bound(outcome, self.problem, name_of(self.solver))
        return outcome, self._realise(best)

    @property
    def was_cut(self) -> bool:
        """Has the clock ended a search?"""
        return self.stop.cut_by_clock or any(outcome.cut_by_clock for outcome in self.outcomes)

    def _prepare(self) -> None:
        """Compile the search, or load what was compiled before: that is in nobody's time."""
        begin = time.monotonic()
        self.problem.space.prepare()
        self.stop.deadline += time.monotonic() - begin

    def _start(self, limit: int | None) -> Schedule:
        """The known schedule, if that fits, else the better one of it and of quick strategies."""
        start = self.problem.start
        if start is not None and limit is not None and self.problem.cheapest([start]) is not None:
            return start
        return quick_schedule(self.problem, self.stop.share_for_little(QUICK_SHARE))

    def _least(self) -> Schedule | None:
        """The strategy's schedule of least memory; one known already, if that takes less."""
        outcome = self._solve(self.problem, self.stop)
        self.outcomes.append(outcome)
        if outcome.schedule is None:
            return None
        unplanned = Schedule.unplanned(self.job.graph)
        return self.problem.cheapest([outcome.schedule, self.problem.start, unplanned])

    def _within(self, limit: int) -> Schedule | None:
        """A schedule that MXNet allocates within ``limit``, aiming lower where it does not."""
        start = self.problem.start

        def solve(aim: int, until: Stop) -> Schedule | None:
            if self.outcomes and self.interrupt.has_come:
                return None
            problem = dataclasses.replace(self.problem.within(aim), start=start)
            outcome = self._solve(problem, until)
            if self.proves and not (self.outcomes or self.interrupt.has_come):
                outcome = self._bounded(problem, outcome)
            self.outcomes.append(outcome)
            return outcome.schedule

        return aim_lower(
            solve,
            limit,
            self._excess,
            self.stop,
            share=SHARE_OF_TIME,
        )

    def _bounded(self, problem: Problem, outcome: Outcome) -> Outcome:
        """``outcome`` with a better bound; after an interrupt as it is, with its schedule."""
        try:
            return bounded(self.job, self.solver, problem, outcome, self.stop)
        except KeyboardInterrupt:
            self.interrupt.has_come = True
            return outcome

    def _solve(self, problem: Problem, until: Stop) -> Outcome:
        """The strategy's answer; a step that needs no plan, or gains nothing by it, gets none."""
        if (unplanned := problem.unplanned()) is not None:
            return unplanned
        least = LEAST_SHARE_OF_TIME * self.job.time_limit
        seconds = max(0.1, least, until.seconds_left)
        answer = self.solver.solve(dataclasses.replace(problem, time_limit=seconds))
        outcome = checked(answer, problem, name_of(self.solver))
        if outcome.schedule is not None and outcome.schedule.seconds > problem.most_seconds:
            return dataclasses.replace(outcome, status=Status.NO_PLAN_FOUND, schedule=None)
        return outcome

    def _in_hand(self, limit: int) -> Schedule | None:
        """A schedule within ``limit`` that is known without the search that was just made.

        As every budget above the least memory is met by it, a plan at one budget means that there
        is a plan at every larger one.
        """
        for known in self._known():
            for schedule in sorted(known, key=lambda schedule: schedule.seconds):
                if (
                    schedule.seconds <= self.problem.most_seconds
                    and self.problem.memory.is_within(schedule, limit)
                    and self._dependent_nbytes(schedule) <= limit
                ):
                    return schedule
        return None

    def _known(self) -> Iterator[Sequence[Schedule]]:
        """What is known, or made in little time; then what a search for the least memory found."""
        if self.problem.start is not None:
            yield [self.problem.start]
        if self.was_cut and not self.interrupt.has_come:
            # In their share of little time they may have found none.
            stop = Stop.after(max(0.1, LEAST_SHARE_OF_TIME * self.job.time_limit))
            yield [quick_schedule(self.problem, stop)]
        if not self.interrupt.has_come or self.job.knows_least_by(self.solver):
            least = self.job.least_by(self.solver)
            if least.cut_by_clock:
                self.stop.cut()
            yield [*least.cheaper, least.searched, least.schedule]

    def _excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        """By how many bytes, once realised, it is over: never roughly, as it has the last word."""
        del roughly
        return max(0, self._dependent_nbytes(schedule) - budget_nbytes)

    def _dependent_nbytes(self, schedule: Schedule) -> int:
        """The bytes of ``schedule`` that must be within a problem's budget: what depends on it."""
        footprint = self._realise(schedule).footprint
        constant_nbytes = self.job.graph.fixed_nbytes + self.job.beside.nbytes
        return footprint.total_nbytes - constant_nbytes

    def _realise(self, schedule: Schedule) -> Realised:
        """What the checked schedule holds as a network."""
        if id(schedule) not in self.realised:
            self.realised = {id(schedule): realise(self.job, schedule)}
        return self.realised[id(schedule)]


def bounded(job: Job, solver: Strategy, problem: Problem, outcome: Outcome, stop: Stop) -> Outcome:
    """``outcome`` with the bound that holds for schedules in any order, if that says more.

    A bound of that kind that has ended the search is enough. A part of what ``stop`` leaves of the
    time goes into it, and of the time limit in any case.
    """
    assert problem.budget_nbytes is not None
    gap_seconds = getattr(solver, "gap", 0.0) * problem.graph.seconds
    proved_seconds = 0.0 if outcome.in_order else outcome.lower_bound_seconds or 0.0
    if problem.is_closed(outcome.schedule, proved_seconds + gap_seconds):
        return outcome
    seconds = (BOUND_SHARE_OF_TIME * job.time_limit, BOUND_SHARE_OF_REST * stop.seconds_left)
    stop = Stop.after(max(seconds))
    by = getattr(solver, "solver", DEFAULT_SOLVER)
    moments = moments_of(job, solver)
    effort = BOUND_EFFORT * min(1.0, getattr(solver, "effort", 1.0))
    options = ProofOptions(by, effort=effort)
    bound = moment_bound(moments, problem.budget_nbytes, stop, options).seconds
    bound = max(bound, problem.bound_seconds)
    if stop.cut_by_clock:
        outcome = dataclasses.replace(outcome, cut_by_clock=True)
    if outcome.schedule is None:
        if math.isinf(bound) and outcome.status is Status.NO_PLAN_FOUND:
            return Outcome(Status.INFEASIBLE, cut_by_clock=outcome.cut_by_clock)
        return outcome
    if bound < (outcome.lower_bound_seconds or 0.0):
        return outcome
    is_closed = problem.is_closed(outcome.schedule, bound)
    return dataclasses.replace(
        outcome,
        status=Status.OPTIMAL if is_closed else outcome.status,
        lower_bound_seconds=min(outcome.schedule.seconds, bound),
        in_order=False,
    )
