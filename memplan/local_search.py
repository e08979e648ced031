"""Near-optimal schedules of any graph by simulated annealing over sequences of executions.

Rounds of annealing start from the best sequence so far, until time is up. A search for MXNet's
blocks first finds plans by their live bytes, which is far faster, then replays the allocator.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memplan.compiled_schedule import Array, graph_arrays, replay, replay_memory
from memplan.graph import Op, Tensor, TrainingGraph
from memplan.progress import tell
from memplan.rematerialize import repeatable
from memplan.schedule import Schedule
from memplan.sequence_moves import (
    BEST_LENGTH,
    BEST_NBYTES,
    BEST_SECONDS,
    LIVE,
    UNLIMITED,
    Best,
    Task,
    anneal,
    expand,
)
from memplan.sequence_state import BEFORE, LENGTH, OP, load, sequence_model, sequence_state

# A round makes so many moves for every op, times its length.
MOVES_PER_OP = 2000
# Temperatures of a round are in units of the mean time of an op; each falls to this share.
COLD = 0.1
# A short round first; then again and again these, each time longer.
FIRST_ROUND = 0.05
LENGTHEN = 1.5
# Shares of the budget that live bytes are given in the search for a first plan in blocks.
LIVE_SHARES = (0.95, 0.85, 0.75, 0.65)
# Without a budget: how far below the least memory so far the next aim is, and what share of the
# time is then left to make that cheaper.
SHRINK = 0.002
CHEAPEN_SHARE = 0.25
# The search in blocks leaves out tensors of less than this share of the budget.
SMALL_SHARE = 2e-4
# Between two looks at the clock about so many seconds pass.
CHUNK_SECONDS = 0.1


class Round(NamedTuple):
    """How a round anneals: from the best sequence, or from the first; how hot, how long."""

    from_best: bool
    hot: float
    length: float


ROUNDS = (
    Round(False, 0.3, 0.5),
    Round(False, 0.15, 1.0),
    Round(False, 0.5, 1.0),
    Round(True, 0.1, 1.0),
)


def rounds_to_make(limit: int | None) -> Iterator[Round]:
    """The rounds of a search, at most ``limit``."""
    yield Round(True, 0.04, FIRST_ROUND)
    for done in itertools.count(1) if limit is None else range(1, limit):
        cycle, place = divmod(done - 1, len(ROUNDS))
        yield ROUNDS[place]._replace(length=ROUNDS[place].length * LENGTHEN**cycle)


class Rules(NamedTuple):
    """What a schedule may do, and what counts: ``match_ranges`` of MXNet's blocks, or live bytes
    if there are none.
    """

    recompute_backward: bool
    reorder: bool
    match_ranges: tuple[int, ...]


class LocalSearch:
    """The search of one graph. The best sequence so far is :meth:`best`."""

    def __init__(self, graph: TrainingGraph, rules: Rules, *, seed: int, deadline: float) -> None:
        self.graph = graph
        self.rules = rules
        self.deadline = deadline
        again = repeatable(graph, backward=rules.recompute_backward)
        self.model = sequence_model(graph, again, reorder=rules.reorder)
        nops = len(self.model.seconds)
        capacity = 4 * len(graph.ops) + 1000
        self.state = sequence_state(self.model, capacity, seed)
        self.arrays = graph_arrays(graph)
        self.large = self.arrays
        self.memory = replay_memory(self.arrays, capacity)
        self.room = np.zeros(capacity, dtype=np.int64)
        self.found = Best(np.zeros(capacity, dtype=np.int64), np.array([0.0, np.inf, np.inf]))
        self.unplanned = np.arange(nops)
        self.unit = max(graph.seconds, 1e-300)
        self.weight = 1.0
        self.moves_per_second = 2e4
        self.current = self.first = self.unplanned

    def best(self) -> Schedule | None:
        """The best schedule so far within the budget."""
        length = int(self.found.figures[BEST_LENGTH])
        return self._schedule(self.found.sequence[:length]) if length else None

    def _schedule(self, sequence: Array) -> Schedule:
        return Schedule.sequence(self.graph, self._ops(sequence).tolist())

    def _ops(self, sequence: Array) -> Array:
        load(self.model, self.state, sequence, len(sequence), UNLIMITED)
        return self.room[: expand(self.model, self.state, self.room)].copy()

    def nbytes(self, sequence: Array) -> tuple[int, int]:
        """The bytes that count, and the match range by which they are the least (or LIVE)."""
        ops = self._ops(sequence)
        if not self.rules.match_ranges:
            return int(replay(self.arrays, self.memory, ops, len(ops), 1, UNLIMITED)[1]), LIVE
        return min(
            (int(replay(self.arrays, self.memory, ops, len(ops), m, UNLIMITED)[0]), m)
            for m in self.rules.match_ranges
        )

    def start_from(self, schedule: Schedule, budget_nbytes: int | None) -> None:
        """Begin with ``schedule``, as far as the rules allow it."""
        sequence = self._grouped(schedule)
        if self._legal(sequence):
            self.first = sequence
            self._offer(sequence, budget_nbytes)

    def _grouped(self, schedule: Schedule) -> Array:
        """The groups that ``schedule`` runs, by their first ops, and the end."""
        start, flat = self.model.start, self.model.flat
        group = {int(flat[start[-1, v]]): v for v in range(len(self.unplanned) - 1)}
        steps = [group[op] for op in schedule.ops if op in group]
        return np.array([*steps, len(self.unplanned) - 1], dtype=np.int64)

    def _legal(self, sequence: Array) -> bool:
        """May ops run in this order, as often as this, and is there room for it?"""
        if len(sequence) > len(self.room) // 2:
            return False
        ran = np.zeros(len(self.unplanned), dtype=bool)
        for v in sequence:
            if ran[v] and not self.model.repeatable[v]:
                return False
            if not ran[
                self.model.flat[self.model.start[BEFORE, v] : self.model.start[BEFORE, v + 1]]
            ].all():
                return False
            ran[v] = True
        return True

    def _offer(self, sequence: Array, budget_nbytes: int | None) -> None:
        """Remember ``sequence`` if it is the best so far."""
        nbytes, _ = self.nbytes(sequence)
        seconds = float(self.model.seconds[sequence].sum())
        figures = self.found.figures
        if budget_nbytes is None:
            better = (nbytes, seconds) < (figures[BEST_NBYTES], figures[BEST_SECONDS])
        else:
            better = nbytes <= budget_nbytes and seconds < figures[BEST_SECONDS]
        if better:
            self.found.sequence[: len(sequence)] = sequence
            figures[:] = len(sequence), seconds, nbytes

    def round(
        self,
        kind: Round,
        sequence: Array,
        budget_nbytes: int,
        *,
        match_range: int = LIVE,
        shrink: float = 0.0,
        best: Best | None = None,
        deadline: float | None = None,
    ) -> None:
        """Anneal from ``sequence``, with fewer moves if time is short."""
        deadline = self.deadline if deadline is None else deadline
        nops = len(self.unplanned)
        left = deadline - time.monotonic()
        most = left * self.moves_per_second
        moves = int(max(1000, min(kind.length * MOVES_PER_OP * nops, most)))
        hot = kind.hot / nops
        if match_range != LIVE:
            self.large = graph_arrays(self.graph, int(SMALL_SHARE * budget_nbytes) + 1)
        review = min(2000, max(100, moves // 400))
        task = Task(self.unit, match_range, shrink, hot, COLD * hot, moves, review)
        load(self.model, self.state, sequence, len(sequence), budget_nbytes)
        control = np.array([self.weight, 0.0, 0.0, 0.0])
        while moves > 0 and (begin := time.monotonic()) < deadline:
            chunk = min(moves, max(20, int(CHUNK_SECONDS * self.moves_per_second)))
            anneal(
                *(self.model, self.state, self.large, self.arrays, self.memory, self.room),
                *(task, self.found if best is None else best, control, chunk),
            )
            moves -= chunk
            self.moves_per_second = chunk / max(1e-6, time.monotonic() - begin)
            if best is None:
                self._tell()
        self.weight = control[0]
        self.current = self.state.steps[OP, : self.state.totals[LENGTH]].copy()

    def _tell(self) -> None:
        if self.found.figures[BEST_LENGTH]:
            seconds = float(self.found.figures[BEST_SECONDS])
            tell("search", incumbent_seconds=seconds, unplanned_seconds=self.graph.seconds)

    def _start(self, kind: Round) -> Array:
        length = int(self.found.figures[BEST_LENGTH])
        return self.found.sequence[:length].copy() if kind.from_best and length else self.first

    def cheapest(self, budget_nbytes: int, rounds: int | None) -> None:
        """Look for the cheapest sequence within the budget, until time is up."""
        if self.rules.match_ranges and not self.found.figures[BEST_LENGTH]:
            self.first = self._live_start(budget_nbytes)
        for kind in rounds_to_make(rounds):
            if time.monotonic() >= self.deadline:
                break
            sequence = self._start(kind)
            self.round(kind, sequence, budget_nbytes, match_range=self.nbytes(sequence)[1])

    def _live_start(self, budget_nbytes: int) -> Array:
        """Of sequences found by live bytes, the best to begin with in blocks."""
        ranked = []
        sequence = self.first
        for share in LIVE_SHARES:
            found = Best(np.zeros_like(self.room), np.array([0.0, np.inf, np.inf]))
            self.round(ROUNDS[0], sequence, int(share * budget_nbytes), best=found)
            sequence = self.current
            if found.figures[BEST_LENGTH]:
                sequence = found.sequence[: int(found.figures[BEST_LENGTH])]
            self._offer(sequence, budget_nbytes)
            over = max(0.0, self.nbytes(sequence)[0] / budget_nbytes - 1.0)
            seconds = float(self.model.seconds[sequence].sum()) / self.unit
            ranked.append((seconds + over, sequence))
        return min(ranked, key=lambda pair: pair[0])[1]

    def lowest(self, rounds: int | None) -> None:
        """Look for the sequence with the least memory, then for a cheaper one of that memory."""
        begin = time.monotonic()
        deadline = begin + (1.0 - CHEAPEN_SHARE) * (self.deadline - begin)
        self._offer(self.unplanned, None)
        self._offer(self.first, None)
        for done, kind in enumerate(rounds_to_make(rounds)):
            if time.monotonic() >= deadline:
                break
            sequence = self._start(kind._replace(from_best=True))
            nbytes, match_range = self.nbytes(sequence)
            self.round(
                kind,
                sequence,
                nbytes - 1,
                match_range=match_range,
                shrink=SHRINK / (1 + done),
                deadline=deadline,
            )
        self.cheapest(int(self.found.figures[BEST_NBYTES]), rounds)


@functools.cache
def compile_search() -> None:
    """Compile, or load what was compiled before: once in a process, and not in anybody's time."""
    op = Op("warm", "op", (), (0,), 1.0)
    graph = TrainingGraph((op,), (Tensor("warm", 4, 1),), (0,), 1)
    rules = Rules(recompute_backward=False, reorder=True, match_ranges=(1,))
    tiny = LocalSearch(graph, rules, seed=0, deadline=np.inf)
    tiny.nbytes(tiny.first)
    tiny.round(Round(False, 1.0, 0.0), tiny.first, 0)


def search(
    graph: TrainingGraph,
    budget_nbytes: int | None,
    *,
    rules: Rules,
    starts: Sequence[Schedule],
    seed: int,
    deadline: float,
    rounds: int | None,
) -> Schedule | None:
    """The best schedule found by ``deadline`` or in so many rounds; None if none fits the budget.

    An interrupt (KeyboardInterrupt) ends it early.
    """
    found = LocalSearch(graph, rules, seed=seed, deadline=deadline)
    try:
        for start in starts:
            found.start_from(start, budget_nbytes)
        if budget_nbytes is None:
            found.lowest(rounds)
        else:
            found.cheapest(budget_nbytes, rounds)
    except KeyboardInterrupt:
        if not found.found.figures[BEST_LENGTH]:
            raise
    return found.best()
