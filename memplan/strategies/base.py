"""What every strategy is: a frozen dataclass of options with one method, ``solve``."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from memplan.errors import ArgumentError
from memplan.memory.memory import Live, Memory, cheapest
from memplan.programs.solver import SOLVERS, TOLERANCE
from memplan.search.aiming import SHARE_OF_TIME, aim_lower
from memplan.search.segments import articulation_points
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Space
from memplan.util.numbers import is_amount, is_finite, plain, shown
from memplan.util.stop import Stop

# Where neither the problem nor the strategy has a limit.
DEFAULT_SECONDS = 60.0

# The usual work of a search (:mod:`memplan.util.stop`), by the number of ops: so much for every op,
# then what about 12 seconds of one core do on the zoo's ResNet-50 (351 ops) and DenseNet-121 (915),
# as a move takes longer on larger graphs; of the largest at least this, half a minute at 10,000.
WORK_BY_OPS = 12_000
WORK_BY_ROOT = 60e6
LEAST_WORK = 1e6

# How far from the proven bound a plan may be that ends a search, in parts of the step's time.
DEFAULT_GAP = 0.002

LIVE, SEQUENCES = Live(), Sequences()


class Status(enum.Enum):
    """What a strategy can say of its result."""

    OPTIMAL = "optimal"
    """No schedule of the kind that the strategy searches is cheaper within the budget."""
    FEASIBLE = "feasible"
    """A schedule, perhaps not the cheapest."""
    INFEASIBLE = "infeasible"
    """Proved: no schedule of that kind fits the budget."""
    NO_PLAN_FOUND = "no plan found"
    """None was found; one may exist."""


@dataclass(frozen=True)
class Outcome:
    """The answer of a strategy. It never reports its own score.

    ``lower_bound_seconds`` is proven: no schedule within the budget takes fewer seconds a step
    (None if nothing was proved). With ``in_order`` that, and an optimum, hold among the schedules
    that keep the order in which ops first run, and in each stage, up to one of these runs,
    recompute in this order, too, an op once at most. ``cut_by_clock`` tells that the time limit
    ended a search: on another machine, or with more time, the schedule may be another one. A
    schedule that is proved to be optimal is not called so: another one costs as much.
    """

    status: Status
    schedule: Schedule | None = None
    lower_bound_seconds: float | None = None
    in_order: bool = False
    cut_by_clock: bool = False

    @classmethod
    def unproved(cls, schedule: Schedule | None, *, cut_by_clock: bool = False) -> Outcome:
        """That of a search which proves nothing; None if it has found nothing."""
        status = Status.NO_PLAN_FOUND if schedule is None else Status.FEASIBLE
        return cls(status, schedule, cut_by_clock=cut_by_clock)


# More extra time than this many steps is no plan, unless a user asks for it: what was dropped was
# needed again and again. An LSTM's took 115 steps, and MXNet 47 times the bytes of its tensors to
# keep track of the calls.
MOST_OVERHEAD = 3.0


@dataclass(frozen=True)
class Problem:
    """What a strategy is asked: a schedule of ``graph`` within ``budget_nbytes`` of ``memory``.

    Without a budget: the least memory, at no more than ``max_overhead`` (extra seconds / seconds
    of the unplanned step; None: at no more than one extra forward pass). With a budget,
    ``max_overhead`` bounds the overhead, too (None: by nothing). ``space`` says which schedules
    MXNet can be made to execute. ``start`` is a schedule that is known already; ``time_limit`` are
    the seconds that a search may take (None: those of the strategy, or a minute), and ``effort`` is
    the share of its usual work that it does. ``bound_seconds`` are proven already: no schedule
    within the budget that the strategy may return takes fewer.
    """

    graph: TrainingGraph
    budget_nbytes: int | None
    memory: Memory = LIVE
    space: Space = SEQUENCES
    max_overhead: float | None = None
    start: Schedule | None = None
    time_limit: float | None = None
    effort: float = 1.0
    bound_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_overhead", plain(self.max_overhead))
        check_overhead(self.max_overhead)

    @property
    def most_seconds(self) -> float:
        """The seconds that a schedule may take."""
        if self.max_overhead == math.inf:
            return math.inf
        if self.max_overhead is not None:
            # What rounds to that overhead keeps it.
            return self.graph.seconds * (1.0 + self.max_overhead + TOLERANCE)
        if self.budget_nbytes is None:
            return self.graph.seconds * (1.0 + TOLERANCE) + self.graph.forward_seconds
        return math.inf

    @property
    def counts_live(self) -> bool:
        """Is the peak of live bytes what must fit?"""
        return self.memory.is_exact and not self.memory.match_ranges

    def cheapest(
        self, schedules: Iterable[Schedule | None], *, stop: Stop | None = None
    ) -> Schedule | None:
        """Of ``schedules``, the cheapest within the budget; without one, that of least memory.

        Where ``stop`` leaves too little time they are looked at roughly.
        """
        candidates = [schedule for schedule in schedules if schedule is not None]
        budget_nbytes, memory, most_seconds = self.budget_nbytes, self.memory, self.most_seconds
        return cheapest(candidates, budget_nbytes, memory, most_seconds=most_seconds, stop=stop)

    def points(self, *, linear: bool) -> tuple[int, ...]:
        """The articulation points; with ``linear`` all forward ops that a forward op reads."""
        return self.space.points(self.graph) if linear else articulation_points(self.graph)

    def best_of(self, schedules: Iterable[Schedule | None]) -> Outcome:
        """The outcome of a strategy that makes these schedules, and proves nothing.

        Each is counted as soon as it is made: where time is up, or an interrupt comes, it is the
        best of those that were counted.
        """
        if (unplanned := self.unplanned()) is not None:
            return unplanned
        stop = self.stop(None)
        best: Schedule | None = None
        figures = (math.inf, math.inf)
        try:
            for number, schedule in enumerate(schedules):
                if number and stop.is_over():  # after the last one nothing is left out
                    break
                if schedule is not None and (better := self._figures(schedule, figures)) < figures:
                    best, figures = schedule, better
        except KeyboardInterrupt:
            if best is None:
                raise
            stop.end()
        return Outcome.unproved(best, cut_by_clock=stop.cut_by_clock)

    def _figures(self, schedule: Schedule, best: tuple[float, float]) -> tuple[float, float]:
        """Bytes and seconds, by which :meth:`cheapest` chooses; within a budget seconds alone.

        ``best`` are those of the best schedule so far. Of one that is no better, which mostly is
        not counted then, the figures may be these.
        """
        if self.budget_nbytes is not None:
            is_better = schedule.seconds < best[1] and self.cheapest([schedule]) is not None
            return (0.0, schedule.seconds) if is_better else best
        if schedule.seconds > self.most_seconds or self.memory.at_least(schedule) > best[0]:
            return best
        return self.memory.nbytes(schedule), schedule.seconds

    def unplanned(self) -> Outcome | None:
        """The step without a plan if that fits, which is optimal; else None."""
        unplanned = Schedule.unplanned(self.graph)
        if not self.memory.is_within(unplanned, self.budget_nbytes or 0):
            return None
        return Outcome(Status.OPTIMAL, unplanned, self.graph.seconds)

    def enough(self, bound_seconds: float) -> float:
        """The seconds of a schedule that a proven bound, of solvers' precision, says is optimal."""
        return bound_seconds + 2 * TOLERANCE * self.graph.seconds

    def is_closed(self, schedule: Schedule | None, bound_seconds: float) -> bool:
        """Can no schedule be cheaper than ``schedule``, by this bound?"""
        return schedule is not None and schedule.seconds <= self.enough(bound_seconds)

    def stop(self, time_limit: float | None, *, effort: float = math.inf) -> Stop:
        """When a strategy with this ``time_limit`` must end that begins now.

        It does ``effort`` times the usual work (infinite: until time is up).
        """
        limits = [limit for limit in (time_limit, self.time_limit) if limit is not None]
        nops = max(1, len(self.graph.ops))
        usual = min(WORK_BY_OPS * nops, max(LEAST_WORK, WORK_BY_ROOT / nops**0.5))
        work = effort * self.effort * usual
        return Stop.after(min(limits, default=DEFAULT_SECONDS), work=work)

    def within(self, budget_nbytes: int | None) -> Problem:
        """The same problem in another budget; in a smaller one what is proved holds as well."""
        most = math.inf if budget_nbytes is None else budget_nbytes
        holds = self.budget_nbytes is not None and most <= self.budget_nbytes
        bound = self.bound_seconds if holds else 0.0
        return dataclasses.replace(self, budget_nbytes=budget_nbytes, bound_seconds=bound)

    def aim_lower(
        self,
        solve: Callable[[int, Stop], Schedule | None],
        stop: Stop,
        *,
        share: float = SHARE_OF_TIME,
    ) -> Schedule | None:
        """A schedule of ``solve(aim, until)``, which counts live bytes, that keeps the budget.

        Where live bytes are not what counts, a try gets this ``share`` of the time that is left.
        What takes too many seconds is nothing, and its bytes are not counted.
        """
        assert self.budget_nbytes is not None
        share = 1.0 if self.counts_live else share

        def affordable(aim: int, until: Stop) -> Schedule | None:
            schedule = solve(aim, until)
            return None if schedule is None or schedule.seconds > self.most_seconds else schedule

        return aim_lower(affordable, self.budget_nbytes, self.memory.excess, stop, share=share)

    def starts(self, *others: Schedule | None) -> list[Schedule]:
        """What to begin from: the known schedule and ``others``, as far as MXNet can run them."""
        starts = (self.start, *others)
        return [s for s in starts if s is not None and self.space.has(s)]


