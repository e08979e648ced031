"""All schedules: any sequence of ops in which every step reads the latest run of what it reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memplan.programs.exact import MANY_OPS, MOST_OPS, STATES, STATES_OF_MANY, ExactSearch
from memplan.programs.moment_refinement import refine_moments
from memplan.programs.order_tree import raise_bound
from memplan.programs.proof import Fact, ProofOptions
from memplan.programs.stage_refinement import StageRefinement
from memplan.search.by_loss import loss_by_loss
from memplan.search.choosing import Choosing
from memplan.search.evicted_least import evicted_least
from memplan.search.flag_annealing import mirrored_schedule
from memplan.search.rematerialize import inner_forward, recomputing_segments
from memplan.search.reordered import Reordered
from memplan.search.segments import coarse_cuts
from memplan.search.sequence_search import compile_search, search
from memplan.search.sequences import Rules
from memplan.search.slices import sliced_schedules
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.spaces.space import (
    BLOCKS_EFFORT,
    LARGE,
    Proving,
    SearchOptions,
    Space,
    ending,
    is_slow,
)
from memplan.util.stop import Stop

if TYPE_CHECKING:
    from memplan.strategies.base import Problem

# Part of the work for schedules to begin with that each greedy schedule of a large graph in blocks
# gets. Set on residual networks of 5,141 and 10,281 ops.
GREEDY_WORK = 0.1
# Of a large graph this many cuts are tried, whose costs are not compiled. Set on memonger's LSTM.
CUTS = 6

# Match ranges at which annealing over what mirroring could recompute begins a search in blocks.
MIRRORED_RANGES = (2, 16)

# What part of the time that is left a choice of drops gets, where live bytes are not what counts.
EVICTING_SHARE = 0.7
# What part of its time a bound gets in each aim, where live bytes are not what counts, and of large
# graphs, whose first program takes seconds.
REFINING_SHARE, REFINING_SHARE_OF_LARGE = 0.65, 0.8

# Of large graphs fewer moments are looked at, one by one and together, as each takes seconds.
ALONE_OF_LARGE, SIZE_OF_LARGE = 3, 10_000

# What part of the usual effort a program gets for less than the budget, where it proves nothing.
REPEATED_EFFORT = 0.1


@dataclass(frozen=True)
class Sequences(Space):
    """Any sequence of executions in which every step reads the latest run of what it reads."""

    def prepare(self) -> None:
        compile_search()

    def points(self, graph: TrainingGraph) -> tuple[int, ...]:
        return inner_forward(graph)

    def keeping(self, graph: TrainingGraph, checkpoints: Collection[int]) -> Schedule:
        # The backward pass begins after the last kept op: what lies there stays.
        last_segment = range(max(checkpoints, default=graph.nforward), graph.nforward)
        return recomputing_segments(graph, frozenset(checkpoints).union(last_segment))

    def cut(self, problem: Problem, points: Sequence[int], stop: Stop) -> Iterator[Schedule]:
        for number, checkpoints in enumerate(coarse_cuts(problem.graph, points, at_most=CUTS)):
            if number and stop.is_over():
                return
            yield self.keeping(problem.graph, checkpoints)

    def beginnings(self, problem: Problem, stop: Stop, options: SearchOptions) -> list[Schedule]:
        if is_slow(problem):
            return self._greedy(problem, stop, options) or self._mirrored(problem, stop, options)
        if problem.memory.match_ranges:
            mirrored = self._mirrored(problem, stop.share_of_work(0.5), options)
            return [*mirrored, *self._greedy(problem, stop, options)]
        if problem.budget_nbytes is None:
            if len(problem.graph.ops) > LARGE:
                return []
            in_turns = _in_turns(problem.graph, options)
            least = evicted_least(in_turns.graph, stop, most_seconds=problem.most_seconds)
            return [in_turns.back(least)]
        # Where no drops fit there is time for slices, of which a search has less.
        evicted, limit = self._evicted(problem, stop, options), problem.budget_nbytes
        return evicted or sliced_schedules(problem.graph, limit, stop, reorder=options.reorder)

    def dropped_at_peaks(
        self, problem: Problem, stop: Stop, options: SearchOptions
    ) -> Schedule | None:
        graph = problem.graph
        is_begun = not problem.memory.match_ranges and _in_turns(graph, options).graph is graph
        if is_begun or len(graph.ops) > LARGE:
            return None
        return evicted_least(graph, stop, most_seconds=problem.most_seconds)

    def _mirrored(self, problem: Problem, stop: Stop, options: SearchOptions) -> list[Schedule]:
        """Schedules that recompute what mirroring could.

        They are few decisions, so that in blocks they are a far better start than schedules made
        by live bytes.
        """
        result = []
        for index, match_range in enumerate(MIRRORED_RANGES):
            with ending(stop):
                schedule = mirrored_schedule(
                    problem.graph,
                    problem.budget_nbytes,
                    match_range=match_range,
                    stop=stop.share_of_work(1.0 / (len(MIRRORED_RANGES) - index)),
                    moves=options.moves_of_flags,
                    seed=options.seed,
                )
            result += [] if schedule is None else [schedule]
        return result

    def _greedy(self, problem: Problem, stop: Stop, options: SearchOptions) -> list[Schedule]:
        """What a search in live bytes begins with, for the most of them with which blocks fit."""
        if problem.budget_nbytes is None:
            return []

        # A large graph's first aim takes what work there is, but a later one fits.
        work = GREEDY_WORK * stop.work_left
        stop = stop.with_work(math.inf) if is_slow(problem) else stop
        # Of other orders only that of losses that take turns holds less in blocks.
        reorder = _in_turns(problem.graph, options).graph is not problem.graph

        def solve(aim: int, until: Stop) -> Schedule | None:
            until = until.with_work(work) if is_slow(problem) else until
            none = SearchOptions(rounds=0, reorder=reorder)
            return _search(problem, aim, None, until, none, blocks=False)

        schedule = problem.aim_lower(solve, stop)
        return [] if schedule is None else [schedule]

    def _evicted(self, problem: Problem, stop: Stop, options: SearchOptions) -> list[Schedule]:
        """The schedule that choosing what to drop, again and again, ends with.

        On traced networks that is as good as the search for long, and drops at the same places in
        repeated layers are easily packed.
        """
        choosing = Choosing(
            problem.graph,
            recompute_backward=options.recompute_backward,
            reorder=options.reorder,
            seed=options.seed,
            few=len(problem.graph.ops) > LARGE,
        )
        schedule = problem.aim_lower(choosing.solve, stop, share=EVICTING_SHARE)
        return [] if schedule is None else [schedule]

    def prove(self, proving: Proving) -> None:
        problem, stop, options = proving.problem, proving.stop, proving.options
        graph, budget_nbytes = problem.graph, problem.budget_nbytes
        assert budget_nbytes is not None
        is_large, in_blocks = len(graph.ops) > LARGE, bool(problem.memory.match_ranges)
        if in_blocks:
            options = dataclasses.replace(options, effort=BLOCKS_EFFORT * options.effort)
        if is_large:
            options = dataclasses.replace(options, nmoments=ALONE_OF_LARGE, size=SIZE_OF_LARGE)
        if is_large and in_blocks:
            proving.facts.append(next(refine_moments(graph, budget_nbytes, stop, options)))
            return
        if options.enough_seconds is not None:
            proving.facts.extend(raise_bound(graph, budget_nbytes, stop, options))
            return
        if len(graph.ops) <= MOST_OPS:
            if _is_settled(proving):
                return
            bounds = (fact.bound_seconds for fact in proving.facts)
            problem = dataclasses.replace(
                problem, bound_seconds=max([problem.bound_seconds, *bounds])
            )
        nmoments, effort = 1 if is_large else options.nmoments, REPEATED_EFFORT * options.effort
        repeats = dataclasses.replace(options, effort=effort, nmoments=nmoments)
        proof = _Proof(dataclasses.replace(proving, problem=problem, options=options), repeats)
        share = REFINING_SHARE_OF_LARGE if is_large else REFINING_SHARE
        problem.aim_lower(proof.solve, stop, share=share)

    def program(self, proving: Proving) -> None:
        graph, budget_nbytes = proving.problem.graph, proving.problem.budget_nbytes
        assert budget_nbytes is not None
        StageRefinement(graph, budget_nbytes, proving.stop, proving.options, proving.facts).run()

    def improve(
        self, problem: Problem, start: Schedule | None, stop: Stop, options: SearchOptions
    ) -> Schedule | None:
        schedule = _search(problem, problem.budget_nbytes, start, stop, options, blocks=True)
        return problem.cheapest([schedule, start])


class _Proof:
    """Programs of moments for the budget, and where no answer keeps it, ``repeats`` for less."""

    def __init__(self, proving: Proving, repeats: ProofOptions) -> None:
        self.problem, self.options, self.repeats = proving.problem, proving.options, repeats
        self.facts, self.is_enough = proving.facts, proving.is_enough
        self.highest = self.problem.bound_seconds

    def solve(self, aim: int, until: Stop) -> Schedule | None:
        """The cheapest schedule found in ``aim`` bytes; None, too, where a known one is enough."""
        is_lower = aim != self.problem.budget_nbytes
        if is_lower and self.is_enough(self.highest):
            return None
        options = self.repeats if is_lower else self.options
        cheapest: Schedule | None = None
        for fact in refine_moments(self.problem.graph, aim, until, options):
            # What is proved for less than the budget proves nothing for the budget.
            bound = 0.0 if is_lower else fact.bound_seconds
            self.facts.append(Fact(fact.schedule, bound))
            self.highest = max(self.highest, bound)
            if fact.schedule is not None:
                if cheapest is None or fact.schedule.seconds < cheapest.seconds:
                    cheapest = fact.schedule
                if cheapest.seconds <= fact.bound_seconds + options.gap_seconds:
                    break
                if cheapest is fact.schedule and self._ends(cheapest):
                    break
            if not is_lower and self.is_enough(bound):
                return None
        return cheapest

    def _ends(self, schedule: Schedule) -> bool:
        """Is it good enough by what is proved for the budget, and keeps that?

        A program for less than the budget may prove less than that.
        """
        is_near = schedule.seconds <= self.highest + self.options.gap_seconds
        return is_near and self.problem.cheapest([schedule]) is not None


def _is_settled(proving: Proving) -> bool:
    """Does a search of all schedules, as far as it gets, leave nothing to be proved?"""
    problem, options = proving.problem, proving.options
    assert problem.budget_nbytes is not None
    backward = options.recompute_backward
    search = ExactSearch(problem.graph, problem.budget_nbytes, recompute_backward=backward)
    most = STATES_OF_MANY if len(problem.graph.ops) > MANY_OPS else STATES
    for fact in search.run(proving.stop, states=int(min(1.0, options.effort) * most)):
        schedule, bound = fact.schedule, fact.bound_seconds
        if schedule is not None and not options.reorder and not _is_in_order(schedule):
            schedule = None
        proving.facts.append(Fact(schedule, bound))
        is_found = problem.cheapest([schedule]) is not None
        if math.isinf(bound) or proving.is_enough(bound) or is_found:
            return True
    return False


def _is_in_order(schedule: Schedule) -> bool:
    return list(schedule.first_run) == sorted(schedule.first_run)


def _in_turns(graph: TrainingGraph, options: SearchOptions) -> Reordered:
    """The graph whose losses take turns, where that holds less and ops may change their order."""
    backward = options.recompute_backward
    return loss_by_loss(graph, reorder=options.reorder, recompute_backward=backward)


def _search(
    problem: Problem,
    aim: int | None,
    start: Schedule | None,
    stop: Stop,
    options: SearchOptions,
    *,
    blocks: bool,
) -> Schedule | None:
    """The best schedule in ``aim`` bytes: of blocks, or alive, whichever the search can count."""
    ranges = problem.memory.match_ranges if blocks else ()
    is_counted = problem.memory.is_exact or (problem.memory.match_ranges and not blocks)
    with ending(stop):
        return search(
            problem.graph,
            aim,
            rules=Rules(options.recompute_backward, options.reorder, ranges),
            starts=[] if start is None else [start],
            seed=options.seed,
            stop=stop,
            rounds=options.rounds,
            enough_seconds=options.enough_seconds,
            excess=None if is_counted else problem.memory.excess,
        )
