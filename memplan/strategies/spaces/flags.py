"""The schedules that MXNet's mirroring can run: one for every set of flagged forward ops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from memplan.errors import ScheduleError
from memplan.programs.mirror_refinement import refine_flags
from memplan.programs.proof import Fact
from memplan.search.flag_annealing import (
    anneal,
    best_flags,
    compile_annealing,
    keep_more,
)
from memplan.search.segments import coarse_cuts, flags_keeping
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, flags_of, mirror
from memplan.step.schedule import Schedule
from memplan.strategies.spaces.space import (
    BLOCKS_EFFORT,
    LARGE,
    Proving,
    SearchOptions,
    Space,
    ending,
)
from memplan.util.stop import Stop

if TYPE_CHECKING:
    from memplan.strategies.base import Problem

# Of a large graph this many cuts are tried, whose costs are compiled. Set on memonger's LSTM.
CUTS = 48


@dataclass(frozen=True)
class Flags(Space):
    """What MXNet's mirroring can execute: a schedule for every set of flagged forward ops."""

    repeats_backward: ClassVar[bool] = False

    def takes_at_most(self, graph: TrainingGraph) -> float:
        return graph.seconds + graph.forward_seconds

    def prepare(self) -> None:
        compile_annealing()

    def has(self, schedule: Schedule) -> bool:
        try:
            flags_of(schedule)
        except ScheduleError:
            return False
        return True

    def points(self, graph: TrainingGraph) -> tuple[int, ...]:
        return tuple(range(graph.nforward))

    def keeping(self, graph: TrainingGraph, checkpoints: Collection[int]) -> Schedule:
        return mirror(graph, flags_keeping(graph, checkpoints))

    def cut(self, problem: Problem, points: Sequence[int], stop: Stop) -> Iterator[Schedule]:
        del stop  # some seconds in any case: without, there is nothing to begin with
        cuts = coarse_cuts(problem.graph, points, at_most=CUTS)
        limit, most = problem.budget_nbytes, problem.most_seconds
        flags = best_flags(problem.graph, cuts, limit, most_seconds=most)
        yield mirror(problem.graph, flags)

    def beginnings(self, problem: Problem, stop: Stop, options: SearchOptions) -> list[Schedule]:
        if problem.budget_nbytes is not None:
            return []
        schedule = self.improve(problem, None, stop, options)
        return [] if schedule is None else [schedule]

    def prove(self, proving: Proving) -> None:
        effort = BLOCKS_EFFORT * proving.options.effort
        options = dataclasses.replace(proving.options, effort=effort)
        self.program(dataclasses.replace(proving, options=options))

    def program(self, proving: Proving) -> None:
        problem, facts = proving.problem, proving.facts
        graph, budget_nbytes = problem.graph, problem.budget_nbytes
        assert budget_nbytes is not None
        if not flaggable(graph):  # and the unplanned step does not fit
            facts.append(Fact(None, math.inf))
            return
        start = problem.cheapest([fact.schedule for fact in facts])
        for fact in refine_flags(graph, budget_nbytes, proving.stop, proving.options, start=start):
            facts.append(fact)
            if proving.is_enough(fact.bound_seconds):
                return

    def improve(
        self, problem: Problem, start: Schedule | None, stop: Stop, options: SearchOptions
    ) -> Schedule | None:
        graph = problem.graph
        flags = frozenset[int]() if start is None else flags_of(start)
        plans = [start]
        if len(graph.ops) > LARGE:
            if start is None or problem.budget_nbytes is None:
                return start  # from no flags at all no search arrives anywhere
            flags = keep_more(graph, flags, problem.budget_nbytes) or flags
            plans.append(mirror(graph, flags))
        ranges = problem.memory.match_ranges or (graph.match_range,)
        for index, match_range in enumerate(ranges):
            ranged_graph = graph
            if match_range != graph.match_range:
                ranged_graph = dataclasses.replace(graph, match_range=match_range)
            with ending(stop):
                schedule = anneal(
                    ranged_graph,
                    flags,
                    problem.budget_nbytes,
                    stop=stop.share_of_work(1.0 / (len(ranges) - index)),
                    moves=options.moves_of_flags,
                    seed=options.seed,
                )
            if schedule is not None:
                plans.append(mirror(graph, frozenset(schedule.recomputed)))
        return problem.cheapest(plans)
