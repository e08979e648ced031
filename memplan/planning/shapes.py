"""Plans of one network for steps of many shapes: the first is searched for, others follow it."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from memplan.errors import ArgumentError
from memplan.planning.apart import Do, apart
from memplan.planning.attempt import plan_of, refused, try_strategy
from memplan.planning.beside import parse_reserve
from memplan.planning.counted_before import CountedBefore
from memplan.planning.job import Job, check_time_limit
from memplan.planning.known import remember
from memplan.planning.plan import Attempt, Plan
from memplan.planning.realisation import Context, Symbol, usable
from memplan.planning.realised import realise
from memplan.planning.transfer import mended, transferred
from memplan.step.costs import Costs, check_costs, table_of
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Problem, Status, Strategy, create, name_of, options_of
from memplan.strategies.auto import Auto
from memplan.strategies.search import Search
from memplan.strategies.spaces.space import SearchOptions
from memplan.util.nbytes import MAX_NBYTES, format_nbytes, is_share, parse_budget
from memplan.util.numbers import plain, shown
from memplan.util.stop import Stop

if TYPE_CHECKING:
    from memplan.mxnet.trace.build import Trace

#: What to do with shapes that come after the first: see :class:`ShapePlanner`.
UNSEEN = ("plan", "nearest", "unplanned")

# What part of the time limit, and of the usual work, a plan gets that begins with another one. In
# blocks, where a move takes ten times as much work on an unrolled LSTM, less found no plan for it.
SHARE, SHARE_IN_BLOCKS = 0.1, 0.2

# What part of that goes into mending the other plan's schedule, and how many attempts in a row may
# make it no cheaper. Set on ResNet-50 at other batch sizes, on BERT, a U-Net and unrolled LSTMs.
MENDING_SHARE = 0.3
PATIENCE = 50

# The options of a strategy that its search takes over, and the least effort that it makes.
SEARCH_OPTIONS = {"seed", "reorder", "recompute_backward"}
LEAST_EFFORT = 1e-6

# Packed graphs with at most this many ops are planned by all that the strategy does, for little of
# it is wasted: mostly the mended schedule is proved to be this near to the cheapest, in parts of
# the step, which ends it; else more is gained than by its search alone. Set on BERT, MobileNet, a
# U-Net and ResNet-101 of 691 ops, and on LSTMs of 881 and 1749, of which nothing is proved, which
# takes twice as long.
SMALL, NEAR = 750, 0.005

# Where a plan is by so much of a step further above its bound than the one that it follows, the
# strategy begins anew; in blocks, of which bounds know nothing, by so much. Set on an LSTM by
# cells: what followed a plan of 20 steps cost 6 and 28 percent, packed with 28 of them and explicit
# with 12, and plans of their own 1 and 5.
ABOVE, ABOVE_IN_BLOCKS = 0.05, 0.2

# Of a network with many inputs, this many are named.
NAMED = 3


class ShapePlanner:
    """Plans one network, or networks that are alike, for whatever shapes they come in.

    The first plan takes the strategy's whole time. Another one begins with the schedule of the plan
    whose step is nearest in size, if that has the same ops, drops more or less until the budget is
    met, and is searched on from there with a tenth of the usual work (in MXNet's blocks a fifth),
    in a tenth of the time at most, unless it is proved to be nearly the cheapest; where that finds
    none, or one that is much further above its bound than the nearest, the strategy begins anew.
    Strategies that cannot begin with a schedule plan each step as if it were the first.

    ``unseen`` says what is done with shapes after the first: "plan" them so; take the "nearest"
    schedule, with more drops if it does not fit, and without a search, unless none fits so; or run
    them "unplanned", whatever they hold. The latter two warn, a line for each. A ``budget`` given
    as a share is one of the unplanned step that comes first, or of each without ``share_of_first``.
    Without one, the first plan has the least memory, and the others may hold as much as the
    largest; so may they where a share of their own step is too little.

    Raises ArgumentError for another ``unseen``, for what is no ``budget``, ``time_limit``,
    ``reserve`` or ``costs``, and for a ``strategy`` that there is not, or that makes no plans for
    ``realisation``.
    """

    def __init__(
        self,
        *,
        budget: int | float | str | None,
        strategy: str | Strategy,
        realisation: str,
        time_limit: float = 60,
        costs: Costs | None = None,
        reserve: int | str = 0,
        optimizer: Any = None,
        unseen: str = "plan",
        share_of_first: bool = True,
    ) -> None:
        if not isinstance(unseen, str) or unseen not in UNSEEN:
            raise ArgumentError(
                f"unseen must be one of {', '.join(map(repr, UNSEEN))}, got {shown(unseen)}"
            )
        parse_budget(budget, MAX_NBYTES)  # of no step as yet: what is none is an error at once
        create(strategy, realisation=usable(realisation))  # now, though a given plan needs none
        self.budget, self.strategy, self.realisation = budget, strategy, realisation
        check_time_limit(plain(time_limit))
        parse_reserve(reserve)
        table = table_of(costs)  # now, as the process may be in another folder at a later shape
        if table is None and costs is not None:
            check_costs(costs)
        self._options = {
            "time_limit": time_limit,
            "costs": costs if table is None else table,
            "reserve": reserve,
            "optimizer": optimizer,
        }
        self._unseen, self._share_of_first = unseen, share_of_first
        self._asked = (budget, strategy, unseen, share_of_first)
        self._plans: list[Plan] = []
        self._counted: CountedBefore | None = None
        # The bytes of the largest step, and of the largest one within its budget, which are held at
        # every other one, too: of a last batch of few examples a share may not be possible, as
        # little of it is activations.
        self._largest_nbytes, self._kept_nbytes = 0, 0

    def adopt(self, plan: Plan) -> None:
        """``plan`` is one of those that others may begin with.

        It takes the place of one of the same size, as of a block that computes something else in
        every step: the others would pile up.
        """
        if self._share_of_first and not self._plans:
            nbytes = parse_budget(self.budget, plan.unplanned.total_nbytes)
            self.budget = plan.budget_nbytes if nbytes is None else nbytes
        self._plans = [other for other in self._plans if _size(other) != _size(plan)]
        self._plans.append(plan)
        self._largest_nbytes = max(self._largest_nbytes, plan.total_nbytes)
        if plan.total_nbytes <= (plan.budget_nbytes or 0):
            self._kept_nbytes = max(self._kept_nbytes, plan.total_nbytes)

    def adopt_given(self, plan: Plan, ctx: Context) -> None:
        """As :meth:`adopt`, for a plan that something else has made, for training on ``ctx``.

        Others count what it counts, and have its budget, unless this planner was asked for its own:
        else they would take bytes for activations that it leaves for something else, or be refused
        where it was not.
        """
        budget = self._asked[0]
        has_own_bytes = budget is not None and not is_share(budget)
        self._counted = CountedBefore.by(
            plan, ctx, has_own_bytes=has_own_bytes, options=self._options
        )
        self.adopt(plan)

    def is_like(self, other: ShapePlanner) -> bool:
        """Was ``other`` asked to plan in the same way?"""
        mine, theirs = (
            (planner._asked, planner._options, planner.realisation) for planner in (self, other)
        )
        return mine == theirs

    def begin_with(self, other: ShapePlanner) -> None:
        """The plans of ``other`` are such that others may begin with; the budget stays as it is."""
        known = set(map(id, self._plans))
        self._plans += [plan for plan in other._plans if id(plan) not in known]
        self._counted = self._counted or other._counted
        self._largest_nbytes = max(self._largest_nbytes, other._largest_nbytes)
        self._kept_nbytes = max(self._kept_nbytes, other._kept_nbytes)

    def plan(
        self,
        net: Symbol,
        realisation: str | None = None,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        check: Callable[[Trace], None] | None = None,
        **request: Any,
    ) -> Plan:
        """The plan for ``net`` with inputs of these ``shapes``, by this ``realisation``.

        Without one, by that of the planner. ``check`` raises what is wrong with a traced network;
        ``request`` are the arguments ``ctx``, ``type_dict`` and ``grad_req`` of
        :func:`memplan.plan`, which says what is raised.
        """
        options: Any = {**self._options, **request}
        job = Job.of_inputs(net, shapes, realisation=realisation or self.realisation, **options)
        if check is not None:
            check(job.trace)
        if self._counted is not None:
            job = self._counted.applied_to(job)
        limit = parse_budget(self.budget, job.unplanned.total_nbytes)
        nearest = min(self._plans, key=lambda plan: _distance(plan, job), default=None)
        with apart(job) as do:
            result = None
            if nearest is not None and self._unseen != "plan":
                result = self._at_once(job, do, limit, nearest)
                _warn(result, shapes)
            result = result or self._searched(job, do, limit, nearest)
        self.adopt(result)
        return result

    def _searched(self, job: Job, do: Do, limit: int | None, nearest: Plan | None) -> Plan:
        """What the strategy finds: in little time from the nearest schedule on, else in all of it.

        Raises BudgetError where that is nothing.
        """
        solver = create(self.strategy, realisation=job.realisation.name)
        name = name_of(self.strategy)
        attempt, start = None, None
        within_nbytes = self._largest_nbytes if limit is None else limit
        if nearest is not None:
            start = transferred(nearest.schedule, job.graph)
            if "start" in options_of(solver):
                attempt = do(_followed, solver, within_nbytes, start, name=name)
        if attempt is None or attempt.plan is None:
            attempt = do(try_strategy, solver, limit, start=start, name=name)
        elif nearest is not None and _is_poor(attempt.plan, nearest):
            known = attempt.plan.schedule
            anew = do(try_strategy, solver, within_nbytes, start=known, name=name)
            if anew.plan is not None and anew.plan.overhead <= attempt.plan.overhead:
                attempt = anew
        if attempt.plan is None and limit is not None and self._kept_nbytes > limit:
            attempt = do(try_strategy, solver, self._kept_nbytes, start=start, name=name)
        if attempt.plan is None:
            raise refused(do, attempt, solver)
        plan: Plan = attempt.plan
        remember(plan.schedule, plan.allocated_nbytes)
        return plan

    def _at_once(self, job: Job, do: Do, limit: int | None, nearest: Plan) -> Plan | None:
        """The plan without a search; None where the nearest schedule cannot be made to fit."""
        within_nbytes, start = math.inf, None
        if self._unseen == "nearest":
            within_nbytes = self._largest_nbytes if limit is None else limit
            start = transferred(nearest.schedule, job.graph)
        plan: Plan | None = do(_fitted, within_nbytes, limit, start, name=nearest.strategy)
        return plan


def _followed(
    job: Job, solver: Strategy, limit: int, start: Schedule | None, *, name: str
) -> Attempt | None:
    """What the strategy finds with little work, from the ``start`` on; None if that never fits."""
    quick = dataclasses.replace(job, time_limit=SHARE * job.time_limit)
    problem = quick.problem(limit)
    unplanned = problem.unplanned()
    if unplanned is None:
        problem.space.prepare()  # compiling is no part of the time
    begin = time.monotonic()
    share = SHARE_IN_BLOCKS if problem.memory.match_ranges else SHARE
    stop = problem.stop(None, effort=share * getattr(solver, "effort", 1.0))
    schedule: Schedule | None
    if unplanned is not None:
        schedule = unplanned.schedule
    elif problem.memory.match_ranges:
        # What is dropped by live bytes must aim much lower before its blocks fit, if they ever do.
        schedule = problem.space.improve(problem, start, stop, SearchOptions())
        if schedule is None:  # it begins once more, with what fits, however expensive
            stop = problem.stop(None, effort=share * getattr(solver, "effort", 1.0))
            start = mended(problem, start, stop, patience=0)
            schedule = start and problem.space.improve(problem, start, stop, SearchOptions())
    else:
        schedule = mended(problem, start, stop.share(MENDING_SHARE), patience=PATIENCE)
    if schedule is None:
        return None
    effort = stop.work_left / problem.stop(None, effort=1.0).work_left
    follower = _following(solver, max(effort, LEAST_EFFORT), problem)
    return try_strategy(quick, follower, limit, start=schedule, since=begin, name=name)


def _fitted(
    job: Job, within_nbytes: float, limit: int | None, start: Schedule | None, *, name: str
) -> Plan | None:
    """The unplanned step if it is ``within_nbytes``, else ``start`` with more drops."""
    begin, schedule = time.monotonic(), Schedule.unplanned(job.graph)
    if within_nbytes < math.inf and job.holds(schedule) > within_nbytes:
        stop = Stop.after(job.time_limit)
        repair = mended(job.problem(int(within_nbytes)), start, stop, patience=0)
        if repair is None:
            return None
        schedule = job.memory.executed(repair)
    else:
        name = "store_all"
    outcome, realised = Outcome(Status.FEASIBLE, schedule), realise(job, schedule)
    return plan_of(job, name, outcome, realised, limit, time.monotonic() - begin)


def _following(solver: Strategy, effort: float, problem: Problem) -> Strategy:
    """What improves a schedule that is known; ``effort`` is what is left.

    In most graphs that are not small only the search does, of strategies that end with one.
    """
    options = options_of(solver)
    if not SEARCH_OPTIONS | {"effort"} <= options:
        return solver
    is_small = len(problem.graph.ops) <= SMALL and not problem.memory.match_ranges
    if is_small and isinstance(solver, Auto):
        gap = max(NEAR, solver.gap)
        return dataclasses.replace(solver, effort=effort, gap=gap, rounds=None)
    shared = {name: getattr(solver, name) for name in options & SEARCH_OPTIONS}
    return Search(effort=effort, **shared)


def _is_poor(plan: Plan, nearest: Plan) -> bool:
    """Is ``plan`` much further above what is proved than the one that it followed?"""
    if plan.lower_bound_overhead is None:
        return False
    gap = plan.overhead - plan.lower_bound_overhead
    usual = nearest.overhead - (nearest.lower_bound_overhead or 0.0)
    in_one_array = plan.trace.form.in_one_array
    return gap > usual + (ABOVE if in_one_array else ABOVE_IN_BLOCKS)


def _size(plan: Plan) -> tuple[int, int, int]:
    """What tells plans apart for what begins with the nearest one."""
    graph = plan.schedule.graph
    return plan.unplanned.total_nbytes, len(graph.ops), graph.nforward


def _distance(plan: Plan, job: Job) -> float:
    """How far apart the sizes of two steps are."""
    sizes = (max(1, step.unplanned.total_nbytes) for step in (plan, job))
    one, other = map(math.log, sizes)
    return abs(one - other)


def _warn(plan: Plan | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Say how these shapes are trained that are not searched for, or that they are (None)."""
    inputs = ", ".join(f"{name}={shape}" for name, shape in islice(shapes.items(), NAMED))
    if plan is None:
        text = "planned anew, as the nearest schedule cannot be made to fit"
        warnings.warn(f"{inputs}: not seen before, {text}", stacklevel=2)
        return
    size, limit = format_nbytes(plan.total_nbytes), plan.budget_nbytes
    how = "by the nearest schedule" if plan.schedule.recomputed else "unplanned"
    excess = ""
    if limit is not None and plan.total_nbytes > limit:
        excess = f", more than the budget of {format_nbytes(limit)}"
    warnings.warn(f"{inputs}: not seen before, trained {how} in {size}{excess}", stacklevel=2)
