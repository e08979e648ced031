"""One network, traced and costed, on which any strategy can be tried at any budget."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memplan.allocator import Allocation, allocate
from memplan.budget import format_nbytes, parse_budget
from memplan.cost import Costs, CostTable, with_costs
from memplan.errors import ArgumentError, BudgetError, CostError, ScheduleError
from memplan.graph import TrainingGraph
from memplan.mirroring import flags_of
from memplan.result import Attempt, Footprint, Plan
from memplan.schedule import Schedule
from memplan.simulate import simulate
from memplan.strategies import REALISATIONS, Outcome, Status, Strategy, create
from memplan.validate import validate

if TYPE_CHECKING:
    from memplan.mxnet.trace import GradReq, Trace

# MXNet's Symbol and Context: the core does not import MXNet.
Symbol = Any
Context = Any
Shape = Sequence[int]

# The strategies whose best plan is the start of those that take one: fast, and unlike each other.
QUICK = {
    "mirror": ("store_all", "memonger", "chen_greedy", "chen_greedy_linear", "chen_sqrt"),
    "explicit": ("store_all", "chen_greedy", "chen_greedy_linear", "chen_sqrt", "griewank"),
}

# Quick strategies of the explicit realisation mind live bytes, and MXNet's blocks need more: these
# shares of the budget are tried until one fits.
QUICK_SHARES = {"mirror": (1.0,), "explicit": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)}

# What part of the time that is left a strategy gets: all but what checking and binding its plan
# take; those of the explicit realisation mind live bytes only, so leave time to tighten, too.
SHARE_OF_TIME = {"mirror": 0.97, "explicit": 0.5}

# Seconds to look for the lowest reachable memory when a budget cannot be met.
LOWEST_SECONDS = 5.0


@dataclass(frozen=True)
class Job:
    """A traced and costed network, ready for any strategy and budget."""

    trace: Trace
    graph: TrainingGraph
    realisation: str
    unplanned: Footprint
    costs: str
    on_gpu: bool
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
    ) -> Job:
        """Trace ``net`` and cost it; the arguments are those of :func:`plan`."""
        from memplan.mxnet.mirror import warn_if_overridden
        from memplan.mxnet.profile import profile
        from memplan.mxnet.trace import trace

        _check_options(realisation, time_limit, ctx)
        reserve_nbytes = _parse_reserve(reserve)
        warn_if_overridden()
        on_gpu = ctx is not None and ctx.device_type == "gpu"
        options: Any = {"type_dict": type_dict, "grad_req": grad_req}
        if costs is None and on_gpu:
            try:
                costs = profile(net, ctx=ctx, realisation=realisation, **(options | dict(shapes)))
            except CostError as error:
                raise CostError(
                    f"{str(error).rstrip('.')}; to plan for a GPU that is not here, pass "
                    "costs='roofline:v100' (or another), or a table measured there"
                ) from error
        elif costs is None:
            costs = "roofline:v100" if ctx is None else "roofline:cpu"
        options |= {"shapes": shapes, "device_type": "gpu" if on_gpu else "cpu"}
        stock = cls._of_trace(
            trace(net, **options), costs, ctx, time_limit, reserve_nbytes
        )._with_unplanned()
        if realisation == "mirror":
            return stock
        explicit = trace(net, realisation=realisation, **options)
        job = cls._of_trace(explicit, costs, ctx, time_limit, reserve_nbytes)
        return dataclasses.replace(job, unplanned=stock.unplanned)

    @classmethod
    def _of_trace(
        cls,
        traced: Trace,
        costs: Costs,
        ctx: Context | None,
        time_limit: float,
        reserve_nbytes: int,
    ) -> Job:
        graph = with_costs(traced.graph, costs, device=_device(ctx))
        return cls(
            trace=traced,
            graph=graph,
            realisation=traced.realisation,
            unplanned=Footprint(0, 0, graph.fixed_nbytes, reserve_nbytes, graph.seconds),
            costs=_name_of(costs),
            on_gpu=ctx is not None and ctx.device_type == "gpu",
            time_limit=time_limit,
            reserve_nbytes=reserve_nbytes,
        )

    def _with_unplanned(self) -> Job:
        """With the figures of the step that MXNet runs without a plan."""
        everything = Schedule.unplanned(self.graph)
        figures = self.footprint(everything, self.realise(everything))
        return dataclasses.replace(self, unplanned=figures)

    def realise(self, schedule: Schedule) -> Symbol:
        """The network that makes MXNet execute ``schedule``; ScheduleError if it cannot."""
        from memplan.mxnet.explicit import training_symbol
        from memplan.mxnet.mirror import annotate

        if self.realisation == "explicit":
            return training_symbol(self.trace, schedule)
        return annotate(self.trace, flags_of(schedule), cudnn=self.on_gpu)

    def placed(self, schedule: Schedule) -> Allocation:
        """The blocks of ``schedule`` with all that its realisation adds."""
        from memplan.mxnet.lowering import lower

        if self.realisation == "explicit":
            return allocate(lower(self.trace, schedule).schedule)
        return allocate(schedule)

    def footprint(self, schedule: Schedule, symbol: Symbol) -> Footprint:
        """Simulated peak and, for ``symbol``, MXNet's own total: it has the last word."""
        from memplan.mxnet.allocation import reported_mib

        replayed = self.placed(schedule)
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
            realisation=self.realisation,
            trace=self.trace,
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
        solver = create(strategy, realisation=self.realisation)
        start = self._quick_start(limit) if "start" in _options(solver) else None
        target, bound = limit, None
        while target == limit or time.monotonic() - begin < self.time_limit:
            left = self.time_limit - (time.monotonic() - begin)
            outcome = self._solve(solver, target, SHARE_OF_TIME[self.realisation] * left, start)
            if target == limit:
                bound = outcome.lower_bound
                if outcome.schedule is None and outcome.status is Status.INFEASIBLE:
                    return outcome, None
            if outcome.schedule is None:
                break
            realised = self._realised(outcome.schedule)
            excess = 0 if limit is None else realised[1].allocated_nbytes - limit
            if excess <= 0:
                status = outcome.status if target == limit else Status.FEASIBLE
                return dataclasses.replace(outcome, status=status, lower_bound=bound), realised
            # A tightened budget that cannot be met proves nothing about the true one.
            target = (target or 0) - excess
            if target < 0:
                break
        if start is not None and limit is not None and self.placed(start).nbytes <= limit:
            return Outcome(Status.FEASIBLE, start, bound), self._realised(start)
        return Outcome(Status.NO_PLAN_FOUND), None

    def _realised(self, schedule: Schedule) -> tuple[Symbol, Footprint]:
        """The checked schedule as a network, and what it holds."""
        verdict = validate(schedule)
        if not verdict.valid:
            raise ScheduleError(f"the strategy's schedule is invalid: {verdict.reason}")
        symbol = self.realise(schedule)
        return symbol, self.footprint(schedule, symbol)

    def _solve(
        self, solver: Strategy, limit: int | None, seconds: float, start: Schedule | None
    ) -> Outcome:
        """The strategy's answer; a step that needs no plan, or gains nothing by it, gets none."""
        everything = Schedule.unplanned(self.graph)
        unplanned_nbytes = self.placed(everything).nbytes
        if limit is not None and unplanned_nbytes <= limit:
            return Outcome(Status.OPTIMAL, everything, self.graph.seconds)
        given = {"start": start, "time_limit": max(0.1, seconds)}
        taken = {name: value for name, value in given.items() if name in _options(solver)}
        if taken:
            solver = dataclasses.replace(solver, **taken)  # type: ignore[type-var]
        outcome = solver.solve(self.graph, limit)
        found = self._checked(outcome, solver)
        if limit is None and found is not None and self.placed(found).nbytes >= unplanned_nbytes:
            return Outcome(Status.FEASIBLE, everything)
        return outcome

    def _checked(self, outcome: Outcome, solver: Strategy) -> Schedule | None:
        """The schedule in ``outcome``; ArgumentError if it is none of this network."""
        name = type(solver).__name__
        if not isinstance(outcome, Outcome):
            returned = type(outcome).__name__
            raise ArgumentError(f"strategy {name} must return an Outcome, but returned {returned}")
        found = outcome.schedule
        if found is not None and (not isinstance(found, Schedule) or found.graph != self.graph):
            raise ArgumentError(
                f"strategy {name} must return a Schedule of the graph that it was given; "
                f"it returned {type(found).__name__} of something else"
            )
        return found

    def _quick_start(self, limit: int | None) -> Schedule | None:
        """The best plan of the quick strategies; if none fits, the one with the least memory."""
        quick = [create(name, realisation=self.realisation) for name in QUICK[self.realisation]]
        shares = QUICK_SHARES[self.realisation] if limit is not None else ()
        for target in (*(int(share * (limit or 0)) for share in shares), None):
            outcomes = [strategy.solve(self.graph, target) for strategy in quick]
            plans = [outcome.schedule for outcome in outcomes if outcome.schedule is not None]
            fitting = [
                plan for plan in plans if limit is not None and self.placed(plan).nbytes <= limit
            ]
            if fitting:
                return min(fitting, key=lambda schedule: schedule.seconds)
        return min(plans, key=lambda schedule: self.placed(schedule).nbytes, default=None)

    def _least(self) -> Schedule | None:
        """A schedule with about the least memory that can be reached."""
        start = self._quick_start(None)
        if self.realisation == "explicit":
            return start
        return self._solve(create("anneal"), None, LOWEST_SECONDS, start).schedule

    def budget_error(self, attempt: Attempt) -> BudgetError:
        """Why there is no plan, with the lowest memory that memplan can reach."""
        least = self._least()
        lowest = None if least is None else self._realised(least)[1].total_nbytes
        proved = attempt.status is Status.INFEASIBLE
        budget = format_nbytes(attempt.budget_nbytes or 0)
        what = f"strategy {attempt.strategy} found no plan within {budget}"
        if proved:
            what = f"no plan fits in {budget} (proved)"
        where = ""
        if lowest is not None:
            by = " (strategy 'anneal')" if self.realisation == "mirror" else ""
            size = f"{format_nbytes(lowest)} ({lowest} bytes)"
            where = f"; the lowest that memplan reaches{by} is {size}"
        why = (
            f". Arguments, gradients and states take {format_nbytes(self.graph.fixed_nbytes)} of "
            f"it, the reserve {format_nbytes(self.reserve_nbytes)}, whatever the plan. "
            "Raise the budget, or lower the batch size"
        )
        return BudgetError(what + where + why, proved=proved, lowest_nbytes=lowest)


def _options(strategy: Strategy) -> frozenset[str]:
    """The names of a strategy's options."""
    if not dataclasses.is_dataclass(strategy):
        return frozenset()
    return frozenset(field.name for field in dataclasses.fields(strategy))


def _check_options(realisation: str, time_limit: float, ctx: Context | None) -> None:
    if realisation not in REALISATIONS:
        choices = ", ".join(map(repr, REALISATIONS))
        raise ArgumentError(f"there is no realisation {realisation!r}; choose from {choices}")
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise ArgumentError(f"time_limit must be a positive number of seconds, got {time_limit!r}")
    if ctx is not None and not hasattr(ctx, "device_type"):
        raise ArgumentError(f"ctx must be a context such as mx.gpu(0), got {ctx!r}")


def _parse_reserve(reserve: int | str | None) -> int:
    if reserve in (0, None):
        return 0
    try:
        return parse_budget(reserve, 0) or 0
    except ArgumentError:
        raise ArgumentError(
            f"the reserve {reserve!r} cannot be used; it is a whole number of bytes "
            f"or a string with a unit of bytes ('200MiB')"
        ) from None


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
