"""For who does not want to choose: what is proved quickly first, then the best of the time left."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from memplan.errors import ArgumentError
from memplan.memory.blocks import MATCH_RANGES, best_allocation
from memplan.memory.packing import pack
from memplan.programs.moments import Moments
from memplan.programs.refinement import refine
from memplan.programs.solver import DEFAULT_SOLVER, TOLERANCE, check_solver
from memplan.search.eviction import Evictions, lowest
from memplan.search.mirrored import mirrored_schedule
from memplan.search.sequence_search import Rules, compile_search, search
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Outcome, Status
from memplan.util.progress import tell

# Of graphs with more ops than this, moments give a bound only: schedules made of what they say take
# time and memory with the square of the number of ops.
LARGE = 3000

# Part of the time for what a few moments say: less in blocks, where they say less.
MOMENTS_SHARES = {"live": 0.4, "blocks": 0.2, "packed": 0.3}

# Part of the time for annealing over what mirroring could recompute, at these match ranges: few
# decisions, so that in blocks it is a far better start than schedules that mind live bytes.
MIRRORED_SHARE = 0.25
MIRRORED_RANGES = (2, 16)

# The least memory is looked for in so many steps, at first by so much less each.
STEPS = 12
FIRST_STEP = 0.08

# Greedy schedules are made for these parts of the budget in live bytes, in this part of the time.
GREEDY_PERCENTS = tuple(range(100, 30, -10))
GREEDY_SHARE = 0.3

# MXNet's blocks need more than the bytes alive, packed memory a little more: schedules for these
# shares of the budget are made.
LIVE_SHARES = {
    "live": (1.0,),
    "blocks": (1.0, 0.9, 0.8, 0.7, 0.6),
    "packed": (1.0, 0.99, 0.97, 0.94),
}

# Part of the time for choosing what to drop, again and again. On traced networks that is as good as
# the search for long, and drops at the same places in repeated layers are easily packed.
EVICTIONS_SHARE = 0.25
PATIENCE = 300

# What does not fit when it is packed is tried for so much less, so often.
TRIES = 4


@dataclass(frozen=True)
class Auto:
    """For explicit schedules: a few moments prove a bound and give schedules, a search the rest.

    ``memory`` says what the budget holds for: "live", the peak of live bytes, or "blocks", what
    MXNet's allocator hands out at the best match range, or "packed", one array with an offset for
    every tensor (:mod:`memplan.memory.packing`). ``solver`` is "HIGHS" or "CBC", ``start`` a
    schedule to start from. The bound holds for schedules in any order.
    """

    time_limit: float = 60.0
    memory: str = "live"
    solver: str = DEFAULT_SOLVER
    seed: int = 0
    reorder: bool = True
    recompute_backward: bool = False
    start: Schedule | None = None

    def __post_init__(self) -> None:
        check_solver(self.solver)
        if self.memory not in MOMENTS_SHARES:
            choices = " or ".join(map(repr, MOMENTS_SHARES))
            raise ArgumentError(f"memory must be {choices}, got {self.memory!r}")

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest schedule found within the budget.

        Without one, that of the least memory found at no more than one extra forward pass. An
        interrupt ends the search with what is found so far.
        """
        compile_search()
        deadline = time.monotonic() + self.time_limit
        if budget_nbytes is None:
            return Outcome(Status.FEASIBLE, self._least(graph, deadline))
        unplanned = Schedule.unplanned(graph)
        if self._nbytes(unplanned) <= budget_nbytes:
            return Outcome(Status.OPTIMAL, unplanned, graph.seconds)
        best, bound = self.start, graph.seconds
        try:
            best, bound = self._refined(graph, budget_nbytes)
            tell(
                "moments",
                incumbent_seconds=None if best is None else best.seconds,
                bound_seconds=bound,
                unplanned_seconds=graph.seconds,
            )
            if math.isinf(bound):
                return Outcome(Status.INFEASIBLE)
            enough = bound + 2 * TOLERANCE * graph.seconds
            if best is None or best.seconds > enough:
                # From a dear schedule the search does not get far: better without.
                dear = best is None or best.seconds > graph.seconds + graph.forward_seconds
                start = None if dear else best
                found = self._searched(graph, budget_nbytes, deadline, start, enough)
                plans = [plan for plan in (found, best) if plan is not None]
                best = min(plans, key=lambda plan: plan.seconds, default=None)
        except KeyboardInterrupt:
            if best is None or self._nbytes(best) > budget_nbytes:
                raise
        if best is None:
            return Outcome(Status.NO_PLAN_FOUND, None, bound)
        proved = best.seconds <= bound + 2 * TOLERANCE * graph.seconds
        status = Status.OPTIMAL if proved else Status.FEASIBLE
        return Outcome(status, best, min(bound, best.seconds))

    def _nbytes(self, schedule: Schedule) -> int:
        if self.memory == "live":
            return simulate(schedule).peak_nbytes
        if self.memory == "packed":
            return pack(schedule).nbytes
        return best_allocation(schedule).nbytes

    def _refined(self, graph: TrainingGraph, budget_nbytes: int) -> tuple[Schedule | None, float]:
        """The cheapest schedule within the budget that a few moments give, and a bound."""
        if len(graph.ops) > LARGE:
            return self._bounded(graph, budget_nbytes)
        shares = LIVE_SHARES[self.memory]
        seconds = MOMENTS_SHARES[self.memory] * self.time_limit / len(shares)
        known: list[Schedule] = []
        bound = graph.seconds
        for share in shares:
            refined = refine(
                graph,
                int(share * budget_nbytes),
                time.monotonic() + seconds,
                solver=self.solver,
                recompute_backward=self.recompute_backward,
            )
            for found in refined:
                if found.schedule is not None:
                    known.append(found.schedule)
                if share == 1.0:
                    bound = max(bound, found.bound_seconds)
                    tell("moments", bound_seconds=bound, unplanned_seconds=graph.seconds)
                if found.schedule is not None and found.schedule.seconds <= bound:
                    break
            if math.isinf(bound):
                break
        if math.isinf(bound):
            return None, bound
        if self.memory == "blocks":
            known += self._mirrored(graph, budget_nbytes)
        elif all(schedule.seconds > bound for schedule in known):
            known += self._evicted(graph, budget_nbytes)
        return self._cheapest(known, graph, budget_nbytes), bound

    def _bounded(self, graph: TrainingGraph, budget_nbytes: int) -> tuple[Schedule | None, float]:
        """The schedule to start from, if it is within the budget, and a bound."""
        moments = Moments(graph, recompute_backward=self.recompute_backward)
        until = time.monotonic() + 0.5 * MOMENTS_SHARES[self.memory] * self.time_limit
        bound = moments.bound(budget_nbytes, until, nmoments=3, solver=self.solver).seconds
        return self._cheapest([], graph, budget_nbytes), bound

    def _cheapest(
        self, known: list[Schedule], graph: TrainingGraph, budget_nbytes: int
    ) -> Schedule | None:
        """Of what is ``known``, the start and a greedy schedule, the cheapest within the budget."""
        known = [*known, *([] if self.start is None else [self.start])]
        if self.memory == "blocks":
            known += self._greedy(graph, budget_nbytes)
        fitting = [schedule for schedule in known if self._nbytes(schedule) <= budget_nbytes]
        return min(fitting, key=lambda schedule: schedule.seconds, default=None)

    def _evicted(self, graph: TrainingGraph, budget_nbytes: int) -> list[Schedule]:
        """The schedule that choosing what to drop ends with."""
        until = time.monotonic() + EVICTIONS_SHARE * self.time_limit
        aim = budget_nbytes
        for tries in range(TRIES, 0, -1):
            now = time.monotonic()
            stop = now + (until - now) / min(2, tries)
            evictions = Evictions(graph, aim, recompute_backward=self.recompute_backward)
            found = evictions.fit((), stop)
            if found is None:
                break
            found = evictions.improve(found, stop, patience=PATIENCE, seed=self.seed)
            excess = self._nbytes(found.schedule) - budget_nbytes
            if excess <= 0:
                return [found.schedule]
            aim -= excess
        return []

    def _greedy(self, graph: TrainingGraph, budget_nbytes: int) -> list[Schedule]:
        """What the search begins with, for the most live bytes with which blocks fit."""
        until = time.monotonic() + GREEDY_SHARE * self.time_limit
        for percent in GREEDY_PERCENTS:
            found = search(
                graph,
                budget_nbytes * percent // 100,
                rules=Rules(self.recompute_backward, reorder=False, match_ranges=()),
                starts=[],
                seed=self.seed,
                deadline=until,
                rounds=0,
            )
            if found is None:
                break
            if self._nbytes(found) <= budget_nbytes:
                return [found]
        return []

    def _least(self, graph: TrainingGraph, deadline: float) -> Schedule:
        """The least memory found at no more than one extra forward pass, step by step."""
        most_seconds = graph.seconds + graph.forward_seconds
        known = [Schedule.unplanned(graph), *([] if self.start is None else [self.start])]
        try:
            if self.memory == "blocks":
                known += self._mirrored(graph, None)
            elif len(graph.ops) <= LARGE:
                known.append(lowest(graph, time.monotonic() + EVICTIONS_SHARE * self.time_limit))
            best = min((s for s in known if s.seconds <= most_seconds), key=self._nbytes)
            step, seconds = FIRST_STEP, (deadline - time.monotonic()) / STEPS
            while (left := deadline - time.monotonic()) > 0.1 * seconds:
                aim = int((1.0 - step) * self._nbytes(best))
                stop = time.monotonic() + min(seconds, left)
                found = self._search(graph, aim, stop, best)
                if found is not None and found.seconds <= most_seconds:
                    known.append(found)
                    if self._nbytes(found) < self._nbytes(best):
                        best = found
                        continue
                step *= 0.5
        except KeyboardInterrupt:
            pass
        return min((s for s in known if s.seconds <= most_seconds), key=self._nbytes)

    def _mirrored(self, graph: TrainingGraph, budget_nbytes: int | None) -> list[Schedule]:
        """Schedules that recompute what mirroring could."""
        seconds = MIRRORED_SHARE * self.time_limit / len(MIRRORED_RANGES)
        found = (
            mirrored_schedule(graph, budget_nbytes, match_range=n, seconds=seconds, seed=self.seed)
            for n in MIRRORED_RANGES
        )
        return [schedule for schedule in found if schedule is not None]

    def _searched(
        self,
        graph: TrainingGraph,
        budget_nbytes: int,
        deadline: float,
        start: Schedule | None,
        enough_seconds: float,
    ) -> Schedule | None:
        """What the search finds within the budget: in packed memory for less, until it fits."""
        if self.memory != "packed":
            return self._search(graph, budget_nbytes, deadline, start, enough_seconds)
        aim = budget_nbytes
        for tries in range(TRIES, 0, -1):
            now = time.monotonic()
            stop = now + (deadline - now) / min(2, tries)
            found = self._search(graph, aim, stop, start, enough_seconds)
            excess = 0 if found is None else self._nbytes(found) - budget_nbytes
            if excess <= 0:
                return found
            aim -= excess
        return None

    def _search(
        self,
        graph: TrainingGraph,
        budget_nbytes: int | None,
        deadline: float,
        start: Schedule | None,
        enough_seconds: float = 0.0,
    ) -> Schedule | None:
        """The best schedule that a search finds which begins with ``start``."""
        match_ranges = MATCH_RANGES if self.memory == "blocks" else ()
        return search(
            graph,
            budget_nbytes,
            rules=Rules(self.recompute_backward, self.reorder, match_ranges),
            starts=[] if start is None else [start],
            seed=self.seed,
            deadline=deadline,
            rounds=None,
            enough_seconds=enough_seconds,
        )
