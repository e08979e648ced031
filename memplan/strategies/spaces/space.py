"""What strategies ask of a space: of the schedules that they may choose from.

That is what keeping certain ops makes of a step, schedules to begin with, what is proved about all
of them, and a search that improves one. There are two: :mod:`memplan.strategies.spaces.flags` and
:mod:`memplan.strategies.spaces.sequences`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from memplan.programs.proof import Fact, ProofOptions
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.interrupts import noticing
from memplan.util.stop import Stop

if TYPE_CHECKING:
    from memplan.strategies.base import Problem

# Of graphs with more ops than this less is searched and proved, as everything takes seconds. Set on
# a recurrent network and a GAN, unrolled to 4,800 ops, and on memonger's ResNet of 10,300.
LARGE = 3000

# A round of annealing over flags makes this many moves: some seconds on a network of 500 ops.
MOVES_PER_ROUND = 5000

# What part of the usual effort a program gets for blocks, which its schedules seldom fit.
BLOCKS_EFFORT = 0.25


@dataclass(frozen=True)
class SearchOptions:
    """What a search of a space is asked.

    It ends after ``rounds`` (None: when its work is done). Ops may change their order if
    ``reorder``; backward ops run once unless ``recompute_backward``; mirroring can do neither. One
    that takes ``enough_seconds`` ends it.
    """

    seed: int = 0
    rounds: int | None = None
    reorder: bool = True
    recompute_backward: bool = False
    enough_seconds: float = 0.0

    @property
    def moves_of_flags(self) -> int | None:
        """How many moves annealing over flags makes (None: as many as its work is)."""
        return None if self.rounds is None else MOVES_PER_ROUND * self.rounds


def _never(bound_seconds: float) -> bool:
    del bound_seconds
    return False


@dataclass(frozen=True)
class Proving:
    """What is to be proved of a problem: until when, how, and the list to which it is added.

    The last one says whether a schedule is known that is good enough by a proven bound in seconds:
    that ends it.
    """

    problem: Problem
    stop: Stop
    options: ProofOptions
    facts: list[Fact]
    is_enough: Callable[[float], bool] = _never


class Space(Protocol):
    """Which schedules MXNet can be made to execute."""

    repeats_backward: ClassVar[bool] = True
    """May backward ops run more than once in it?"""

    def takes_at_most(self, graph: TrainingGraph) -> float:
        """Seconds that no schedule of it exceeds."""
        del graph
        return math.inf

    def prepare(self) -> None:
        """Compile what a search needs, which is not to be in anybody's time."""

    def has(self, schedule: Schedule) -> bool:
        """Is ``schedule`` one of them?"""
        del schedule
        return True

    def points(self, graph: TrainingGraph) -> tuple[int, ...]:
        """The forward ops of the linearised network between which segments may be cut."""

    def keeping(self, graph: TrainingGraph, checkpoints: Collection[int]) -> Schedule:
        """The schedule that keeps forward ops, ``checkpoints``, and recomputes the others once."""

    def cut(self, problem: Problem, points: Sequence[int], stop: Stop) -> Iterator[Schedule]:
        """Schedules of a large graph that keep some of ``points``: the best, or a few."""

    def beginnings(self, problem: Problem, stop: Stop, options: SearchOptions) -> list[Schedule]:
        """Schedules that a search may begin with."""

    def dropped_at_peaks(
        self, problem: Problem, stop: Stop, options: SearchOptions
    ) -> Schedule | None:
        """The least live bytes of drops at the peaks, where :meth:`beginnings` has none of it."""
        del problem, stop, options
        return None

    def prove(self, proving: Proving) -> None:
        """Add what is quickly proved for a budget, and the schedules that come of it."""

    def program(self, proving: Proving) -> None:
        """The same with all of Checkmate's program, in live bytes, until its optimum is known."""

    def improve(
        self, problem: Problem, start: Schedule | None, stop: Stop, options: SearchOptions
    ) -> Schedule | None:
        """The best schedule of a search that begins with ``start``, if any keeps the budget."""


def is_slow(problem: Problem) -> bool:
    """Is a move of a search slow? In blocks it replays the allocator, whose steps are many then."""
    return bool(problem.memory.match_ranges) and len(problem.graph.ops) > LARGE


@contextmanager
def ending(stop: Stop) -> Iterator[None]:
    """An interrupt ends a search with its best so far; what it is a part of must end as well."""
    with noticing() as interrupt:
        yield
    if interrupt.has_come:
        stop.end()
