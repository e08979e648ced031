"""One network, traced and costed, on which any strategy can be tried at any budget."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.errors import ArgumentError
from memplan.memory.memory import Memory, WithRuns
from memplan.memory.packing import Packing
from memplan.planning.beside import Beside
from memplan.planning.known import known
from memplan.planning.least import Least, LeastSearch
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
from memplan.planning.realised import Realised
from memplan.planning.without_budget import solvers_of_least
from memplan.step.costs import Costs, table_of, with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import REALISATIONS, Problem, Strategy
from memplan.strategies.base import MOST_OVERHEAD, check_overhead
from memplan.strategies.spaces.space import Space
from memplan.util.garbage import no_collections
from memplan.util.interrupts import noticing
from memplan.util.numbers import is_amount, plain, shown
from memplan.util.remember import forget

if TYPE_CHECKING:
    from memplan.mxnet.trace.arguments import GradReq
    from memplan.mxnet.trace.build import Trace

# The realisation whose graph is that of MXNet's own executor, and so of the unplanned step.
STOCK = next(iter(REALISATIONS))

# What the unplanned step holds, until it is realised.
_UNKNOWN = Footprint(0, 0, 0, 0, 0.0, 0)


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
        check_time_limit(time_limit)
        if ctx is not None:
            check_is_context(ctx)
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
                self._leasts[solvers] = LeastSearch(self).run(solvers, interrupt)
        return self._leasts[solvers]


def check_time_limit(time_limit: Any) -> None:
    """ArgumentError for what is no number of seconds to plan in."""
    if not is_amount(time_limit) or not time_limit:
        raise ArgumentError(
            f"time_limit must be a positive number of seconds, got {shown(time_limit)}"
        )


# What is no input of the network where inputs and options are given together.
OPTIONS = frozenset(inspect.signature(Job.of_inputs).parameters) - {"net", "shapes", "stock"}
