"""Near-optimal schedules in seconds, of graphs of any size, in the bytes that are to count."""

from __future__ import annotations

import time
from dataclasses import dataclass

from memplan.errors import ArgumentError
from memplan.memory.blocks import allocate
from memplan.search.sequence_search import Rules, compile_search, search
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Outcome, Status

MEMORIES = ("live", "blocks")


@dataclass(frozen=True)
class Search:
    """The search of :mod:`memplan.search.sequence_search`: by annealing, so nothing is proved.

    ``memory`` says what the budget holds for: "live", the peak of live bytes, or "blocks", what
    MXNet's allocator hands out with the best of ``match_ranges``. It ends after ``time_limit``
    seconds, or after ``rounds`` of annealing: then the same seed gives the same schedule. Ops may
    change their order if ``reorder``; backward ops run once unless ``recompute_backward``.
    ``start`` is a schedule to start from: what is found is never worse. The first call ever on a
    machine compiles, which takes half a minute beyond the limit.
    """

    time_limit: float = 20.0
    rounds: int | None = None
    seed: int = 0
    start: Schedule | None = None
    memory: str = "live"
    match_ranges: tuple[int, ...] = (1, 2, 4, 8, 16)
    reorder: bool = True
    recompute_backward: bool = False

    def __post_init__(self) -> None:
        if self.memory not in MEMORIES:
            choices = " or ".join(map(repr, MEMORIES))
            raise ArgumentError(f"memory must be {choices}, got {self.memory!r}")
        if not self.match_ranges or any(not isinstance(m, int) or m < 0 for m in self.match_ranges):
            raise ArgumentError(
                f"match_ranges must be integers >= 0, at least one, got {self.match_ranges!r}"
            )
        if not self.time_limit > 0:
            raise ArgumentError(f"time_limit must be positive, got {self.time_limit!r}")
        if self.rounds is not None and self.rounds < 1:
            raise ArgumentError(f"rounds must be at least 1 or None, got {self.rounds!r}")

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        """The cheapest schedule found within the budget; without one, that of least memory.

        An interrupt ends the search with what is found so far.
        """
        compile_search()
        deadline = time.monotonic() + self.time_limit
        unplanned = Schedule.unplanned(graph)
        if budget_nbytes is not None and self._nbytes(unplanned) <= budget_nbytes:
            return Outcome(Status.OPTIMAL, unplanned, graph.seconds)
        found = search(
            graph,
            budget_nbytes,
            rules=Rules(
                self.recompute_backward,
                self.reorder,
                self.match_ranges if self.memory == "blocks" else (),
            ),
            starts=[] if self.start is None else [self.start],
            seed=self.seed,
            deadline=deadline,
            rounds=self.rounds,
        )
        best = self._better(found, self.start, budget_nbytes)
        return Outcome(Status.NO_PLAN_FOUND if best is None else Status.FEASIBLE, best)

    def _nbytes(self, schedule: Schedule) -> int:
        if self.memory == "live":
            return simulate(schedule).peak_nbytes
        return min(allocate(schedule, match_range=m).nbytes for m in self.match_ranges)

    def _better(
        self, found: Schedule | None, start: Schedule | None, budget_nbytes: int | None
    ) -> Schedule | None:
        """The better of two schedules; None if neither fits the budget."""
        ranked = []
        for schedule in (found, start):
            if schedule is not None:
                nbytes = self._nbytes(schedule)
                if budget_nbytes is None:
                    ranked.append(((float(nbytes), schedule.seconds), schedule))
                elif nbytes <= budget_nbytes:
                    ranked.append(((schedule.seconds, float(nbytes)), schedule))
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None
