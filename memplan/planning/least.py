"""The least memory that memplan reaches for a network: what a refusal names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from memplan.planning.plan import Footprint
from memplan.planning.realised import realise
from memplan.planning.without_budget import schedule_without_budget
from memplan.search.evicted_least import evicted_least
from memplan.step.schedule import Schedule
from memplan.strategies import Problem, Strategy
from memplan.strategies.quick import candidates, fewest_bytes
from memplan.strategies.search import Search
from memplan.strategies.spaces.sequences import Sequences
from memplan.util.interrupts import Interrupt
from memplan.util.progress import tell
from memplan.util.stop import Stop

if TYPE_CHECKING:
    from memplan.planning.job import Job

# What part of the time limit the first search for the least memory that can be reached takes at
# most, before the one that a plan without a budget makes, and how many seconds.
LEAST_SHARE = 0.5
SEARCH_SECONDS = 30.0

# A search for the least memory of up to this many ops in blocks takes a second, and is made again
# from what it finds, up to so often, until that gets no lower: the least of an explicit U-Net was
# 14% lower then. In one array nothing lower was found.
REPEATED_UP_TO, MOST_SEARCHES = 300, 6

# Of graphs with more ops, whose steps MXNet gets as a whole, the first search for the least memory
# is eviction, with so much work. On an LSTM of 2,000 ops that takes seconds; a round of annealing
# takes a minute and found nothing lower.
LARGE, LARGE_WORK = 1000, 20e3


class Least(NamedTuple):
    """The schedule of the fewest bytes that is known of a job, and what it holds.

    ``searched`` is what searches have found, if another schedule was known; ``solver`` plans within
    its bytes. ``cheaper`` are schedules of more bytes that were found on the way. With
    ``cut_by_clock`` another process may find another one.
    """

    schedule: Schedule
    footprint: Footprint
    searched: Schedule
    solver: Strategy
    cut_by_clock: bool
    was_interrupted: bool = False
    cheaper: tuple[Schedule, ...] = ()

    @property
    def is_remembered(self) -> bool:
        """Has no search found it now, but a plan that the process made before?"""
        return self.schedule is not self.searched


class LeastSearch:
    """The searches for the fewest bytes of a ``job``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        #: Is the least memory looked for by eviction first, and then without a budget only?
        self.is_large = isinstance(job.space, Sequences) and len(job.graph.ops) > LARGE

    def run(self, solvers: Sequence[Strategy], interrupt: Interrupt) -> Least:
        """The least that quick strategies, these ``solvers`` and searches for less reach."""
        tell("least memory")
        job = self.job
        stop = Stop.after(job.time_limit)
        limited = dataclasses.replace(job.problem(None), max_overhead=job.most_overhead)
        # At whatever cost one round is enough, where less memory for less time takes many searches.
        open_ended = math.inf if job.max_overhead is None else job.max_overhead
        problem = dataclasses.replace(limited, max_overhead=open_ended)
        first = stop.share(LEAST_SHARE)
        best, by = job.memory.executed(self._quick_least(problem, limited, first)), solvers[0]
        on_the_way: list[Schedule] = []
        if not self.is_large:
            best = self._least_from(best, problem, limited, first)
        for solver in solvers:
            if interrupt.has_come:
                break
            schedule = schedule_without_budget(job.problem(None), solver, stop)
            on_the_way += [best] if schedule is None else [best, job.memory.executed(schedule)]
            lower = limited.cheapest([best, schedule])
            if lower is None or lower is best:
                continue
            best, by = lower, solver
            if not (self.is_large or interrupt.has_come):
                best = self._least_from(best, problem, limited, stop)
        is_cut = stop.cut_by_clock or interrupt.has_come
        fewest = limited.cheapest([best, *job.known]) or best
        footprint = realise(job, fewest).footprint
        cheaper = tuple(s for s in on_the_way if s.seconds < best.seconds)
        return Least(fewest, footprint, best, by, is_cut, interrupt.has_come, cheaper)

    def _quick_least(self, problem: Problem, limited: Problem, stop: Stop) -> Schedule:
        """The schedule of quick strategies that takes the fewest bytes."""
        schedules = list(candidates(problem, stop.share(0.5)))
        is_large, most_seconds = self.is_large, limited.most_seconds
        if is_large:
            until = Stop(stop.deadline, work=LARGE_WORK, part_of=stop)
            schedules.append(evicted_least(self.job.graph, until, most_seconds=most_seconds))
        return fewest_bytes(
            problem, [s for s in schedules if s.seconds <= most_seconds], by_live=is_large
        )

    def _least_from(
        self, schedule: Schedule, problem: Problem, limited: Problem, stop: Stop
    ) -> Schedule:
        """What searches for less memory make of ``schedule``, within the seconds of ``limited``."""
        memory, nops = self.job.memory, len(self.job.graph.ops)
        is_repeated = nops <= REPEATED_UP_TO and problem.memory.match_ranges
        for seed in range(MOST_SEARCHES if is_repeated else 1):
            seconds = min(max(0.1, stop.seconds_left), SEARCH_SECONDS)
            search = Search(rounds=1, time_limit=seconds, start=schedule, seed=seed)
            outcome = search.solve(problem)
            if outcome.cut_by_clock:
                stop.cut()
            before, found = schedule, outcome.schedule
            schedule = limited.cheapest([before, found and memory.executed(found)]) or before
            if schedule is before:
                break
        return schedule
