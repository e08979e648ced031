"""What a schedule takes of a device: live bytes, MXNet's blocks, or one packed array.

A strategy is held to the bytes of one such memory, whichever it searches by.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memplan.errors import ArgumentError
from memplan.memory.blocks import MATCH_RANGES, allocate
from memplan.memory.layouts import Rule, further_copies
from memplan.memory.packing import Packing, nbytes_within, pack
from memplan.memory.temporary import Temporary, further_space
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# The bytes that the operators of a step take beside what they read and write, if each runs once;
# those that they keep for each further run, op by op (none: nothing); in which layouts they leave
# arrays, op by op, where the schedule decides of which ones copies are kept (none: of none); and
# what temporary space they take where the schedule decides on that.
Workspace = tuple[int, tuple[int, ...], tuple[Rule, ...], Temporary]


class Memory:
    """How many bytes a schedule takes.

    ``match_ranges`` are those at which a compiled search replays MXNet's blocks; without any, it
    counts live bytes. ``is_exact`` tells whether what it counts so are the bytes of this memory.
    """

    @property
    def match_ranges(self) -> tuple[int, ...]:
        return ()

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def counts_runs(self) -> bool:
        """Do further runs take bytes that a search for the least does not see?"""
        return False

    def executed(self, schedule: Schedule) -> Schedule:
        """``schedule`` without the runs that are left out of the step, and of its bytes here."""
        return schedule

    def nbytes(self, schedule: Schedule) -> int:
        """The bytes of ``schedule``: what must be within the budget."""
        raise NotImplementedError

    def at_least(self, schedule: Schedule) -> int:
        """A bound below :meth:`nbytes` that takes little time."""
        return simulate(schedule).peak_nbytes

    def excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        """By how many bytes ``schedule`` is over the budget: 0 if it fits.

        ``roughly`` it takes no time where bytes are hard to count, and may be more.
        """
        del roughly
        return max(0, self.nbytes(schedule) - budget_nbytes)

    def is_within(self, schedule: Schedule, budget_nbytes: int) -> bool:
        """Are the bytes of ``schedule`` within the budget? What is far from it takes no time."""
        if self.at_least(schedule) > budget_nbytes:
            return False
        return not self.excess(schedule, budget_nbytes) or self.nbytes(schedule) <= budget_nbytes

    def packing(self, schedule: Schedule) -> Packing | None:
        """Where the tensors of ``schedule`` lie, if that is in one array."""
        del schedule
        return None


@dataclass(frozen=True)
class Live(Memory):
    """The peak of the bytes alive: the least that any memory needs."""

    @property
    def is_exact(self) -> bool:
        return True

    def nbytes(self, schedule: Schedule) -> int:
        return simulate(schedule).peak_nbytes


@dataclass(frozen=True)
class Blocks(Memory):
    """MXNet's blocks, at the one of ``match_ranges`` (of NNVM_EXEC_MATCH_RANGE) that suits best."""

    match_ranges: tuple[int, ...] = MATCH_RANGES

    def __post_init__(self) -> None:
        if not self.match_ranges or any(not isinstance(m, int) or m < 0 for m in self.match_ranges):
            raise ArgumentError(
                f"match_ranges must be integers >= 0, at least one, got {self.match_ranges!r}"
            )

    @property
    def is_exact(self) -> bool:
        return True

    def nbytes(self, schedule: Schedule) -> int:
        return min(allocate(schedule, match_range=m).nbytes for m in self.match_ranges)


@dataclass(frozen=True)
class Packed(Memory):
    """One array with an offset for every tensor (:mod:`memplan.memory.packing`)."""

    def nbytes(self, schedule: Schedule) -> int:
        return pack(schedule).nbytes

    def excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        nbytes = nbytes_within(schedule, budget_nbytes, roughly=roughly)
        return max(0, nbytes - budget_nbytes)

    def packing(self, schedule: Schedule) -> Packing:
        return pack(schedule)


