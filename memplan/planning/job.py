"""One network, traced and costed, on which any strategy can be tried at any budget."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.errors import ArgumentError, ScheduleError
from memplan.memory.memory import Memory, WithRuns
from memplan.memory.packing import Packing
from memplan.planning.beside import Beside
from memplan.planning.known import known
from memplan.planning.plan import Footprint
from memplan.planning.realisation import (
    AUTO,
    Context,
    Optimizer,
    Realisation,
    Shape,
    Symbol,
    check_is_context,
    device_of,
    load,
    measured_costs,
    of_unplanned,
    runs_whole_steps,
    suited,
    trace_by,
)
from memplan.planning.without_budget import schedule_without_budget, solvers_of_least
from memplan.search.eviction import lowest
from memplan.step.costs import Costs, table_of, with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import first_violation
from memplan.strategies import REALISATIONS, Problem, Strategy
from memplan.strategies.base import MOST_OVERHEAD, check_overhead
from memplan.strategies.quick import candidates, fewest_bytes
from memplan.strategies.search import Search
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Space
from memplan.util.garbage import no_collections
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.numbers import is_amount, plain, shown
from memplan.util.progress import tell
from memplan.util.remember import forget
from memplan.util.stop import Stop

if TYPE_CHECKING:
    from memplan.mxnet.trace.arguments import GradReq
    from memplan.mxnet.trace.build import Trace

# The realisation whose graph is that of MXNet's own executor, and so of the unplanned step.
STOCK = next(iter(REALISATIONS))

# What part of the time limit the first search for the least memory that can be reached takes at
# most, before the one that a plan without a budget makes, and how many seconds.
LEAST_SHARE = 0.5
LOWEST_SECONDS = 30.0

# A search for the least memory of up to so many ops in blocks takes a second, and is made again
# from what it finds, up to so often, until that gets no lower: the least of an explicit U-Net was
# 14% lower then. In one array nothing lower was found.
REPEATED_UP_TO, MOST_SEARCHES = 300, 6

# Of graphs with more ops, whose steps MXNet gets as a whole, the first search for the least memory
# is eviction, with so much work. On an LSTM of 2,000 ops that takes seconds; a round of annealing
# takes a minute and found nothing lower.
LARGE, LARGE_WORK = 1000, 20e3


# What the unplanned step holds, until it is realised.
_UNKNOWN = Footprint(0, 0, 0, 0, 0.0, 0)


@dataclass(frozen=True)
class Realised:
    """What a schedule holds as a network, and where its tensors lie, if in one array."""

    footprint: Footprint
    packing: Packing | None


class Least(NamedTuple):
    """The schedule of the fewest bytes that is known of a job, and what it holds.

    ``searched`` is what searches have found, if another schedule was known; ``solver`` plans within
    its bytes. With ``cut_by_clock`` another process may find another one.
    """

    schedule: Schedule
    footprint: Footprint
    searched: Schedule
    solver: Strategy
    cut_by_clock: bool

    @property
    def is_remembered(self) -> bool:
        """Has no search found it now, but a plan that the process made before?"""
        return self.schedule is not self.searched


class _StockStep(NamedTuple):
    """The unplanned step as MXNet's own executor runs it; it took ``seconds`` to realise."""

    footprint: Footprint
    workspace_nbytes: int
    seconds: float


