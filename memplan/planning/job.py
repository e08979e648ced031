"""One network, traced and costed, on which any strategy can be tried at any budget."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memplan.errors import ArgumentError, BudgetError, CostError, ScheduleError
from memplan.memory.blocks import Allocation, allocate, best_allocation
from memplan.memory.packing import pack
from memplan.planning.plan import Attempt, Footprint, Plan
from memplan.planning.quick import fewest_bytes, quick_schedule
from memplan.planning.refusal import refusal
from memplan.programs.moments import Moments
from memplan.programs.solver import DEFAULT_SOLVER, TOLERANCE
from memplan.step.costs import Costs, CostTable, with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flags_of
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import REALISATIONS, Outcome, Status, Strategy, create
from memplan.strategies.anneal import Anneal
from memplan.strategies.search import Search
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.nbytes import format_nbytes, parse_budget
from memplan.util.progress import tell

if TYPE_CHECKING:
    from memplan.mxnet.trace.arguments import GradReq
    from memplan.mxnet.trace.build import Trace

# MXNet's Symbol and Context: the core does not import MXNet.
Symbol = Any
Context = Any
Shape = Sequence[int]

# What part of the time limit a strategy gets in any case.
LEAST_SHARE_OF_TIME = 0.1

# What part of the time limit the quick strategies get.
QUICK_SHARE_OF_TIME = 0.1

# What part of the time that is left a strategy gets. The rest is to tighten its budget, if MXNet
# allocates more: what a realisation adds to a schedule, or what blocks need beyond live bytes.
MIND_BLOCKS = {"mirror": 0.9, "explicit": 0.7, "packed": 0.9}
MIND_LIVE_BYTES = 0.5

# What part of the time limit goes into a bound, if the strategy itself has none.
BOUND_SHARE_OF_TIME = 0.05

# Checking and binding a plan takes about so many times what binding the unplanned step takes.
REALISING = {"mirror": 2.0, "explicit": 4.0, "packed": 4.0}

# What part of the time limit the search for the least memory that can be reached takes at most,
# and annealing over flags, which has no other end.
LEAST_SHARE = 0.5
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
    realising_seconds: float = 0.0

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
        from memplan.mxnet.profile import profile
        from memplan.mxnet.realise.mirror import warn_if_overridden
        from memplan.mxnet.trace.build import trace

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
        return dataclasses.replace(
            job, unplanned=stock.unplanned, realising_seconds=stock.realising_seconds
        )

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
            unplanned=Footprint(
                0, 0, graph.fixed_nbytes, reserve_nbytes, graph.seconds, graph.match_range
            ),
            costs=_name_of(costs),
            on_gpu=ctx is not None and ctx.device_type == "gpu",
            time_limit=time_limit,
            reserve_nbytes=reserve_nbytes,
        )

    def _with_unplanned(self) -> Job:
        """With the figures of the step that MXNet runs without a plan, and how long that took."""
        begin = time.monotonic()
        everything = Schedule.unplanned(self.graph)
        figures = self.footprint(everything, self.realise(everything))
        seconds = time.monotonic() - begin
        return dataclasses.replace(self, unplanned=figures, realising_seconds=seconds)

    def realise(self, schedule: Schedule) -> Symbol:
        """The network that makes MXNet execute ``schedule``; ScheduleError if it cannot."""
        from memplan.mxnet.realise.explicit import training_symbol
        from memplan.mxnet.realise.mirror import annotate

        if self.realisation != "mirror":
            return training_symbol(self.trace, schedule)
        return annotate(self.trace, flags_of(schedule), cudnn=self.on_gpu)

    def placed_nbytes(self, schedule: Schedule) -> int:
        """The bytes in which ``schedule`` is placed, with all that its realisation adds."""
        if self.realisation == "packed":
            return pack(self._lowered(schedule)).nbytes
        return self._blocks(schedule).nbytes

    def _lowered(self, schedule: Schedule) -> Schedule:
        from memplan.mxnet.realise.lowering import lower

        return lower(self.trace, schedule).schedule

    def _blocks(self, schedule: Schedule) -> Allocation:
        """What MXNet's allocator makes of ``schedule``."""
        if self.realisation == "mirror":
            return allocate(schedule)
        return best_allocation(self._lowered(schedule))

    def footprint(self, schedule: Schedule, symbol: Symbol) -> Footprint:
        """Simulated peak and, for ``symbol``, MXNet's own total: it has the last word.

        In packed memory MXNet allocates the one array that it is asked for.
        """
        if self.realisation == "packed":
            allocated, match_range = self.placed_nbytes(schedule), self.graph.match_range
        else:
            allocated, match_range = self._allocated(schedule, symbol)
        return Footprint(
            peak_nbytes=simulate(schedule).peak_nbytes,
            allocated_nbytes=allocated,
            fixed_nbytes=self.graph.fixed_nbytes,
            reserve_nbytes=self.reserve_nbytes,
            seconds=schedule.seconds,
            match_range=match_range,
        )

    def _allocated(self, schedule: Schedule, symbol: Symbol) -> tuple[int, int]:
        """Bytes of all blocks, and the match range."""
        from memplan.mxnet.realise.measure import reported_mib

        replayed = self._blocks(schedule)
        asked = replayed.match_range if self.realisation == "explicit" else None
        reported = reported_mib(symbol, self.trace, asked)
        surplus = (reported - (replayed.reported_nbytes >> 20)) << 20
        return replayed.nbytes + max(0, surplus), replayed.match_range

    def attempt(
        self,
        strategy: str | Strategy,
        budget_nbytes: int | None,
        *,
        start: Schedule | None = None,
        since: float | None = None,
    ) -> Attempt:
        """What ``strategy`` finds within the budget, checked, realised and measured.

        ``start`` is a schedule that is known already, for strategies that take one. The time limit
        counts from ``since`` (of time.monotonic()), or from now. An interrupt ends the search with
        the best plan so far; without any, it is raised.
        """
        begin = time.monotonic() if since is None else since
        limit = None
        if budget_nbytes is not None:
            limit = budget_nbytes - self.graph.fixed_nbytes - self.reserve_nbytes
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        tell(f"{name}, {'least' if budget_nbytes is None else format_nbytes(budget_nbytes)}")
        with noticing() as interrupt:
            outcome, found = self._within(strategy, limit, begin, start, interrupt)
        seconds = time.monotonic() - begin
        if outcome.schedule is None or found is None:
            return Attempt(
                name, budget_nbytes, outcome.status, None, seconds, in_order=outcome.in_order
            )
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
            bound_in_order=outcome.in_order,
            planning_seconds=seconds,
        )
        return Attempt(
            name, budget_nbytes, outcome.status, made, seconds, in_order=outcome.in_order
        )

    def _within(
        self,
        strategy: str | Strategy,
        limit: int | None,
        begin: float,
        known: Schedule | None,
        interrupt: Interrupt,
    ) -> tuple[Outcome, tuple[Symbol, Footprint] | None]:
        """Solve; where MXNet allocates more than ``limit``, tighten by the excess and try again."""
        solver = create(strategy, realisation=self.realisation)
        if limit is not None and limit < self._moments(solver).floor.nbytes:
            return Outcome(Status.INFEASIBLE), None
        start = None
        if "start" in options_of(solver):
            soon = time.monotonic() + QUICK_SHARE_OF_TIME * self.time_limit
            start = self._start(limit, known, soon)
        if start is not None and limit is not None and self.placed_nbytes(start) <= limit:
            tell("start", incumbent_seconds=start.seconds, unplanned_seconds=self.graph.seconds)
        target, seed, proved = limit, start, Outcome(Status.NO_PLAN_FOUND)
        deadline = begin + self.time_limit - REALISING[self.realisation] * self.realising_seconds
        while target == limit or time.monotonic() < deadline:
            left = max(deadline - time.monotonic(), LEAST_SHARE_OF_TIME * self.time_limit)
            outcome = self._solve(solver, target, self._share_of_time(solver) * left, seed)
            if target == limit:
                if limit is not None:
                    outcome = self._bounded(outcome, solver, limit)
                proved = outcome
                if outcome.status is Status.INFEASIBLE and not outcome.in_order:
                    return outcome, None
            if outcome.schedule is None:
                break
            realised = self._realised(outcome.schedule)
            excess = 0 if limit is None else realised[1].allocated_nbytes - limit
            if excess <= 0:
                status = outcome.status if target == limit else Status.FEASIBLE
                return dataclasses.replace(
                    proved, status=status, schedule=outcome.schedule
                ), realised
            # A tightened budget that cannot be met proves nothing about the true one.
            target, seed = (target or 0) - excess, outcome.schedule
            if target < 0 or interrupt.noticed:
                break
            tell("tightened, as MXNet allocates more than is alive")
        if start is not None and limit is not None:
            fallback = self._in_hand(limit, start, interrupt)
            if fallback is not None:
                schedule, symbol, footprint = fallback
                outcome = dataclasses.replace(proved, status=Status.FEASIBLE, schedule=schedule)
                return outcome, (symbol, footprint)
        if interrupt.noticed:
            raise KeyboardInterrupt
        return proved if proved.status is Status.INFEASIBLE else Outcome(Status.NO_PLAN_FOUND), None

    def _moments(self, solver: Strategy) -> Moments:
        """What holds for every schedule that ``solver`` may return."""
        may_repeat_backward = getattr(solver, "recompute_backward", self.realisation != "mirror")
        return Moments(self.graph, recompute_backward=may_repeat_backward)

    def _share_of_time(self, solver: Strategy) -> float:
        """What part of the time ``solver`` gets at once."""
        minds_live_bytes = getattr(solver, "memory", "live") == "live"
        if self.realisation != "mirror" and minds_live_bytes:
            return MIND_LIVE_BYTES
        return MIND_BLOCKS[self.realisation]

    def _bounded(self, outcome: Outcome, solver: Strategy, limit: int) -> Outcome:
        """``outcome`` with the bound that holds for schedules in any order, if that says more."""
        deadline = time.monotonic() + BOUND_SHARE_OF_TIME * self.time_limit
        program_solver = getattr(solver, "solver", DEFAULT_SOLVER)
        bound = self._moments(solver).bound(limit, deadline, solver=program_solver).seconds
        if outcome.schedule is None:
            proved = math.isinf(bound) and outcome.status is Status.NO_PLAN_FOUND
            return Outcome(Status.INFEASIBLE) if proved else outcome
        if bound < (outcome.lower_bound or 0.0):
            return outcome
        seconds = outcome.schedule.seconds
        closed = seconds <= bound + 2 * TOLERANCE * self.graph.seconds
        status = Status.OPTIMAL if closed else outcome.status
        return Outcome(status, outcome.schedule, min(seconds, bound))

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
        if limit is not None and self.placed_nbytes(everything) <= limit:
            return Outcome(Status.OPTIMAL, everything, self.graph.seconds)
        given = {"start": start, "time_limit": max(0.1, seconds)}
        taken = {name: value for name, value in given.items() if name in options_of(solver)}
        if taken:
            solver = dataclasses.replace(solver, **taken)  # type: ignore[type-var]
        outcome = solver.solve(self.graph, limit)
        found = self._checked(outcome, solver)
        if limit is None and found is not None:
            least = min((found, start or everything, everything), key=self.placed_nbytes)
            return dataclasses.replace(outcome, schedule=least)
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

    def _start(self, limit: int | None, known: Schedule | None, deadline: float) -> Schedule:
        """The better one of the quick strategies' best plan and the one that is known."""

        def rank(schedule: Schedule) -> tuple[float, float]:
            nbytes = self.placed_nbytes(schedule)
            return (nbytes if limit is None else max(0, nbytes - limit), schedule.seconds)

        quick = quick_schedule(self.graph, self.realisation, limit, deadline, self.placed_nbytes)
        return quick if known is None else min((quick, known), key=rank)

    def _in_hand(
        self, limit: int, start: Schedule, interrupt: Interrupt
    ) -> tuple[Schedule, Symbol, Footprint] | None:
        """A schedule within ``limit`` that is known without the search that was just made.

        As every budget above the least memory is met by it, a plan at one budget means that there
        is a plan at every larger one.
        """
        if self.placed_nbytes(start) <= limit:
            symbol, footprint = self._realised(start)
            if footprint.allocated_nbytes <= limit:
                return start, symbol, footprint
        if interrupt.noticed and "least" not in self.__dict__:
            return None
        return self.least if self.least[2].allocated_nbytes <= limit else None

    @functools.cached_property
    def least(self) -> tuple[Schedule, Symbol, Footprint]:
        """The schedule with the fewest bytes that memplan reaches, whatever it costs, realised.

        It is found once for a job, by searches that end after a number of moves: only where they
        take too much of the time limit does it depend on the clock.
        """
        tell("least memory")
        seconds = LEAST_SHARE * self.time_limit
        deadline = time.monotonic() + seconds
        quick = fewest_bytes(self.graph, self.realisation, deadline, self.placed_nbytes)
        if self.realisation == "mirror":
            solver: Strategy = Anneal(time_limit=min(seconds, LOWEST_SECONDS), start=quick)
        else:
            memory = "blocks" if self.realisation == "explicit" else "live"
            solver = Search(rounds=1, memory=memory, time_limit=max(0.1, seconds), start=quick)
        found = self._checked(solver.solve(self.graph, None), solver)
        schedule = min((quick, found or quick), key=self.placed_nbytes)
        return (schedule, *self._realised(schedule))

    def budget_error(self, attempt: Attempt, strategy: str | Strategy) -> BudgetError:
        """Why ``strategy`` found no plan, with the lowest memory that memplan can reach."""
        schedule, _, footprint = self.least
        floor = self._moments(create(strategy, realisation=self.realisation)).floor
        return refusal(self.graph, attempt, floor, (schedule, footprint), self.reserve_nbytes)


def options_of(strategy: Strategy) -> frozenset[str]:
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
    if isinstance(costs, str | os.PathLike) and not str(costs).startswith("roofline:"):
        costs = CostTable.load(costs)
    if isinstance(costs, CostTable):
        return f"measured on {costs.device}"
    return str(costs)
