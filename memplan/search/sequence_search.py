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

from memplan.search.kernels.greedy import evict
from memplan.search.kernels.moves import (
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
from memplan.search.kernels.replay import Array, graph_arrays, replay, replay_memory
from memplan.search.kernels.sequence import BEFORE, LENGTH, OP, load, sequence_model, sequence_state
from memplan.search.rematerialize import repeatable
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.progress import tell

# A round makes so many moves for every op, times its length.
MOVES_PER_OP = 2000
# Temperatures of a round are in units of the mean time of an op; each falls to this share.
COLD = 0.1
# A short round first; then again and again these, each time longer.
FIRST_ROUND = 0.05
LENGTHEN = 1.5
# Shares of the budget that live bytes are given in the search for a first plan in blocks.
LIVE_SHARES = (0.95, 0.85, 0.75, 0.65, 0.55, 0.45)
# Without a budget: how far below the least memory so far the next aim is, and what share of the
# time is then left to make that cheaper.
SHRINK = 0.002
CHEAPEN_SHARE = 0.25
# Without a plan in blocks, share of the time for plans by live bytes.
LIVE_TIME_SHARE = 0.3
# In the search for the fewest bytes: what the overhead counts in units of relative bytes, and
# the temperature, over the number of ops.
SECONDS_AT_LEAST = 0.02
LEAST_HOT = 0.1
# Share of the time for a greedy plan, and by how much less memory the next one is to have.
GREEDY_SHARE = 0.3
GREEDY_STEP = 0.9
# What MXNet allocates changes by jumps: annealing in blocks is so much hotter.
BLOCKS_HOTTER = 4.0
# Where time is too short for a round, it is used to improve the best at this temperature.
SHORT_HOT = 0.04
# So many moves show how fast moves are.
TRIAL_MOVES = 64
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


LIVE_ROUND = Round(False, 0.3, 0.5)


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

    def __init__(
        self,
        graph: TrainingGraph,
        rules: Rules,
        *,
        seed: int,
        deadline: float,
        enough_seconds: float = 0.0,
    ) -> None:
        self.graph = graph
        self.rules = rules
        self.deadline = deadline
        self.enough_seconds = enough_seconds
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
        self.moves_per_second: dict[int, float] = {}
        self.current = self.first = self.lowest_live = self.unplanned

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
        if not self.rules.match_ranges:
            return self._live_peak(sequence), LIVE
        ops = self._ops(sequence)
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
        nbytes, seconds = self.nbytes(sequence)[0], self._seconds(sequence)
        figures = self.found.figures
        if budget_nbytes is None:
            better = (nbytes, seconds) < (figures[BEST_NBYTES], figures[BEST_SECONDS])
        else:
            better = nbytes <= budget_nbytes and seconds < figures[BEST_SECONDS]
        if better:
            self.found.sequence[: len(sequence)] = sequence
            figures[:] = len(sequence), seconds, nbytes

    def _seconds(self, sequence: Array) -> float:
        return float(self.model.seconds[sequence].sum())

    def _live_peak(self, sequence: Array) -> int:
        ops = self._ops(sequence)
        return int(replay(self.arrays, self.memory, ops, len(ops), 1, UNLIMITED)[1])

    def round(
        self,
        kind: Round,
        budget_nbytes: int,
        *,
        match_range: int = LIVE,
        shrink: float = 0.0,
        best: Best | None = None,
        deadline: float | None = None,
    ) -> None:
        """Anneal with fewer moves, and from the best, if time is short.

        A ``best`` of its own is where a round puts what it finds.
        """
        deadline = self.deadline if deadline is None else deadline
        best = self.found if best is None else best
        nops = len(self.unplanned)
        if match_range not in self.moves_per_second:
            self.moves_per_second[match_range] = np.inf
            trial = Round(kind.from_best, 0.01, TRIAL_MOVES / MOVES_PER_OP / nops)
            self.round(trial, budget_nbytes, match_range=match_range, best=best)
        moves = int(max(TRIAL_MOVES, kind.length * MOVES_PER_OP * nops))
        most = (deadline - time.monotonic()) * self.moves_per_second[match_range]
        if moves > most and not kind.from_best:
            kind = kind._replace(from_best=True, hot=SHORT_HOT)
        moves = int(min(moves, max(most, TRIAL_MOVES)))
        hot = kind.hot / nops * (1.0 if match_range == LIVE else BLOCKS_HOTTER)
        review = min(2000, max(100, moves // 400))
        task = Task(self.unit, match_range, shrink, False, hot, COLD * hot, moves, review)
        self._anneal(self._start(kind, best), budget_nbytes, task, best, deadline)

    def _anneal(
        self, sequence: Array, budget_nbytes: int, task: Task, best: Best, deadline: float
    ) -> None:
        """Make the moves of ``task``, and look at the clock from time to time."""
        large = self.arrays
        if task.match_range != LIVE:
            large = graph_arrays(self.graph, int(SMALL_SHARE * budget_nbytes) + 1)
        load(self.model, self.state, sequence, len(sequence), budget_nbytes)
        control = np.array([self.weight, 0.0, 0.0, 0.0])
        left = task.moves
        while left > 0 and (begin := time.monotonic()) < deadline:
            speed = self.moves_per_second[task.match_range]
            chunk = min(left, int(max(20, min(left, CHUNK_SECONDS * speed))))
            anneal(
                *(self.model, self.state, large, self.arrays, self.memory, self.room),
                *(task, best, control, chunk),
            )
            left -= chunk
            speed = chunk / max(1e-6, time.monotonic() - begin)
            self.moves_per_second[task.match_range] = speed
            if best is self.found:
                self._tell()
                if self._is_enough():
                    break
        self.weight = control[0]
        self.current = self.state.steps[OP, : self.state.totals[LENGTH]].copy()

    def _is_enough(self) -> bool:
        """Is the best one so cheap that no other one can be cheaper?"""
        return bool(self.found.figures[BEST_SECONDS] <= self.enough_seconds)

    def _tell(self) -> None:
        if self.found.figures[BEST_LENGTH]:
            seconds = float(self.found.figures[BEST_SECONDS])
            tell("search", incumbent_seconds=seconds, unplanned_seconds=self.graph.seconds)

    def _start(self, kind: Round, best: Best) -> Array:
        length = int(best.figures[BEST_LENGTH])
        return best.sequence[:length].copy() if kind.from_best and length else self.first

    def _evict(self, budget_nbytes: int, deadline: float) -> Array:
        """The greedy plan of the first sequence; it may be over the budget."""
        load(self.model, self.state, self.first, len(self.first), budget_nbytes)
        while time.monotonic() < deadline and evict(self.model, self.state, 8):
            pass
        return self.state.steps[OP, : self.state.totals[LENGTH]].copy()

    def _share_of_time(self, share: float) -> float:
        """The time at which this share of what is left is over."""
        now = time.monotonic()
        return now + share * (self.deadline - now)

    def cheapest(self, budget_nbytes: int, rounds: int | None) -> None:
        """Look for the cheapest sequence within the budget, until time is up."""
        if not self.found.figures[BEST_LENGTH]:
            if self.rules.match_ranges:
                self.first = self._live_start(budget_nbytes)
            else:
                greedy = self._evict(budget_nbytes, self._share_of_time(GREEDY_SHARE))
                self._offer(greedy, budget_nbytes)
        for kind in rounds_to_make(rounds):
            if time.monotonic() >= self.deadline or self._is_enough():
                break
            match_range = self.nbytes(self._start(kind, self.found))[1]
            self.round(kind, budget_nbytes, match_range=match_range)

    def _live_start(self, budget_nbytes: int) -> Array:
        """Of sequences found by live bytes, the best to begin with in blocks."""
        deadline = self._share_of_time(LIVE_TIME_SHARE)
        ranked = []
        for done, share in enumerate(LIVE_SHARES):
            now = time.monotonic()
            until = now + (deadline - now) / (len(LIVE_SHARES) - done)
            found = Best(np.zeros_like(self.room), np.array([0.0, np.inf, np.inf]))
            live_budget = int(share * budget_nbytes)
            self.current = self._evict(live_budget, now + GREEDY_SHARE * (until - now))
            if self._live_peak(self.current) <= live_budget:
                found.sequence[: len(self.current)] = self.current
                found.figures[:2] = len(self.current), self._seconds(self.current)
            self.round(LIVE_ROUND, live_budget, best=found, deadline=until)
            length = int(found.figures[BEST_LENGTH])
            sequence = found.sequence[:length].copy() if length else self.current
            self._offer(sequence, budget_nbytes)
            over = max(0.0, self.nbytes(sequence)[0] / max(1, budget_nbytes) - 1.0)
            ranked.append((self._seconds(sequence) / self.unit + over, sequence))
            if over == 0.0:
                break
        return min(ranked, key=lambda pair: pair[0])[1]

    def lowest(self, rounds: int | None) -> None:
        """Look for the sequence with the least memory, then for a cheaper one of that memory."""
        deadline = self._share_of_time(1.0 - CHEAPEN_SHARE)
        self._offer(self.unplanned, None)
        self._offer(self.first, None)
        budget = self._live_peak(self.first)
        until = self._share_of_time(GREEDY_SHARE)
        while time.monotonic() < until:
            budget = int(GREEDY_STEP * budget)
            greedy = self._evict(budget, until)
            if self._live_peak(greedy) > budget or not budget:
                break
            self._offer(greedy, None)
        if self.rules.match_ranges:
            self._lowest_live(rounds, self._share_of_time(LIVE_TIME_SHARE))
            self._fewest_blocks(rounds, deadline)
        else:
            self._lowest_live(rounds, deadline)
        self.cheapest(int(self.found.figures[BEST_NBYTES]), rounds)

    def _lowest_live(self, rounds: int | None, deadline: float) -> None:
        """Rounds that lower the peak of live bytes further and further."""
        found = Best(np.zeros_like(self.room), np.array([0.0, np.inf, np.inf]))
        length = int(self.found.figures[BEST_LENGTH])
        found.sequence[:length] = self.found.sequence[:length]
        found.figures[BEST_LENGTH] = length
        for done, kind in enumerate(rounds_to_make(rounds)):
            if time.monotonic() >= deadline:
                break
            sequence = found.sequence[: int(found.figures[BEST_LENGTH])]
            budget = self._live_peak(sequence) - 1
            shrink = SHRINK / (1 + done)
            kind = kind._replace(from_best=True)
            self.round(kind, budget, shrink=shrink, best=found, deadline=deadline)
            self._offer(found.sequence[: int(found.figures[BEST_LENGTH])].copy(), None)
        self.lowest_live = found.sequence[: int(found.figures[BEST_LENGTH])].copy()

    def _fewest_blocks(self, rounds: int | None, deadline: float) -> None:
        """Rounds in which only bytes count, and seconds a little."""
        nops = len(self.unplanned)
        for done, kind in enumerate(rounds_to_make(rounds)):
            if time.monotonic() >= deadline:
                break
            if done == 0:
                kind = kind._replace(from_best=False)
            sequence = self.lowest_live if not kind.from_best else self._start(kind, self.found)
            nbytes, match_range = self.nbytes(sequence)
            if match_range not in self.moves_per_second:
                nothing = Best(np.zeros_like(self.room), np.array([0.0, np.inf, np.inf]))
                trial = kind._replace(length=0.0)
                self.round(trial, nbytes, match_range=match_range, best=nothing)
            most = (deadline - time.monotonic()) * self.moves_per_second[match_range]
            moves = int(max(TRIAL_MOVES, min(kind.length * MOVES_PER_OP * nops, most)))
            hot = (0.3 if kind.from_best else 1.0) * LEAST_HOT / nops
            task = Task(
                self.unit / SECONDS_AT_LEAST, match_range, 0.0, True, hot, COLD * hot, moves, moves
            )
            self.weight = 1.0
            self._anneal(sequence, nbytes // 2, task, self.found, deadline)


@functools.cache
def compile_search() -> None:
    """Compile, or load what was compiled before: once in a process, and not in anybody's time."""
    op = Op("warm", "op", (), (0,), 1.0)
    graph = TrainingGraph((op,), (Tensor("warm", 4, 1),), (0,), 1)
    rules = Rules(recompute_backward=False, reorder=True, match_ranges=(1,))
    tiny = LocalSearch(graph, rules, seed=0, deadline=time.monotonic() + 1e6)
    tiny.cheapest(0, 1)


def search(
    graph: TrainingGraph,
    budget_nbytes: int | None,
    *,
    rules: Rules,
    starts: Sequence[Schedule],
    seed: int,
    deadline: float,
    rounds: int | None,
    enough_seconds: float = 0.0,
) -> Schedule | None:
    """The best schedule found by ``deadline`` or in so many rounds; None if none fits the budget.

    One that takes no more than ``enough_seconds``, or an interrupt (KeyboardInterrupt), ends it
    early.
    """
    found = LocalSearch(graph, rules, seed=seed, deadline=deadline, enough_seconds=enough_seconds)
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