def _is_share(value: Any) -> bool:
    return is_finite(value) and value <= 1.0


def _is_count(value: Any, least: int = 1) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and value >= least


def check_overhead(max_overhead: Any) -> None:
    """ArgumentError unless ``max_overhead`` is None or a share of the step's time."""
    if max_overhead is not None and not is_amount(max_overhead):
        raise ArgumentError(
            f"max_overhead must be a share of the step's time such as 0.3, got "
            f"{shown(max_overhead)}"
        )


_SECONDS = (is_amount, "a number of seconds")
_COUNT = (_is_count, "an integer >= 1")
_SHARE = (_is_share, "from 0 to 1")
# What an option must be that strategies have by this name.
_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "time_limit": _SECONDS,
    "gap": (is_finite, "a share of the step's time such as 0.002"),
    "effort": (lambda value: is_amount(value) and value > 0, "a positive number such as 2"),
    "rounds": _COUNT,
    "ntrial": _COUNT,
    "max_slots": _COUNT,
    "thresholds": _COUNT,
    "patience": (lambda value: _is_count(value, 0), "an integer >= 0"),
    "seed": (lambda value: _is_count(value, 0), "an integer >= 0"),
    "program_share": _SHARE,
    "search_share": _SHARE,
    "allowances": (
        lambda values: isinstance(values, tuple) and values != () and all(map(_is_share, values)),
        "a tuple of one or more shares from 0 to 1",
    ),
    "solver": (SOLVERS.__contains__, f"one of {list(SOLVERS)}"),
    "start": (lambda value: isinstance(value, Schedule), "a Schedule"),
}