@dataclass(frozen=True)
class Job:
    """A traced and costed network, ready for any strategy and budget."""

    trace: Trace
    graph: TrainingGraph
    realisation: Realisation
    unplanned: Footprint
    costs: str
    on_gpu: bool
    time_limit: float
    beside: Beside
    realising_seconds: float = 0.0
    max_overhead: float | None = None
    effort: float = 1.0
    known: tuple[Schedule, ...] = ()

    @classmethod
    def prepare(cls, net: Symbol, stock: Job | None = None, /, **options: Any) -> Job:
        """Trace ``net`` and cost it.

        The ``options`` are those of :func:`memplan.plan`, with the shapes; ``stock`` is that of
        :meth:`of_inputs`.
        """
        shapes = {name: value for name, value in options.items() if name not in OPTIONS}
        named = {name: value for name, value in options.items() if name in OPTIONS}
        return cls.of_inputs(net, shapes, stock, **named)

    @classmethod
    def of_inputs(
        cls,
        net: Symbol,
        shapes: Mapping[str, Shape],
        stock: Job | None = None,
        *,
        realisation: str = "mirror",
        ctx: Context | None = None,
        costs: Costs | None = None,
        time_limit: float = 60,
        type_dict: Mapping[str, Any] | None = None,
        reserve: int | str = 0,
        optimizer: Optimizer | None = None,
        grad_req: GradReq = None,
        max_overhead: float | None = None,
    ) -> Job:
        """Trace ``net``, whose inputs have these ``shapes`` and may have any names, and cost it.

        ``stock`` is the job of the first realisation, if there is one of the same net and options.
        """
        time_limit, max_overhead = plain(time_limit), plain(max_overhead)
        _check_options(time_limit, ctx)
        realisation = suited(realisation, [] if ctx is None else [ctx])
        if realisation != AUTO:
            load(realisation).check_context(ctx)
        check_overhead(max_overhead)
        on_gpu = ctx is not None and ctx.device_type == "gpu"
        options: Any = {"type_dict": type_dict, "grad_req": grad_req}
        if costs is None and on_gpu:
            costs = measured_costs(net, shapes, ctx=ctx, realisation=realisation, **options)
        elif costs is None:
            costs = "roofline:v100" if ctx is None else "roofline:cpu"
        options |= {"shapes": shapes, "device_type": "gpu" if on_gpu else "cpu"}

        def traced(name: str) -> Job:
            way, trace = trace_by(name, net, **options)
            table = table_of(costs)
            beside = Beside.of(
                trace, way, ctx=ctx, table=table, reserve=reserve, optimizer=optimizer
            )
            graph = with_costs(trace.graph, costs, device=device_of(ctx), realisation=realisation)
            trace = dataclasses.replace(trace, graph=graph)
            name_of_costs = str(costs) if table is None else f"measured on {table.device}"
            figures = (name_of_costs, on_gpu, time_limit, beside)
            return cls(trace, graph, way, _UNKNOWN, *figures, max_overhead=max_overhead)

        with no_collections():
            if not runs_whole_steps(realisation):
                stock = traced(STOCK)._with_unplanned()
                stock.realisation.check_environment()
                return stock._with_known()
            # One trace lies in the memory of the other, which is gone by then.
            stock_step = stock._as_step() if stock else traced(STOCK)._stock_step()
            return traced(realisation)._compared_with(stock_step)._with_known()

    def _with_known(self) -> Job:
        """With the schedules of this graph that this process remembers."""
        schedules = known(self.graph)
        return dataclasses.replace(self, known=schedules) if schedules else self

    def _with_unplanned(self) -> Job:
        """With the figures of the step that MXNet runs without a plan, and how long that took."""
        begin = time.monotonic()
        figures = self.realised(Schedule.unplanned(self.graph)).footprint
        seconds = time.monotonic() - begin
        return dataclasses.replace(self, unplanned=figures, realising_seconds=seconds)

    def _stock_step(self) -> _StockStep:
        """The unplanned step; of this job nothing else is needed any more."""
        way, trace = of_unplanned(self.realisation, self.trace)
        step = dataclasses.replace(self, trace=trace, realisation=way)._with_unplanned()._as_step()
        forget(self.graph)
        return step

    def _as_step(self) -> _StockStep:
        return _StockStep(self.unplanned, self.beside.workspace_nbytes, self.realising_seconds)

    def _compared_with(self, stock: _StockStep) -> Job:
        """With the unplanned step of the same network."""
        unplanned = stock.footprint
        if self.beside.workspace_nbytes > stock.workspace_nbytes:
            # The unplanned step runs the same ops, so it takes at least the workspace of these.
            schedule = Schedule.unplanned(self.graph)
            unplanned = dataclasses.replace(unplanned, **self.beside.parts(schedule))
        return dataclasses.replace(self, unplanned=unplanned, realising_seconds=stock.seconds)

    @property
    def space(self) -> Space:
        """Which schedules MXNet can be made to execute."""
        return REALISATIONS[self.realisation.name].space

    @functools.cached_property
    def memory(self) -> Memory:
        """What a schedule takes, with all that its realisation adds to it."""
        memory, of_run = self.realisation.memory(self.trace), self.beside.workspace_of_run
        by_schedule = WithRuns(memory, of_run, self.beside.layouts, self.beside.temporary)
        return by_schedule if by_schedule.counts_runs else memory

    def problem(
        self,
        budget_nbytes: int | None,
        start: Schedule | None = None,
        *,
        bound_seconds: float = 0.0,
    ) -> Problem:
        """What a strategy is asked; ``budget_nbytes`` are for the whole step."""
        limit = None
        if budget_nbytes is not None:
            limit = budget_nbytes - self.graph.fixed_nbytes - self.beside.nbytes
        return Problem(
            self.graph,
            limit,
            memory=self.memory,
            space=self.space,
            max_overhead=self.max_overhead if budget_nbytes is None else self.most_overhead,
            start=start,
            time_limit=self.time_limit,
            effort=self.effort,
            bound_seconds=bound_seconds,
        )

    def holds(self, schedule: Schedule) -> int:
        """The bytes of the whole step by ``schedule``, the reserve included."""
        return self.memory.nbytes(schedule) + self.graph.fixed_nbytes + self.beside.nbytes

    def realised(self, schedule: Schedule, packing: Packing | None = None) -> Realised:
        """What MXNet allocates for the network that makes it execute ``schedule``.

        It has the last word. ``packing`` is that of the schedule, if it is known. ScheduleError if
        MXNet cannot execute it.
        """
        packing = packing or self.memory.packing(schedule)
        allocated, match_range = self.realisation.allocated(self.trace, schedule, packing)
        footprint = Footprint(
            peak_nbytes=simulate(schedule).peak_nbytes,
            allocated_nbytes=allocated,
            fixed_nbytes=self.graph.fixed_nbytes,
            seconds=schedule.seconds,
            match_range=match_range,
            **self.beside.parts(schedule),
        )
        return Realised(footprint, packing)

    @property
    def most_overhead(self) -> float:
        """The most overhead of a plan for a budget."""
        return MOST_OVERHEAD if self.max_overhead is None else self.max_overhead

    @property
    def _is_large(self) -> bool:
        """Is the least memory looked for by eviction first, and then without a budget only?"""
        return isinstance(self.space, Sequences) and len(self.graph.ops) > LARGE

    def knows_least_by(self, strategy: Strategy) -> bool:
        """Is :meth:`least_by` this ``strategy`` known already?"""
        return solvers_of_least(strategy) in self._leasts

    @functools.cached_property
    def _leasts(self) -> dict[tuple[Strategy, ...], Least]:
        return {}

    def least_by(self, strategy: Strategy) -> Least:
        """The schedule with the fewest bytes that memplan reaches, and what it holds.

        It holds no more than a plan of ``strategy`` without a budget, nor than what the process
        knows. It takes as long as such a plan, and is found once for a job, by searches that end
        after a number of moves where they can: only where they take the time limit, or the first
        of them too much of it, does it depend on the clock.
        """
        solvers = solvers_of_least(strategy)
        if solvers not in self._leasts:
            with noticing() as interrupt:
                self._leasts[solvers] = self._least_of(solvers, interrupt)
        return self._leasts[solvers]

    def _least_of(self, solvers: Sequence[Strategy], interrupt: Interrupt) -> Least:
        tell("least memory")
        stop = Stop.after(self.time_limit)
        limited = dataclasses.replace(self.problem(None), max_overhead=self.most_overhead)
        # At whatever cost one round is enough, where less memory for less time takes many searches.
        open_ended = math.inf if self.max_overhead is None else self.max_overhead
        problem = dataclasses.replace(limited, max_overhead=open_ended)
        first = stop.share(LEAST_SHARE)
        best, by = self.memory.executed(self._quick_least(problem, limited, first)), solvers[0]
        if not self._is_large:
            best = self._lowest_from(best, problem, limited, first)
        for solver in solvers:
            if interrupt.has_come:
                break
            schedule = schedule_without_budget(self.problem(None), solver, stop)
            lower = limited.cheapest([best, schedule])
            if lower is None or lower is best:
                continue
            best, by = lower, solver
            if not (self._is_large or interrupt.has_come):
                best = self._lowest_from(best, problem, limited, stop)
        is_cut = stop.cut_by_clock or interrupt.has_come
        lowest = limited.cheapest([best, *self.known]) or best
        return Least(lowest, realise(self, lowest).footprint, best, by, is_cut)

    def _quick_least(self, problem: Problem, limited: Problem, stop: Stop) -> Schedule:
        """The schedule of quick strategies that takes the fewest bytes."""
        schedules = list(candidates(problem, stop.share(0.5)))
        is_large, most_seconds = self._is_large, limited.most_seconds
        if is_large:
            until = Stop(stop.deadline, work=LARGE_WORK, part_of=stop)
            schedules.append(lowest(self.graph, until, most_seconds=most_seconds))
        return fewest_bytes(
            problem, [s for s in schedules if s.seconds <= most_seconds], by_live=is_large
        )

    def _lowest_from(
        self, schedule: Schedule, problem: Problem, limited: Problem, stop: Stop
    ) -> Schedule:
        """What searches for less memory make of ``schedule``, within the seconds of ``limited``."""
        is_repeated = len(self.graph.ops) <= REPEATED_UP_TO and problem.memory.match_ranges
        for seed in range(MOST_SEARCHES if is_repeated else 1):
            seconds = min(max(0.1, stop.seconds_left), LOWEST_SECONDS)
            search = Search(rounds=1, time_limit=seconds, start=schedule, seed=seed)
            outcome = search.solve(problem)
            if outcome.cut_by_clock:
                stop.cut()
            before, found = schedule, outcome.schedule
            schedule = limited.cheapest([before, found and self.memory.executed(found)]) or before
            if schedule is before:
                break
        return schedule


def realise(job: Job, schedule: Schedule, packing: Packing | None = None) -> Realised:
    """What the checked schedule holds as a network; ``packing`` if that is known."""
    with no_collections():
        reason = first_violation(schedule)
        if reason is not None:
            raise ScheduleError(f"the strategy's schedule is invalid: {reason}")
        return job.realised(schedule, packing)


def _check_options(time_limit: float, ctx: Context | None) -> None:
    if not is_amount(time_limit) or not time_limit:
        raise ArgumentError(
            f"time_limit must be a positive number of seconds, got {shown(time_limit)}"
        )
    if ctx is not None:
        check_is_context(ctx)


# What is no input of the network where inputs and options are given together.
OPTIONS = frozenset(inspect.signature(Job.of_inputs).parameters) - {"net", "shapes", "stock"}
