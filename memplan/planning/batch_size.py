"""The largest batch that trains within a budget."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from memplan.errors import ArgumentError, BudgetError, ScheduleError, SizeError
from memplan.planning.attempt import budget_error, moments_of, try_strategy
from memplan.planning.cache import Cache
from memplan.planning.job import Job
from memplan.planning.plan import Attempt, Plan
from memplan.planning.realisation import Symbol, usable
from memplan.planning.sizes import Sizes
from memplan.planning.sizes_tried import BatchSize, Trial
from memplan.planning.tasks import Task, run
from memplan.planning.told_apart import no_shapes_for_options
from memplan.programs.moment_program import moment_bound
from memplan.programs.proof import ProofOptions
from memplan.step.schedule import Schedule
from memplan.strategies import configured, create, name_of, options_of
from memplan.strategies.base import (
    MOST_OVERHEAD,
    Outcome,
    Problem,
    Status,
    Strategy,
    check_overhead,
)
from memplan.util.arguments import with_named_options
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.nbytes import ACCEPTED, format_nbytes, is_share, parse_budget
from memplan.util.numbers import is_finite, plain, shown
from memplan.util.stop import Stop

# The bytes of a plan per sample are taken from a batch of this size: in a smaller one, what does
# not grow with the batch weighs too much.
FIRST_SIZE = 8

# A size is searched for at most this share of the time: halving an interval takes several.
SHARE_OF_TIME = 0.125

# The plan of the last size may take so many times the time of another, if that is left: a search
# ends by its work, but what is proved of a wide step may not be done in an eighth.
LAST_TIMES = 4

# The part of the usual work for a size of which is proved that every plan takes more than the most
# recomputation: its plan is only shown.
HOPELESS_SHARE = 0.05

# The part of the usual work for the least memory, of which a size is guessed, and for a size at
# first. Where that finds a plan, the size fits, and only the largest such size is worth all of it.
FIRST_SHARE = 0.1

# What part of the usual effort a program gets that may prove it.
BOUND_EFFORT = 0.25


@with_named_options
@no_shapes_for_options
def max_batch_size(
    net: Symbol,
    budget: int | str,
    *,
    max_overhead: float | None = None,
    strategy: str | Strategy = "auto",
    gap: float | None = None,
    seed: int | None = None,
    time_limit: float = 300,
    executor: Executor | None = None,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> BatchSize:
    """The largest batch for which ``strategy`` finds a plan within ``budget``.

    In the input shapes "N" stands for the batch size: ``data=("N", 3, 224, 224)``. ``budget`` are
    bytes, or a string such as "4GiB"; ``max_overhead`` is the most recomputation to accept, as a
    share of the unplanned step. Bytes grow about evenly with the batch, which gives a first guess;
    then intervals are halved, each size by a plan of its own, which begins with that of the next
    larger one. All of the work is for the largest, and for sizes without a plan by a tenth of it.
    ``time_limit`` are seconds for the search, one plan getting an eighth, and a cheaper one of the
    largest size half, if that is left. ``executor`` tries three
    sizes at a time; ``cache`` and the other ``options`` are those of :func:`memplan.plan`.

    Raises BudgetError if no batch fits, not even of one sample, and else what
    :func:`memplan.plan` raises. An interrupt ends the search with the largest size found.
    """
    budget_nbytes = _bytes(budget)
    time_limit, max_overhead = plain(time_limit), plain(max_overhead)
    check_overhead(max_overhead)
    if not is_finite(time_limit) or not time_limit:
        raise ArgumentError(
            f"time_limit must be a positive number of seconds, got {shown(time_limit)}"
        )
    # Up to the usual limit plans are looked for in any case: so a size at which they take more than
    # is accepted is told from one that does not fit.
    is_more = max_overhead is not None and max_overhead > MOST_OVERHEAD
    limits = {"max_overhead": max_overhead if is_more else None}
    sizes = Sizes(net, {**options, **limits}, SHARE_OF_TIME * time_limit)
    with noticing() as interrupt:
        create(strategy, realisation=usable(options.get("realisation", "mirror")))
        search = _Search(
            sizes,
            configured(strategy, gap=gap, seed=seed),
            budget_nbytes,
            max_overhead,
            interrupt,
            deadline=time.monotonic() + time_limit,
            executor=executor,
            cache=None if cache is None else Cache.open(cache),
        )
        return search.run()


def _bytes(budget: int | str) -> int:
    """The bytes of ``budget``; ArgumentError, too, for a share of the unplanned step."""
    accepted = (
        "it must be bytes or a string such as '4GiB', as a share of the unplanned step grows with "
        "the batch"
    )
    if budget is None or is_share(budget):
        raise ArgumentError(f"the budget {shown(budget)} cannot be used; {accepted}")
    try:
        return parse_budget(budget, 0) or 0
    except ArgumentError as error:
        refusal, *_ = str(error).split(f"; {ACCEPTED}")  # of what plans at a budget take
        raise ArgumentError(f"{refusal}; {accepted}") from None


def _refused(strategy: str, budget_nbytes: int, error: SizeError) -> Attempt:
    """What is noted of a size that MXNet cannot hold, at any budget."""
    return Attempt(strategy, budget_nbytes, Status.INFEASIBLE, None, 0.0, error=str(error))


def _on(job: Job, schedule: Schedule) -> Schedule | None:
    """``schedule`` on the network with another batch; None where MXNet builds another graph."""
    try:
        return Schedule(job.graph, schedule.ops, schedule.reads, schedule.heads)
    except ScheduleError:
        return None


@dataclass(frozen=True)
class _Known:
    """The strategy whose answer is a schedule that is known already."""

    schedule: Schedule

    def solve(self, problem: Problem) -> Outcome:
        """The known schedule; whoever asks finds out whether it fits."""
        del problem
        return Outcome(Status.FEASIBLE, self.schedule)


class _Search:
    """The search for the largest size: it halves the interval in which that must lie."""

    def __init__(
        self,
        sizes: Sizes,
        strategy: str | Strategy,
        budget_nbytes: int,
        max_overhead: float | None,
        interrupt: Interrupt,
        *,
        deadline: float,
        executor: Executor | None,
        cache: Cache | None,
    ) -> None:
        self.sizes, self.strategy, self.budget_nbytes = sizes, strategy, budget_nbytes
        self.most = math.inf if max_overhead is None else max_overhead
        self.deadline, self.executor, self.cache = deadline, executor, cache
        self.name = name_of(strategy)
        self.trials: dict[int, Trial] = {}
        self.carried_sizes: set[int] = set()  # that fit by another's plan, or by little work
        self.least: Plan | None = None
        self.interrupt = interrupt

    def run(self) -> BatchSize:
        """Bracket, halve, and plan the largest size that fits as well as time allows."""
        interrupted = False
        try:
            low, high = self._bracket()
            while high - low > 1 and self._time_is_left():
                middle = (low + high) // 2
                self._try(middle, (low + middle) // 2, (middle + high) // 2)
                low, high = (middle, high) if self.trials[middle].fits else (low, middle)
            self._improve(low)
        except KeyboardInterrupt:
            if not any(trial.fits for trial in self.trials.values()):
                raise
            interrupted = True
        return self._result(interrupted=interrupted)

    def _end_if_interrupted(self) -> None:
        """Raise the interrupt that a strategy or a proof answered with its best so far."""
        if self.interrupt.has_come:
            raise KeyboardInterrupt

    def _bracket(self) -> tuple[int, int]:
        """A size that fits and a larger one that does not (the same one if time is up)."""
        size = self._guess()
        step = max(1, size // 16)
        self._try(size, max(1, size - step), size + step)
        if self.trials[size].fits:
            while self._time_is_left():
                larger, step = size + step, 2 * step
                self._try(larger, larger + step)
                if not self.trials[larger].fits:
                    return size, larger
                size = larger
            return size, size
        while size > 1 and (self._time_is_left() or size > FIRST_SIZE):
            # Without time the first size is left, of which the least memory is known.
            smaller = max(1, size - step) if self._time_is_left() else FIRST_SIZE
            step *= 2
            self._try(smaller, max(1, smaller - step))
            if self.trials[smaller].fits:
                return smaller, size
            size = smaller
        raise self._error(size)

    def _guess(self) -> int:
        """The size at which the least memory, or what ``max_overhead`` allows of it, fills up."""
        begin = time.monotonic()
        try:
            job = self.sizes.job(FIRST_SIZE)
        except SizeError:
            return FIRST_SIZE
        little = dataclasses.replace(job, effort=FIRST_SHARE)
        task = Task(little, self.strategy, None, since=begin)
        [attempt] = run([task], interrupt=self.interrupt, cache=self.cache)
        self._end_if_interrupted()
        per_sample = job.unplanned.allocated_nbytes / FIRST_SIZE
        if attempt is not None and attempt.plan is not None:
            self.least = attempt.plan
            savings = per_sample - attempt.plan.allocated_nbytes / FIRST_SIZE
            share = 1.0 if self.least.overhead <= self.most else self.most / self.least.overhead
            per_sample -= share * savings
        free = self.budget_nbytes - job.unplanned.beside_nbytes
        return max(1, int(free / max(1.0, per_sample)))

    def _try(self, size: int, *further_sizes: int) -> None:
        """Try ``size``; with an executor ``further_sizes``, which may be asked for, as well."""
        sizes = dict.fromkeys([size, *(further_sizes if self.executor is not None else ())])
        tasks: dict[int, Task] = {}
        for n in [n for n in sizes if n not in self.trials]:
            begin = time.monotonic()
            try:
                job = self.sizes.job(n)
            except SizeError as error:
                if n == 1:
                    raise
                self._note(n, _refused(self.name, self.budget_nbytes, error))
                continue
            start = self._carried_over(job, n)
            if start is not None and start.overhead <= self.most and self._holds(job, start):
                self._note(n, try_strategy(job, _Known(start), self.budget_nbytes))
                self.carried_sizes.add(n)
            if n not in self.trials or not self.trials[n].fits:
                tasks[n] = self._task(job, start, begin)
        self._search(tasks)
        self._end_if_interrupted()
        if size not in self.trials:  # a worker was interrupted
            raise KeyboardInterrupt

    def _search(self, tasks: Mapping[int, Task]) -> None:
        """Note what is found for each size: by little work, or by all where that finds nothing."""
        if "start" in options_of(create(self.strategy)):  # others work as much in any case
            little = {
                n: dataclasses.replace(task, job=dataclasses.replace(task.job, effort=FIRST_SHARE))
                for n, task in tasks.items()
                if task.job.effort > FIRST_SHARE
            }
            self._run(little)
            self.carried_sizes.update(n for n in little if n in self.trials and self.trials[n].fits)
            tasks = {n: task for n, task in tasks.items() if n not in self.carried_sizes}
        self._run(tasks)

    def _run(self, tasks: Mapping[int, Task]) -> None:
        self._end_if_interrupted()
        attempts = self._answers(tasks.values())
        for n, attempt in zip(tasks, attempts, strict=True):
            if attempt is not None:
                self._note(n, attempt)

    def _answers(self, tasks: Iterable[Task]) -> list[Attempt | None]:
        return run(tasks, interrupt=self.interrupt, executor=self.executor, cache=self.cache)

    def _task(self, job: Job, start: Schedule | None, since: float) -> Task:
        """The search for a plan of ``job``, short where any plan is proved to take too long."""
        bound = 0.0
        problem, solver = job.problem(self.budget_nbytes), create(self.strategy)
        if math.isfinite(self.most) and "start" in options_of(solver):
            assert problem.budget_nbytes is not None
            stop = Stop(min(self.deadline, since + job.time_limit))
            moments = moments_of(job, solver)
            if problem.budget_nbytes >= moments.floor.nbytes:
                options = ProofOptions(effort=BOUND_EFFORT)
                proof = moment_bound(moments, problem.budget_nbytes, stop, options)
                is_known = math.isfinite(proof.seconds) and not stop.cut_by_clock
                bound = proof.seconds if is_known else 0.0
        if bound > job.graph.seconds * (1.0 + self.most):
            job = dataclasses.replace(job, effort=HOPELESS_SHARE * job.effort)
        return Task(job, self.strategy, self.budget_nbytes, start, bound, since=since)

    def _carried_over(self, job: Job, size: int) -> Schedule | None:
        """A schedule to begin with, of the least memory or of the next larger size: the cheaper one
        that fits, else the first that this network can run.
        """
        larger = [n for n in sorted(self.trials) if n > size and self.trials[n].attempt.plan]
        plans = (self.least, *(self.trials[n].attempt.plan for n in larger[:1]))
        candidates = [_on(job, plan.schedule) for plan in plans if plan is not None]
        schedules = [schedule for schedule in candidates if schedule is not None]
        matches = [schedule for schedule in schedules if self._holds(job, schedule)]
        return min(matches, key=lambda s: s.seconds, default=next(iter(schedules), None))

    def _holds(self, job: Job, schedule: Schedule) -> bool:
        return job.holds(schedule) <= self.budget_nbytes

    def _note(self, size: int, attempt: Attempt) -> None:
        """Remember what was tried, under the strategy that the plan goes back to."""
        plan = attempt.plan
        if plan is not None:
            plan = dataclasses.replace(plan, strategy=self.name)
        attempt = dataclasses.replace(attempt, strategy=self.name, plan=plan)
        self.carried_sizes.discard(size)
        self.trials[size] = Trial(size, attempt, plan is not None and plan.overhead <= self.most)

    def _improve(self, size: int) -> None:
        """Search for a cheaper plan of ``size``, if it was found to fit without much of one."""
        plan = self.trials[size].attempt.plan
        if plan is None or size not in self.carried_sizes:
            return
        job = self.sizes.job(size)
        if time.monotonic() + LAST_TIMES * self.sizes.seconds <= self.deadline:
            job = dataclasses.replace(job, time_limit=LAST_TIMES * self.sizes.seconds)
        task = Task(job, self.strategy, self.budget_nbytes, plan.schedule)
        [attempt] = self._answers([task])
        if attempt is not None and attempt.plan and attempt.plan.overhead <= plan.overhead:
            self._note(size, attempt)

    def _time_is_left(self) -> bool:
        """Is there time for one more size, and for improving the plan of the last?"""
        return time.monotonic() + 2 * self.sizes.seconds <= self.deadline

    def _error(self, size: int) -> BudgetError:
        """Why no size fits; ``size`` is the smallest that was tried."""
        attempt, job = self.trials[size].attempt, self.sizes.job(size)
        if attempt.plan is not None:
            text = (
                f"batches of {size} fit in {format_nbytes(self.budget_nbytes)} only at "
                f"{attempt.plan.overhead:+.1%} time; raise max_overhead or the budget"
            )
            return BudgetError(text, proved=False, lowest_nbytes=attempt.plan.total_nbytes)
        error = budget_error(job, attempt, self.strategy)
        text = "not even a batch of 1 fits" if size == 1 else f"no batch fits, down to {size}"
        text, is_proved = f"{text}: {error}", error.proved and size == 1
        return BudgetError(text, proved=is_proved, lowest_nbytes=error.lowest_nbytes)

    def _result(self, *, interrupted: bool) -> BatchSize:
        best = max(size for size, trial in self.trials.items() if trial.fits)
        plan = self.trials[best].attempt.plan
        assert plan is not None
        too_large = min((size for size in self.trials if size > best), default=None)
        tried = tuple(trial for _, trial in sorted(self.trials.items()))
        return BatchSize(best, plan, too_large, tried, interrupted=interrupted)