def check_options(strategy: Any) -> None:
    """ArgumentError where an option of ``strategy``, a dataclass, has a value that it cannot have.

    None stands for no value where that is the option's default. NumPy's numbers become Python's.
    """
    for field in dataclasses.fields(strategy):
        value = plain(getattr(strategy, field.name))
        if field.name not in _OPTIONS or (value is None and field.default is None):
            continue
        object.__setattr__(strategy, field.name, value)
        check_option(field.name, value)


def check_option(name: str, value: Any) -> None:
    """ArgumentError for a value that options of this name, if it is a known one, cannot have."""
    fits, requirement = _OPTIONS.get(name, (None, ""))
    if fits is not None and not fits(plain(value)):
        raise ArgumentError(f"{name} must be {requirement}, got {shown(value)}")


class Strategy(Protocol):
    """Picks a schedule. A strategy is a frozen dataclass whose fields are its options.

    A field ``time_limit`` are the seconds that it takes at most, beside those of the problem. One
    with a field ``start`` improves schedules that are known already: that one, and the problem's.
    """

    def solve(self, problem: Problem) -> Outcome:
        """A schedule that keeps the budget in the memory of ``problem``."""


class OneOf:
    """A strategy that makes a few schedules whatever the budget, and takes the best one."""

    def candidates(self, problem: Problem) -> Iterable[Schedule]:
        """These schedules."""
        raise NotImplementedError

    def solve(self, problem: Problem) -> Outcome:
        """The cheapest of them within the budget; without one, that of least memory."""
        return problem.best_of(self.candidates(problem))
