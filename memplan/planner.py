"""From a network and a budget to a Plan: trace, costs, strategy, check, realise."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memplan.allocator import allocate
from memplan.budget import format_nbytes, parse_budget
from memplan.cost import Costs, CostTable, with_costs
from memplan.errors import ArgumentError, BudgetError, CostError, ScheduleError
from memplan.graph import TrainingGraph
from memplan.mirroring import flags_of
from memplan.result import Attempt, Comparison, Footprint, Plan
from memplan.schedule import Schedule
from memplan.simulate import simulate
from memplan.strategies import Outcome, Status, Strategy, create
from memplan.validate import validate

if TYPE_CHECKING:
    from memplan.mxnet.trace import GradReq, Trace

# MXNet's Symbol and Context: the core does not import MXNet.
Symbol = Any
Context = Any
Shape = Sequence[int]
Budget = int | float | str | None

REALISATIONS = ("mirror",)

# The strategies whose best plan is the start of those that take one: fast, and unlike each other.
QUICK = ("store_all", "memonger", "chen_greedy", "chen_greedy_linear", "chen_sqrt")

# Seconds to look for the lowest reachable memory when a budget cannot be met.
LOWEST_SECONDS = 5.0


def search_plan(
    net: Symbol,
    ntrial: int | None = None,
    type_dict: Mapping[str, Any] | None = None,
    *,
    strategy: str | Strategy = "checkmate",
    budget: Budget = None,
    **options: Any,
) -> Symbol:
    """``net`` with attributes set so that any training script trains it within ``budget``.

    Takes what :func:`plan` takes, and memonger's call as it is: with ``ntrial`` the strategy is
    memonger's search.
    """
    if ntrial is not None:
        strategy = create("memonger", ntrial=ntrial)
    made = plan(net, strategy=strategy, budget=budget, type_dict=type_dict, **options)
    return made.symbol


def plan(
    net: Symbol,
    *,
    strategy: str | Strategy = "checkmate",
    budget: Budget = None,
    realisation: str = "mirror",
    ctx: Context | None = None,
    costs: Costs | None = None,
    time_limit: float = 60,
    type_dict: Mapping[str, Any] | None = None,
    reserve: int | str = 0,
    grad_req: GradReq = None,
    **shapes: Shape,
) -> Plan:
    """The plan that ``strategy`` finds for training ``net`` within ``budget``.

    ``shapes`` are the input shapes: ``data=(32, 3, 224, 224)``; ``type_dict`` and ``grad_req``
    are those of MXNet's ``bind`` (None: as Module does, no gradient for the named inputs and the
    labels). ``budget`` is for the whole step on the device: bytes, a string such as "4GiB", or a
    fraction of the unplanned total; None means the least memory at no more than one extra forward
    pass. ``reserve`` are bytes to leave for optimizer states and workspaces. ``costs`` are op
    times (:func:`memplan.cost.with_costs`); None means measured on ``ctx`` if that is a GPU, else
    a roofline of the CPU if ``ctx`` is one, else of a V100. ``time_limit`` are seconds for the
    strategy.

    Raises ArgumentError for arguments that cannot be used, TraceError for a network that cannot
    be trained, CostError for costs that do not fit it, BudgetError where no plan is within the
    budget, DependencyError without MXNet.
    """
    job = _Job.prepare(
        net,
        realisation=realisation,
        ctx=ctx,
        costs=costs,
        time_limit=time_limit,
        type_dict=type_dict,
        reserve=reserve,
        grad_req=grad_req,
        **shapes,
    )
    budget_nbytes = parse_budget(budget, job.unplanned.total_nbytes)
    attempt = job.attempt(strategy, budget_nbytes)
    if attempt.plan is None:
        raise job.budget_error(attempt)
    return attempt.plan


def compare(
    net: Symbol,
    *,
    strategies: Iterable[str | Strategy] = ("memonger", "chen_greedy", "checkmate"),
    budgets: Iterable[Budget] = (0.75, 0.5, None),
    **options: Any,
) -> Comparison:
    """Plans of every strategy at every budget; print it, or take its ``to_csv()``.

    ``options`` are the other arguments of :func:`plan`. A budget that a strategy cannot meet is a
    row, not an error.
    """
    job = _Job.prepare(net, **options)
    limits = [parse_budget(budget, job.unplanned.total_nbytes) for budget in budgets]
    chosen = list(strategies)
    for strategy in chosen:
        create(strategy)  # an unknown name is said before the first long search
    return Comparison(tuple(job.attempt(s, limit) for limit in limits for s in chosen))


@dataclass(frozen=True)
class _Job:
    """A traced and costed network, ready for any strategy and budget."""

    trace: Trace
    graph: TrainingGraph
    unplanned: Footprint
    costs: str
    cudnn: bool
    time_limit: float
    reserve_nbytes: int

    @classmethod
    def prepare(
        cls,
        net: Symbol,
        *,
        realisation: str = "mirror",
        ctx: Context | None = None,
        costs: Costs | None = None,
        time_limit: float = 60,
        type_dict: Mapping[str, Any] | None = None,
        reserve: int | str = 0,
        grad_req: GradReq = None,
        **shapes: Shape,
    ) -> _Job:
        """Trace ``net`` and cost it; the arguments are those of :func:`plan`."""
        from memplan.mxnet.mirror import warn_if_overridden
        from memplan.mxnet.profile import profile
        from memplan.mxnet.trace import trace

        _check_options(realisation, time_limit)
        reserve_nbytes = 0 if reserve in (0, None) else parse_budget(reserve, 0) or 0
        warn_if_overridden()
        traced = trace(net, shapes=shapes, type_dict=type_dict, grad_req=grad_req)
        on_gpu = ctx is not None and ctx.device_type == "gpu"
        if costs is None and on_gpu:
            options: Any = {"type_dict": type_dict, "grad_req": grad_req, **shapes}
            costs = profile(net, ctx=ctx, **options)
        elif costs is None:
            costs = "roofline:v100" if ctx is None else "roofline:cpu"
        graph = with_costs(traced.graph, costs, device=_device(ctx))
        job = cls(
            trace=traced,
            graph=graph,
            unplanned=Footprint(0, 0, graph.fixed_nbytes, reserve_nbytes, graph.seconds),
            costs=_name_of(costs),
            cudnn=on_gpu,
            time_limit=time_limit,
            reserve_nbytes=reserve_nbytes,
        )
        everything = Schedule.unplanned(graph)
        return dataclasses.replace(
            job, unplanned=job.footprint(everything, job.realise(everything))
        )

    def realise(self, schedule: Schedule) -> Symbol:
        """The network that makes MXNet execute ``schedule``; ScheduleError if it cannot."""
        from memplan.mxnet.mirror import annotate

        return annotate(self.trace, flags_of(schedule), cudnn=self.cudnn)

    def footprint(self, schedule: Schedule, symbol: Symbol) -> Footprint:
        """Simulated peak and, for ``symbol``, MXNet's own total: it has the last word."""
        from memplan.mxnet.allocation import reported_mib

        replayed = allocate(schedule)
        surplus = (reported_mib(symbol, self.trace) - (replayed.reported_nbytes >> 20)) << 20
        return Footprint(
            peak_nbytes=simulate(schedule).peak_nbytes,
            allocated_nbytes=replayed.nbytes + max(0, surplus),
            fixed_nbytes=self.graph.fixed_nbytes,
            reserve_nbytes=self.reserve_nbytes,
            seconds=schedule.seconds,
        )

    def attempt(self, strategy: str | Strategy, budget_nbytes: int | None) -> Attempt:
        """What ``strategy`` finds within the budget, checked, realised and measured."""
        begin = time.monotonic()
        limit = None
        if budget_nbytes is not None:
            limit = budget_nbytes - self.graph.fixed_nbytes - self.reserve_nbytes
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        outcome, found = self._within(strategy, limit, begin)
        seconds = time.monotonic() - begin
        if outcome.schedule is None or found is None:
            return Attempt(name, budget_nbytes, outcome.status, None, seconds)
        symbol, footprint = found
        bound = None
        if outcome.lower_bound is not None and self.graph.seconds:
            bound = max(0.0, outcome.lower_bound / self.graph.seconds - 1.0)
        made = Plan(
            status=outcome.status,
            symbol=symbol,
            schedule=outcome.schedule,
            strategy=name,
            costs=self.costs,
            budget_nbytes=budget_nbytes,
            footprint=footprint,
            unplanned=self.unplanned,
            lower_bound=bound,
            planning_seconds=seconds,
        )
        return Attempt(name, budget_nbytes, outcome.status, made, seconds)

    def _within(
        self, strategy: str | Strategy, limit: int | None, begin: float
    ) -> tuple[Outcome, tuple[Symbol, Footprint] | None]:
        """Solve; where MXNet allocates more than ``limit``, tighten by the excess and try again."""
        if limit is not None and limit < 0:
            return Outcome(Status.INFEASIBLE), None
        target, first = limit, None
        while True:
            outcome = self._solve(strategy, target, self.time_limit - (time.monotonic() - begin))
            first = first or outcome
            if outcome.schedule is None:
                # A tightened budget that cannot be met proves nothing about the true one.
                return (outcome if target == limit else Outcome(Status.NO_PLAN_FOUND)), None
            verdict = validate(outcome.schedule)
            if not verdict.valid:
                raise ScheduleError(f"the strategy's schedule is invalid: {verdict.reason}")
            symbol = self.realise(outcome.schedule)
            footprint = self.footprint(outcome.schedule, symbol)
            if limit is None or footprint.allocated_nbytes <= limit:
                status = outcome.status if target == limit else Status.FEASIBLE
                bound = first.lower_bound
                return dataclasses.replace(outcome, status=status, lower_bound=bound), (
                    symbol,
                    footprint,
                )
            target = (limit if target is None else target) - (footprint.allocated_nbytes - limit)
            if target < 0 or time.monotonic() - begin > self.time_limit:
                return Outcome(Status.NO_PLAN_FOUND), None

    def _solve(self, strategy: str | Strategy, limit: int | None, seconds: float) -> Outcome:
        """The strategy's answer; a step that needs no plan, or gains nothing by it, gets none."""
        solver = create(strategy)
        everything = Schedule.unplanned(self.graph)
        unplanned_nbytes = allocate(everything).nbytes
        if limit is not None and unplanned_nbytes <= limit:
            return Outcome(Status.OPTIMAL, everything, self.graph.seconds)
        outcome = self._ask(solver, limit, seconds)
        found = outcome.schedule
        if limit is None and found is not None and allocate(found).nbytes >= unplanned_nbytes:
            return Outcome(Status.FEASIBLE, everything)
        return outcome

    def _ask(self, solver: Strategy, limit: int | None, seconds: float) -> Outcome:
        """Give the strategy its time and its start, and let it solve."""
        fields = {field.name for field in dataclasses.fields(solver)}  # type: ignore[arg-type]
        given: dict[str, Any] = {}
        if "start" in fields:
            begin = time.monotonic()
            given["start"] = self._quick_start(limit)
            seconds -= time.monotonic() - begin
        if "time_limit" in fields:
            given["time_limit"] = max(0.1, seconds)
        if given:
            solver = dataclasses.replace(solver, **given)  # type: ignore[type-var]
        return solver.solve(self.graph, limit)

    def _quick_start(self, limit: int | None) -> Schedule | None:
        """The best plan of the quick strategies; if none fits, the one with the least memory."""
        for target in dict.fromkeys((limit, None)):
            outcomes = [create(name).solve(self.graph, target) for name in QUICK]
            plans = [outcome.schedule for outcome in outcomes if outcome.schedule is not None]
            if plans and target is not None:
                return min(plans, key=lambda schedule: schedule.seconds)
            if plans:
                return min(plans, key=lambda schedule: allocate(schedule).nbytes)
        return None

    def budget_error(self, attempt: Attempt) -> BudgetError:
        """Why there is no plan, with the lowest memory that memplan can reach."""
        least = self._solve("anneal", None, LOWEST_SECONDS).schedule
        held = self.graph.fixed_nbytes + self.reserve_nbytes
        lowest = None if least is None else held + allocate(least).nbytes
        proved = attempt.status is Status.INFEASIBLE
        budget = format_nbytes(attempt.budget_nbytes or 0)
        what = (
            f"no plan fits in {budget} (proved)"
            if proved
            else (f"strategy {attempt.strategy} found no plan within {budget}")
        )
        where = (
            ""
            if lowest is None
            else (f"; the lowest that memplan reaches is {format_nbytes(lowest)} ({lowest} bytes)")
        )
        why = (
            f". Arguments, gradients and states take {format_nbytes(self.graph.fixed_nbytes)} of "
            f"it, the reserve {format_nbytes(self.reserve_nbytes)}, whatever the plan. "
            "Raise the budget, or lower the batch size"
        )
        return BudgetError(what + where + why, proved=proved, lowest_nbytes=lowest)


def _check_options(realisation: str, time_limit: float) -> None:
    if realisation not in REALISATIONS:
        choices = ", ".join(map(repr, REALISATIONS))
        raise ArgumentError(f"there is no realisation {realisation!r}; choose from {choices}")
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise ArgumentError(f"time_limit must be a positive number of seconds, got {time_limit!r}")


def _device(ctx: Context | None) -> str | None:
    """Where costs must come from; only the kind of device, for a GPU not in this machine."""
    from memplan.mxnet.profile import device_name

    if ctx is None:
        return None
    try:
        return device_name(ctx)
    except CostError:
        return str(ctx.device_type)


def _name_of(costs: Costs) -> str:
    if isinstance(costs, CostTable):
        return f"measured on {costs.device}"
    return str(costs)