@dataclass(frozen=True)
class WithRuns(Memory):
    """``memory``, and what a schedule keeps beside it that the unplanned step does not.

    See :func:`further_nbytes`.
    """

    memory: Memory
    nbytes_of_run: tuple[int, ...]
    layouts: tuple[Rule, ...]
    temporary: Temporary

    @property
    def match_ranges(self) -> tuple[int, ...]:
        return self.memory.match_ranges

    @property
    def counts_runs(self) -> bool:
        return any((*self.nbytes_of_run, self.layouts, *map(any, self.temporary)))

    def executed(self, schedule: Schedule) -> Schedule:
        return self.memory.executed(schedule)

    def nbytes(self, schedule: Schedule) -> int:
        return self.memory.nbytes(schedule) + self._further_nbytes(schedule)

    def at_least(self, schedule: Schedule) -> int:
        return self.memory.at_least(schedule) + self._further_nbytes(schedule)

    def excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        limit = budget_nbytes - self._further_nbytes(schedule)
        return self.memory.excess(schedule, limit, roughly=roughly)

    def packing(self, schedule: Schedule) -> Packing | None:
        return self.memory.packing(schedule)

    def _further_nbytes(self, schedule: Schedule) -> int:
        return further_nbytes(schedule, self.nbytes_of_run, self.layouts, self.temporary)


def further_nbytes(
    schedule: Schedule,
    nbytes_of_run: Sequence[int],
    layouts: Sequence[Rule],
    temporary: Temporary,
) -> int:
    """What is kept for ``schedule`` beside its memory and is not for the unplanned step.

    Those are ``nbytes_of_run`` of each op that runs again, each time, copies of arrays in other
    ``layouts`` (:mod:`memplan.memory.layouts`), and more ``temporary`` space
    (:mod:`memplan.memory.temporary`).
    """
    nbytes = further_copies(schedule, layouts) + further_space(schedule, temporary)
    if not any(nbytes_of_run):
        return nbytes
    runs = Counter(schedule.ops)
    return nbytes + sum((times - 1) * nbytes_of_run[op] for op, times in runs.items())


def cheapest(
    schedules: Iterable[Schedule],
    budget_nbytes: int | None,
    memory: Memory,
    *,
    most_seconds: float = math.inf,
    stop: Stop | None = None,
) -> Schedule | None:
    """The schedule of the fewest seconds, of those within the budget; None if none fits.

    Without a budget: the one of the fewest bytes (and, of equal ones, of the fewest seconds).
    Those that take more than ``most_seconds`` do not count. Where ``stop`` leaves less time than
    the longest look at one has taken, the others are looked at roughly.
    """
    ranked = [(s.seconds, place, s) for place, s in enumerate(schedules)]
    ranked = [entry for entry in sorted(ranked) if entry[0] <= most_seconds]
    if budget_nbytes is not None:
        return _first_within([s for _, _, s in ranked], budget_nbytes, memory, stop)
    best: tuple[int, Schedule] | None = None
    for _, _, schedule in ranked:
        if best is None or memory.at_least(schedule) < best[0]:
            nbytes = memory.nbytes(schedule)
            if best is None or nbytes < best[0]:
                best = nbytes, schedule
    return None if best is None else best[1]


def _first_within(
    schedules: Iterable[Schedule], budget_nbytes: int, memory: Memory, stop: Stop | None
) -> Schedule | None:
    """The first one within the budget: see :func:`cheapest`."""
    longest_seconds = 0.0
    for schedule in schedules:
        if memory.at_least(schedule) > budget_nbytes:
            continue
        # A proof ends with the time, and may give many schedules, each of which takes seconds to
        # pack closely if the graph is large. What was found to fit before does so roughly, too.
        roughly = False
        if stop is not None and not memory.is_exact:
            roughly = stop.is_short_of(longest_seconds)
        begin = time.monotonic()
        if not memory.excess(schedule, budget_nbytes, roughly=roughly):
            return schedule
        longest_seconds = max(longest_seconds, time.monotonic() - begin)
    return None
