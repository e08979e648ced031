"""For who does not want to choose: what is proved quickly first, then the best of a search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.programs.proof import Fact, ProofOptions
from memplan.programs.solver import DEFAULT_SOLVER
from memplan.step.schedule import Schedule
from memplan.strategies.auto_searches import (
    AGAIN_SHARE,
    ANEW_SHARE,
    OFTEN_SHARE,
    TIMES,
    Searches,
    is_large,
    times_the_work,
)
from memplan.strategies.auto_starts import evicted, least_made_cheaper, within_a_pass
from memplan.strategies.base import (
    DEFAULT_GAP,
    Outcome,
    Problem,
    Status,
    check_options,
)
from memplan.strategies.proof_beside import ProofBeside
from memplan.strategies.quick import quick_start
from memplan.strategies.shares import of_beginnings, of_proof
from memplan.strategies.spaces.space import Proving, SearchOptions
from memplan.util.progress import tell
from memplan.util.stop import Stop

# Looks of HiGHS at whether to end that a proof takes (:class:`ProofOptions`): 3 to 13 seconds of a
# core. Set on mobilenet1_0, resnext, dense_blocks, ssd and densenet121 of benchmarks/gaps.py.
LOOKS = 400_000

# Where the best is further than this from the bound, in parts of the step, a tree of orders of
# moments gives a higher bound. Set on the zoo's ResNet-50 and on dense_blocks, small_unet and ssd
# of benchmarks/gaps.py, at 30% of the step, and on ssd and a U-Net at 40%.
FAR = 0.005

# With a gap of at least this many parts of the step, what a search begins with is often good enough
# by the bound of the first program, and takes less time than others. Measured on a feature pyramid
# and five networks of benchmarks/gaps.py at 33 and 45% of the step.
WIDE = 0.01

# Plans in blocks that take more than this part of the step are searched from other schedules, too,
# one of which is of the least memory, with this part of a search's work.
COSTLY, FEWEST_SHARE = 0.05, 0.5


@dataclass(frozen=True)
class Auto:
    """A program of a few moments proves a bound and gives schedules, a search does the rest.

    Of a small step every schedule is looked at before, as far as a second or two of a core get.
    For mirroring the program decides over flags, else over the step; the bound holds for schedules
    in any order. A schedule that is proved to be within ``gap`` (seconds / seconds of the unplanned
    step) of the cheapest ends it; else it ends after ``effort`` times the usual work (infinite:
    when time is up), or after ``rounds`` of the search if they are given. The same ``seed`` gives
    the same schedule, unless ``time_limit`` has cut the search. ``solver`` is "HIGHS" or "CBC",
    ``start`` a schedule to start from. Ops may change their order if ``reorder``, and backward ops
    run once unless ``recompute_backward``.
    """

    time_limit: float | None = None
    gap: float = DEFAULT_GAP
    effort: float = 1.0
    rounds: int | None = None
    solver: str = DEFAULT_SOLVER
    seed: int = 0
    reorder: bool = True
    recompute_backward: bool = False
    start: Schedule | None = None

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def _search_effort(self) -> float:
        """How much of the usual work a search does; its rounds end it, if they are given."""
        return math.inf if self.rounds else self.effort

    def solve(self, problem: Problem) -> Outcome:
        """The cheapest schedule found within the budget; without one, that of least memory.

        An interrupt ends the search with what is found so far.
        """
        if (unplanned := problem.unplanned()) is not None:
            return unplanned
        problem.space.prepare()
        stop = problem.stop(self.time_limit, effort=times_the_work(problem) * self._search_effort)
        options = SearchOptions(self.seed, self.rounds, self.reorder, self.recompute_backward)
        starts = problem.starts(self.start)
        if problem.budget_nbytes is None:
            best = least_made_cheaper(problem, starts, stop, options)
            return Outcome(Status.FEASIBLE, best, cut_by_clock=stop.cut_by_clock)
        return _Search(self, problem, stop, options, starts).run()


class _Search:
    """What is known so far: schedules, and what is proved."""

    def __init__(
        self,
        auto: Auto,
        problem: Problem,
        stop: Stop,
        options: SearchOptions,
        starts: list[Schedule],
    ) -> None:
        self.auto, self.problem, self.stop, self.options = auto, problem, stop, options
        self.starts = starts
        self.best = problem.cheapest(starts)
        self.anew: Schedule | None = None
        self.is_begun, self.has_beginnings = bool(starts), False
        self.known = [Fact(start, 0.0) for start in starts]
        self.bound = max(problem.graph.seconds, problem.bound_seconds)
        self.searches = Searches.of(problem)

    def run(self) -> Outcome:
        """The proof, schedules to begin with, the search."""
        try:
            if not self.searches.are_recreated:
                self._begin_quickly()
            if not self._is_enough():
                self._prove()
            if math.isinf(self.bound):
                return self._outcome()
            if not self._is_enough():
                self._begin()
            self._search_and_prove()
        except KeyboardInterrupt:
            self._take()
            if self.best is None:
                self._begin_quickly()
            if self.best is None:
                raise
        return self._outcome()

    def _search_and_prove(self) -> None:
        """The searches, and a higher bound, for where they do not get near the known one."""
        options = self._proof_options.of_bound_alone(self.best)
        with ProofBeside(self.problem, self.stop, options) as proof:
            if self._is_far:
                proof.begin()
            if self.searches.anew and not self._is_enough() and not self.stop.is_over():
                self._search_anew()
            if self.searches.as_alone and not self._in_blocks:
                self._search_as_alone()
            if self.searches.often:
                self._search_often()
            if not self._is_enough() and not self.stop.is_over():
                self._search()
            if self.searches.again and not self._is_enough() and not self.stop.is_over():
                self._search_again()
            if self.searches.as_alone and self._in_blocks:
                self._search_as_alone()
            if self.searches.anew and self._in_blocks:
                self._search_from_others()
            if self.searches.flags_as_alone:
                self._search_flags_as_alone()
            if self.best is None:
                self._begin_quickly()
            if self._is_far:
                self.known += proof.facts()
                self._take()

    def _outcome(self) -> Outcome:
        late = self.stop.cut_by_clock
        if math.isinf(self.bound):
            return Outcome(Status.INFEASIBLE)
        if self.best is None:
            return Outcome(Status.NO_PLAN_FOUND, None, self.bound, cut_by_clock=late)
        is_closed = self._is_closed()
        status = Status.OPTIMAL if is_closed else Status.FEASIBLE
        bound, late = min(self.bound, self.best.seconds), late and not is_closed
        return Outcome(status, self.best, bound, cut_by_clock=late)

    def _is_closed(self) -> bool:
        return self.problem.is_closed(self.best, self.bound)

    @property
    def _gap_seconds(self) -> float:
        return self.auto.gap * self.problem.graph.seconds

    def _is_enough(self) -> bool:
        """Can no schedule be cheaper than the best one by more than the gap?"""
        return self.problem.is_closed(self.best, self.bound + self._gap_seconds)

    @property
    def _is_far(self) -> bool:
        """Is the best far from the bound, of a graph of which more can be proved in time?"""
        far = self.bound + max(self._gap_seconds, FAR * self.problem.graph.seconds)
        effort = self.problem.effort * self.auto.effort
        is_worthwhile = self.searches.are_recreated and effort >= 1.0
        return is_worthwhile and not self.problem.is_closed(self.best, far)

    @property
    def _in_blocks(self) -> bool:
        return bool(self.problem.memory.match_ranges)

    def _begin_quickly(self) -> None:
        """The schedule of quick strategies, where none was known before."""
        if not self.is_begun:
            self.is_begun = True
            quick = quick_start(self.problem, self.stop, self.options)
            self.known.append(Fact(quick, 0.0))
            self.best = self.problem.cheapest([self.best, quick], stop=self.stop)

    def _prove(self) -> None:
        ends_soon = self._proof_options.effort <= 1.0 and self.auto.solver == DEFAULT_SOLVER
        until = of_proof(self.problem, self.stop, ends_soon=ends_soon)
        self.problem.space.prove(
            Proving(self.problem, until, self._proof_options, self.known, self._is_enough_by)
        )
        self._take()

    def _is_enough_by(self, bound_seconds: float) -> bool:
        """Is the best good enough by what is proved meanwhile?

        With a wide gap what a search begins with is made before more is proved.
        """
        self.bound = max(self.bound, bound_seconds)
        is_wide = self.searches.are_recreated and self.auto.gap >= WIDE
        if is_wide and math.isfinite(self.bound) and not self._is_enough():
            self._begin()
        return self._is_enough()

    @property
    def _proof_options(self) -> ProofOptions:
        return ProofOptions(
            self.auto.solver,
            self.auto.recompute_backward,
            effort=self.problem.effort * self.auto.effort,
            gap_seconds=self._gap_seconds,
            looks=LOOKS,
            reorder=self.auto.reorder,
        )

    def _take(self) -> None:
        """The cheapest schedule that is known and fits, and the highest bound."""
        self.bound = max([self.bound, *(found.bound_seconds for found in self.known)])
        schedules = [self.best, *(found.schedule for found in self.known)]
        self.best = self.problem.cheapest(schedules, stop=self.stop)
        tell(
            "moments",
            incumbent_seconds=None if self.best is None else self.best.seconds,
            bound_seconds=self.bound,
            unplanned_seconds=self.problem.graph.seconds,
        )

    def _begin(self) -> None:
        """What a search begins with, unless that was made already."""
        if self.has_beginnings:
            return
        self.has_beginnings = True
        until = of_beginnings(self.problem, self.stop)
        found = self.problem.space.beginnings(self.problem, until, self.options)
        self.best = self.problem.cheapest([self.best, *found], stop=self.stop)

    def _search_options(self) -> SearchOptions:
        enough = self.problem.enough(self.bound + self._gap_seconds)
        return dataclasses.replace(self.options, enough_seconds=enough)

    def _search_anew(self) -> None:
        """What the strategy `search` does: from a start another order of ops is seldom reached."""
        usual = self.problem.stop(None, effort=self.auto._search_effort).work_left
        until = Stop(self.stop.share_of_work(ANEW_SHARE).deadline, work=usual, part_of=self.stop)
        self.anew = self._improve(None, until, self._search_options())

    def _search_as_alone(self) -> None:
        """What the strategy `search` does, with other orders of ops and without.

        So what it finds with the same work is never better. It has this work beside that of the
        other searches: where they got less, plans in blocks had more overhead on average.
        """
        work = self.problem.stop(None, effort=self.auto._search_effort).work_left
        orders = {self.options.reorder, False}
        if self.anew is not None:
            orders.discard(self.options.reorder)
        for reorder in sorted(orders, reverse=True):
            until = self.stop.with_work(work)
            if self._is_enough() or until.is_over():
                return
            options = dataclasses.replace(self._search_options(), reorder=reorder)
            start = self._start_of_search(until) if self._in_blocks else None
            self._improve(start, until, options)

    def _search_from_others(self) -> None:
        """Where a plan in blocks is costly: from others than it.

        From nothing, or from an expensive schedule, a search in blocks may end far above: it fills
        free blocks more easily than it empties full ones.
        """
        work = self.problem.stop(None, effort=self.auto._search_effort).work_left
        makes = [self._evicted, self._start_of_search, self._fewest]
        if self.searches.as_alone and self.anew is None:  # which has begun with the second one
            makes.remove(self._start_of_search)
        for make in makes:
            until = self.stop.with_work(work)
            is_costly = self.best is None or self.best.overhead > COSTLY
            if not is_costly or self._is_enough() or until.is_over():
                return
            start = make(until)
            if start is not None:
                self._improve(start, self.stop.with_work(work), self._search_options())

    def _evicted(self, until: Stop) -> None:
        """Take what the strategy `evict` finds, if it is the cheapest."""
        self.best = self.problem.cheapest([self.best, evicted(self.problem, until, self.options)])

    def _start_of_search(self, until: Stop) -> Schedule | None:
        """What the strategy `search` begins with, be it over the budget."""
        del until
        return self.problem.cheapest(self.starts) or next(reversed(self.starts), None)

    def _fewest(self, until: Stop) -> Schedule:
        """The schedule of least memory that takes at most an extra forward pass."""
        part = until.share_of_work(FEWEST_SHARE)
        return within_a_pass(self.problem, self.starts, part, self.options)

    def _search_often(self) -> None:
        """Short searches from nothing, every other one of which keeps the order of the ops."""
        for number in range(1, TIMES + 1):
            if self._is_enough() or self.stop.is_over():
                return
            reorder = self.options.reorder and number % 2 == 0
            options = dataclasses.replace(
                self._search_options(), seed=self.options.seed + number, reorder=reorder
            )
            self._improve(None, self.stop.share_of_work(OFTEN_SHARE), options)

    def _search_flags_as_alone(self) -> None:
        """What the strategy `search` does over flags, and of few ops from other starts, too.

        From the flags of the proof annealing may stay near them, or find none that fit.
        """
        work = self.problem.stop(None, effort=self.auto._search_effort).work_left
        for number, start in enumerate(self._starts_of_flags(work)):
            until = self.stop.with_work(work)
            if self._is_enough() or until.is_over():
                return
            options = dataclasses.replace(self._search_options(), seed=self.options.seed + number)
            self._improve(start, until, options)

    def _starts_of_flags(self, work: float) -> Iterator[Schedule | None]:
        """The known one, of few ops nothing, and there, or where none fits, the fewest bytes."""
        yield self._start_of_search(self.stop)
        if self.searches.flags_anew:
            yield None
        if (self.searches.flags_anew and not self._is_enough()) or self.best is None:
            fewest = dataclasses.replace(self.problem, budget_nbytes=None)
            until = self.stop.with_work(work)
            yield self.problem.space.improve(fewest, None, until, self.options)

    def _search(self) -> None:
        graph = self.problem.graph
        options, start = self._search_options(), self.best
        more_seconds = 0.0 if start is None else start.seconds - graph.seconds
        is_costly = more_seconds > graph.forward_seconds and start is not self.anew
        if is_costly and not (is_large(self.problem) or self.searches.are_recreated):
            start = None  # from an expensive schedule the search does not get far
        if start is None:  # as before, so with other moves
            options = dataclasses.replace(options, seed=options.seed + 1)
        self._improve(start, self._until_again() if self.searches.again else self.stop, options)

    def _until_again(self) -> Stop:
        """When the search that another one follows ends: its part of the work is done.

        It may use all of the time, as in little time one search gets further than two.
        """
        left = self.stop.work_left
        if math.isinf(left):
            return self.stop.share(1.0 - AGAIN_SHARE)
        return self.stop.with_work((1.0 - AGAIN_SHARE) * left)

    def _search_again(self) -> None:
        """From nothing: a search that goes on from a good schedule may stay near it."""
        options = dataclasses.replace(self._search_options(), seed=self.options.seed + 2)
        self._improve(None, self.stop, options)

    def _improve(
        self, start: Schedule | None, until: Stop, options: SearchOptions
    ) -> Schedule | None:
        """What a search from ``start`` finds; if it is cheaper than the best, it is the best."""
        found = self.problem.space.improve(self.problem, start, until, options)
        self.best = self.problem.cheapest([self.best, found])
        return found
