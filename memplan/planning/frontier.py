"""The curve of overhead against bytes: plans from the unplanned step to the least memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from memplan.errors import ArgumentError
from memplan.planning.attempt import try_strategy
from memplan.planning.cache import Cache
from memplan.planning.comparison import Comparison
from memplan.planning.job import Job
from memplan.planning.larger_budgets import with_shared_bounds
from memplan.planning.plan import Attempt, Plan
from memplan.planning.realisation import Symbol
from memplan.planning.tasks import Task, run
from memplan.planning.told_apart import no_shapes_for_options
from memplan.step.schedule import Schedule
from memplan.strategies import Status, Strategy, configured, create, options_of
from memplan.util.arguments import several_of, with_named_options
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.nbytes import format_nbytes, parse_budget
from memplan.util.numbers import plain, shown

POINTS = 8

# A larger number is one of bytes, which stands in a list.
MOST_POINTS = 2**10 - 1

# The part of the usual work that a point gets. Set on ResNet-50, where points of a curve of ten,
# mirrored and packed, are within 0.1 point of what all of the work finds, but for one in a third of
# the memory: 0.4. One that begins from its neighbours' plans needs less than they had, and so does
# the least memory, which only says where the curve ends.
SHARE_OF_WORK = 0.2
SHARE_BETWEEN_NEIGHBOURS = 0.5


@dataclass(frozen=True)
class Frontier:
    """What less memory costs, as far as was found.

    ``points`` have a plan each, from the unplanned step down to the fewest bytes: every one holds
    less than the one before, and takes longer. ``left_out`` are the budgets without a plan, and
    plans that another one beats in bytes and in time.
    """

    points: tuple[Attempt, ...]
    left_out: tuple[Attempt, ...]

    def __post_init__(self) -> None:
        for before, after in pairwise(self.plans):
            if before.total_nbytes <= after.total_nbytes or before.overhead >= after.overhead:
                raise ArgumentError(
                    f"points of a frontier lead to fewer bytes at more time; {before.total_nbytes} "
                    f"bytes at {before.overhead} are followed by {after.total_nbytes} bytes at "
                    f"{after.overhead}"
                )

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the points."""
        return tuple(point.plan for point in self.points if point.plan is not None)

    def __str__(self) -> str:
        unmet = [
            f"{'least' if a.budget_nbytes is None else format_nbytes(a.budget_nbytes)} "
            f"({a.status.value})"
            for a in self.left_out
            if a.plan is None
        ]
        last = f"\nwithout a plan: {', '.join(unmet)}" if unmet else ""
        return str(Comparison(self.points)) + last

    def to_csv(self) -> str:
        """The points as CSV: bytes as integers, overhead and bound as fractions."""
        return Comparison(self.points).to_csv()


Plans = Comparison | Frontier | Iterable[Plan]


def plans_of(plans: Plans) -> list[Plan]:
    """The plans in a comparison or frontier, or those given; ArgumentError for anything else."""
    if isinstance(plans, Comparison):
        result: list[Any] = [row.plan for row in plans.rows if row.plan is not None]
    elif isinstance(plans, Frontier):
        result = list(plans.plans)
    else:
        several = several_of(plans)
        result = [plans] if several is None else several
    for plan in result:
        if not isinstance(plan, Plan):
            kind = type(plan).__name__
            raise ArgumentError(
                f"plans must be a Comparison, a Frontier or plans, got an object of type {kind}"
            )
    if not result:
        raise ArgumentError("plans: there is no plan to be drawn")
    return result


@with_named_options
@no_shapes_for_options
def frontier(
    net: Symbol,
    *,
    strategy: str | Strategy = "auto",
    budgets: int | Iterable[int | float | str | None] | None = None,
    gap: float | None = None,
    seed: int | None = None,
    executor: Executor | None = None,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Frontier:
    """The plans of ``strategy`` from the unplanned step down to the least memory that it reaches.

    ``budgets`` are those to plan for (None among them: the least memory), or how many (2 to 1023),
    spread evenly in bytes between the two ends (None: 8). ``options`` are the other arguments of
    :func:`memplan.plan`; ``time_limit`` is that of one point, ``gap`` and ``seed`` go to the
    strategy. The network is traced once. A point takes a fifth of the usual work (for more:
    ``strategy=create("auto", effort=5)``). Every second one begins from the plan of the next
    smaller budget, if the strategy can, with half of that; what was proved for a larger budget
    holds for a smaller one. ``executor`` (a process pool, Dask's ``client.get_executor()``) makes
    points at the same time; a strategy whose answer does not depend on the clock gives the same
    curve. ``cache`` is a folder for finished points.

    An interrupt ends the search with the points made so far. Raises what :func:`memplan.plan`
    raises, BudgetError excepted: a budget without a plan is left out of the curve, and its table
    says so.
    """
    with noticing() as interrupt:
        job = Job.prepare(net, **options)
        create(strategy, realisation=job.realisation.name)  # an unknown name is said first
        strategy = configured(strategy, gap=gap, seed=seed)
        targets = _targets(job, budgets)
        folder = None if cache is None else Cache.open(cache)
        curve = _Curve(job, strategy, executor, folder, interrupt)
        if isinstance(targets, int):
            targets = curve.between_the_ends(targets)
        elif None in targets:
            curve.add([None], between=False)
        amounts = [target for target in targets if target is not None]
        for wave, between in ((amounts[::2], False), (amounts[1::2], True)):
            curve.add(wave, between=between)
    return curve.result()


def _targets(
    job: Job, budgets: int | Iterable[int | float | str | None] | None
) -> Sequence[int | None] | int:
    """The budgets that are named, in bytes and descending, or how many there are to be."""
    several = several_of(budgets)
    if several is not None:
        parsed = {parse_budget(budget, job.unplanned.total_nbytes) for budget in several}
        if not parsed:
            raise ArgumentError("budgets: none is named")
        return sorted(parsed, key=lambda nbytes: nbytes or 0, reverse=True)
    if budgets is None:
        return POINTS
    count = plain(budgets)
    if type(count) is int and 2 <= count <= MOST_POINTS:
        return count
    raise ArgumentError(
        f"budgets must be a list of budgets, or how many points the curve is to have (2 to "
        f"{MOST_POINTS}), got {shown(budgets)}"
    )


class _Curve:
    """The points made so far; the first is the unplanned step."""

    def __init__(
        self,
        job: Job,
        strategy: str | Strategy,
        executor: Executor | None,
        cache: Cache | None,
        interrupt: Interrupt,
    ) -> None:
        self.job, self.strategy, self.executor, self.cache = job, strategy, executor, cache
        self.interrupt = interrupt
        self.takes_start = "start" in options_of(create(strategy, realisation=job.realisation.name))
        # Its bytes are a budget within which it is optimal.
        least = try_strategy(job, "store_all", None).plan
        budget_nbytes = None if least is None else least.total_nbytes
        self.attempts = [try_strategy(job, "store_all", budget_nbytes)]

    @property
    def _plans(self) -> list[Plan]:
        return [attempt.plan for attempt in self.attempts if attempt.plan is not None]

    def between_the_ends(self, npoints: int) -> list[int]:
        """Make the point of the least memory; budgets that divide the way to it evenly."""
        self.add([None], between=False)
        totals = [plan.total_nbytes for plan in self._plans]
        least, most, parts = min(totals), max(totals), npoints - 1
        steps = [least + (most - least) * part // parts for part in range(parts - 1, 0, -1)]
        return [nbytes for nbytes in dict.fromkeys(steps) if least < nbytes < most]

    def add(self, budgets: Sequence[int | None], *, between: bool) -> None:
        """Make a point for every budget; ``between`` points whose plans lead to theirs."""
        effort = SHARE_OF_WORK * self.job.effort
        if (between and self.takes_start) or budgets == [None]:
            effort *= SHARE_BETWEEN_NEIGHBOURS
        job = dataclasses.replace(self.job, effort=effort)
        tasks = [
            Task(job, self.strategy, budget, self._start(budget), self._bound_seconds(budget))
            for budget in budgets
        ]
        try:
            attempts = run(
                tasks, interrupt=self.interrupt, executor=self.executor, cache=self.cache
            )
        except KeyboardInterrupt:
            if len(self.attempts) == 1:
                raise
            return
        self.attempts += [attempt for attempt in attempts if attempt is not None]

    def _start(self, budget_nbytes: int | None) -> Schedule | None:
        """The cheapest schedule that is known within the budget."""
        if budget_nbytes is None or not self.takes_start:
            return None
        matches = [plan for plan in self._plans if plan.total_nbytes <= budget_nbytes]
        best = min(matches, key=lambda plan: plan.overhead, default=None)
        return None if best is None else best.schedule

    def _bound_seconds(self, budget_nbytes: int | None) -> float:
        """The most that is proved for a budget at least as large, in any order of the ops."""
        if budget_nbytes is None:
            return 0.0
        shares = [
            plan.lower_bound_overhead or 0.0
            for plan in self._plans
            if not plan.bound_in_order and (plan.budget_nbytes or 0) >= budget_nbytes
        ]
        return max((self.job.graph.seconds * (1.0 + share) for share in shares), default=0.0)

    def _least(self, attempt: Attempt) -> Attempt:
        """``attempt``; that of the least memory with the plan of another point that takes less."""
        if attempt.plan is None or attempt.budget_nbytes is not None:
            return attempt
        most_seconds = self.job.problem(None).most_seconds
        plans = [plan for plan in self._plans if plan.schedule.seconds <= most_seconds]
        least = min([attempt.plan, *plans], key=lambda plan: (plan.total_nbytes, plan.overhead))
        if least is not attempt.plan:
            least = dataclasses.replace(
                least, status=Status.FEASIBLE, budget_nbytes=None, lower_bound_overhead=None
            )
        return dataclasses.replace(attempt, plan=least)

    def result(self) -> Frontier:
        """The curve, without what another plan beats."""

        def rank(attempt: Attempt) -> tuple[int, float]:
            assert attempt.plan is not None
            return attempt.plan.total_nbytes, attempt.plan.overhead

        # The first is of another strategy, within the bytes of the unplanned step.
        known = map(self._least, self.attempts)
        attempts = with_shared_bounds((place > 0, a) for place, a in enumerate(known))
        points: list[Attempt] = []
        left_out = [attempt for attempt in attempts if attempt.plan is None]
        for attempt in sorted((a for a in attempts if a.plan is not None), key=rank):
            if points and rank(attempt)[1] >= rank(points[-1])[1]:
                left_out.append(attempt)
            else:
                points.append(attempt)
        return Frontier(tuple(reversed(points)), tuple(left_out))
