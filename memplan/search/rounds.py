"""Rounds of search over sequences of executions, and the best sequence that they have found."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from memplan.memory.offsets.passes import FORMS, SMALL
from memplan.memory.packing import ALIGNMENT
from memplan.search.aiming import Excess
from memplan.search.by_loss import best_order, loss_by_loss
from memplan.search.eviction import Evictions
from memplan.search.kernels.annealing import (
    BEST_LENGTH,
    BEST_NBYTES,
    BEST_SECONDS,
    LIVE,
    Best,
    Task,
    anneal,
)
from memplan.search.kernels.arrays import Array, graph_arrays
from memplan.search.kernels.fitting import Fitting, begin_fitting
from memplan.search.kernels.packing import packing_room
from memplan.search.kernels.recreating import Ruins, recreate, recreating_room
from memplan.search.kernels.sequence import load
from memplan.search.kernels.state import LENGTH, OP, copy_state
from memplan.search.low_order import low_order
from memplan.search.online import online_schedules
from memplan.search.round_kinds import MOST_RECREATED, SHORT_HOT, Round
from memplan.search.sequences import GraphSequences, Rules
from memplan.search.slices import sliced_schedules
from memplan.search.speed import FEWEST_MOVES, Speed
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.progress import tell
from memplan.util.stop import Pace, Stop

# A round makes this many moves for every op, times its length.
MOVES_PER_OP = 2000
# Temperatures of a round are in units of the mean time of an op; each falls to this share.
COLD = 0.1
# In the search for the fewest bytes: what the overhead counts in units of relative bytes, and
# the temperature, over the number of ops.
SECONDS_AT_LEAST, LEAST_HOT = 0.02, 0.1
# What MXNet allocates changes by jumps: annealing in blocks is so much hotter.
BLOCKS_HOTTER = 4.0
# In place of a match range: the speed of ruin and recreate.
RECREATING = -2
# What a move costs in work in blocks, times the root of the number of ops: measured on the zoo's
# ResNet-50 and DenseNet-121.
BLOCKS_WORK = 0.33
# The search in blocks leaves out tensors of less than this share of the budget.
SMALL_SHARE = 2e-4
# Where a round packs, bytes that are over, in budgets, cost this many steps. Set on HRNet at 30% of
# its step and on SENet-154 at 40%.
OVER_SECONDS = 1.0
# After this many moves it is looked whether what was found is enough.
LOOK_MOVES = 4096


class Rounds(GraphSequences):
    """Rounds over one graph. The best sequence so far is :meth:`best`, in ``found``.

    ``first`` is what a round begins with that does not begin with the best. How many moves a round
    makes is decided by its kind, and by the work that is left; ``stop`` says whether the clock had
    to shorten one. ``excess`` tells by how many bytes a schedule is over a budget in the memory
    that counts, if that is not what the rounds count: see :mod:`memplan.search.settling`.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        rules: Rules,
        *,
        seed: int,
        stop: Stop,
        enough_seconds: float = 0.0,
        excess: Excess | None = None,
    ) -> None:
        super().__init__(graph, rules, seed)
        self.stop, self.excess, self.enough_seconds = stop, excess, enough_seconds
        self.ruining = recreating_room(self.model, self.capacity)
        self.packing = packing_room(self.model, self.capacity, ALIGNMENT, FORMS)
        # What MXNet allocates in blocks depends on its own order, but for losses that take turns.
        order = loss_by_loss if rules.match_ranges else best_order
        backward = rules.recompute_backward
        self.reordered = order(graph, reorder=rules.reorder, recompute_backward=backward)
        dropped = self.reordered.graph
        self.evictions = Evictions(dropped, 0, recompute_backward=rules.recompute_backward)
        self.found = self.nothing()
        self.settled = self.nothing()
        self.fitting: Schedule | None = None
        unplanned = self.of_schedule(self.reordered.back(Schedule.unplanned(dropped)))
        self.unplanned = np.arange(self.nops) if unplanned is None else unplanned
        self.low = self._unplanned_low()
        self.first = self.unplanned
        self.unit = max(graph.seconds, 1e-300)
        self.weight = 1.0
        self.speeds: dict[int, Speed] = {}
        self._sliced: dict[int, list[Array]] = {}
        self.longest_look = 0.0  # seconds: at whether what was found fits

    @property
    def is_recreated(self) -> bool:
        """Do rounds ruin and recreate, as it pays in live bytes of graphs that are not too long?"""
        return not self.match_ranges and self.nops <= MOST_RECREATED

    def _unplanned_low(self) -> Array:
        """The unplanned step in the order in which little is alive, where it may have that."""
        if not (self.is_recreated and self.rules.reorder):
            return self.unplanned
        sequence = self.of_schedule(Schedule.sequence(self.graph, low_order(self.graph)))
        return self.unplanned if sequence is None else sequence

    def nothing(self) -> Best:
        """Room for a best sequence."""
        return Best(np.zeros(self.capacity, dtype=np.int64), np.array([0.0, np.inf, np.inf]))

    def best(self) -> Schedule | None:
        """The best schedule so far within the budget."""
        if self.excess is not None:
            return self.fitting  # the very one that was looked at: its bytes are known
        sequence = best_sequence(self.found)
        return self.schedule(sequence) if len(sequence) else None

    def saved(self, sequence: Array) -> float:
        """By how many seconds it is cheaper than what fits; infinite if nothing does yet."""
        if self.fitting is None:
            return math.inf
        return self.fitting.seconds - self.seconds(sequence)

    def start_from(self, schedule: Schedule, budget_nbytes: int | None) -> None:
        """Begin with ``schedule``, as far as the rules allow it."""
        sequence = self.of_schedule(schedule)
        if sequence is not None:
            self.first = sequence
            self.offer(sequence, budget_nbytes)

    def offer(self, sequence: Array, budget_nbytes: int | None) -> None:
        """Remember ``sequence`` if it is the best so far."""
        nbytes, seconds = self.nbytes(sequence)[0], self.seconds(sequence)
        figures = self.found.figures
        if budget_nbytes is None:
            better = (nbytes, seconds) < (figures[BEST_NBYTES], figures[BEST_SECONDS])
        else:
            better = nbytes <= budget_nbytes and seconds < figures[BEST_SECONDS]
        if better:
            self.found.sequence[: len(sequence)] = sequence
            figures[:] = len(sequence), seconds, nbytes

    def evict(self, budget_nbytes: int, stop: Stop) -> Array | None:
        """The first sequence, with drops until its live bytes are within the budget."""
        drops = set()
        if self.first is not self.unplanned:
            drops = self.evictions.drops_in(self.reordered.there(self.schedule(self.first)))
        found = self.evictions.within(budget_nbytes).fit(drops, stop)
        return None if found is None else self.of_schedule(self.reordered.back(found.schedule))

    def evicted_online(self, budget_nbytes: int, stop: Stop) -> Iterator[Array]:
        """Sequences of online eviction of about this many live bytes."""
        run = partial(online_schedules, recompute_backward=self.rules.recompute_backward)
        schedules = map(self.reordered.back, run(self.reordered.graph, budget_nbytes, stop))
        sequences = map(self.of_schedule, schedules)
        return (sequence for sequence in sequences if sequence is not None)

    def sliced(self, budget_nbytes: int, stop: Stop) -> list[Array]:
        """Sequences that recompute slices, of about this many live bytes, made once."""
        if budget_nbytes not in self._sliced:
            reorder = self.rules.reorder
            schedules = sliced_schedules(self.graph, budget_nbytes, stop, reorder=reorder)
            sequences = map(self.of_schedule, schedules)
            self._sliced[budget_nbytes] = [each for each in sequences if each is not None]
        return self._sliced[budget_nbytes]

    def start_of(self, kind: Round, best: Best) -> Array:
        """What a round begins with."""
        sequence = best_sequence(best)
        if kind.from_best and len(sequence):
            return sequence
        return self.unplanned if kind.recreates else self.first

    def round(
        self,
        kind: Round,
        budget_nbytes: int,
        *,
        match_range: int = LIVE,
        shrink: float = 0.0,
        best: Best | None = None,
        start: Array | None = None,
        stop: Stop | None = None,
        packed_nbytes: int = 0,
    ) -> Array:
        """Anneal, with fewer moves, and mostly from the best, if little work is left; its end.

        A ``best`` of its own is where a round puts what it finds; ``start`` is what it begins with
        instead of what its kind says. One that recreates finds what quick placements pack in
        ``packed_nbytes``, if that is not 0, and else ends with what nearly can be.
        """
        stop = self.stop if stop is None else stop
        best = self.found if best is None else best
        moves = self._moves(kind, match_range, stop)
        if moves < self._moves_of(kind) and not (kind.from_best or kind.recreates):
            kind = kind._replace(from_best=True, hot=SHORT_HOT)
        hot = kind.hot / self.nops * (1.0 if match_range == LIVE else BLOCKS_HOTTER)
        heat = (hot, COLD * hot)
        start = self.start_of(kind, best) if start is None else start
        if kind.recreates:
            load(self.model, self.state, start, len(start), budget_nbytes)
            return self._recreate(heat, self._fitting(packed_nbytes), moves, best, stop)
        review = min(2000, max(100, moves // 400))
        task = Task(self.unit, match_range, shrink, False, *heat, moves, review)
        return self._anneal(start, budget_nbytes, task, best, stop)

    def fewest(self, kind: Round, sequence: Array, stop: Stop) -> None:
        """A round in which only the bytes of blocks count, and seconds a little."""
        nbytes, match_range = self.nbytes(sequence)
        moves = self._moves(kind, match_range, stop)
        hot = (0.3 if kind.from_best else 1.0) * LEAST_HOT / self.nops
        unit = self.unit / SECONDS_AT_LEAST
        task = Task(unit, match_range, 0.0, True, hot, COLD * hot, moves, moves)
        self.weight = 1.0
        self._anneal(sequence, nbytes // 2, task, self.found, stop)

    def _moves_of(self, kind: Round) -> int:
        return int(max(FEWEST_MOVES, kind.length * MOVES_PER_OP * self.nops))

    def _moves(self, kind: Round, match_range: int, stop: Stop) -> int:
        """The moves of a round: those of its kind, or as many as there is work left for."""
        most = max(FEWEST_MOVES, stop.work_left / self._work(match_range))
        moves = int(min(self._moves_of(kind), most))
        speed = self.speeds.get(RECREATING if kind.recreates else match_range, Speed())
        return min(moves, speed.possible(moves, stop))

    def _work(self, match_range: int) -> float:
        """What a move costs in work."""
        return 1.0 if match_range == LIVE else max(1.0, BLOCKS_WORK * self.nops**0.5)

    def _anneal(
        self, sequence: Array, budget_nbytes: int, task: Task, best: Best, stop: Stop
    ) -> Array:
        """Make the moves of ``task``, and look at the clock from time to time; where that ends.

        Without time for all of them the temperature falls faster.
        """
        large = self.arrays
        if task.match_range != LIVE:
            large = graph_arrays(self.graph, int(SMALL_SHARE * budget_nbytes) + 1)
        load(self.model, self.state, sequence, len(sequence), budget_nbytes)
        control = np.array([self.weight, 0.0, 0.0, 0.0, np.inf, np.inf])
        speed = self.speeds.setdefault(task.match_range, Speed())
        pace, made = Pace(stop, task.moves), 0
        while (left := pace.left(made)) > 0:
            begin = time.monotonic()
            # However long that takes, what is found is looked at after the same moves.
            chunk = min(left, speed.chunk, LOOK_MOVES - made % LOOK_MOVES)
            anneal(
                *(self.model, self.state, large, self.arrays, self.memory, self.room),
                *(task._replace(moves=made + left), best, control, chunk),
            )
            made += chunk
            stop.spend(chunk * self._work(task.match_range))
            speed.note(chunk, time.monotonic() - begin)
            if best is self.found:
                self._tell()
                if made % LOOK_MOVES == 0 and self.is_enough():
                    break
        self.weight = control[0]
        return self.state.steps[OP, : self.state.totals[LENGTH]].copy()

    def _recreate(
        self, heat: tuple[float, float], fitting: Fitting, work: int, best: Best, stop: Stop
    ) -> Array:
        """Ruin and recreate, from the state, for so much work; where that ends."""
        ruining = self.ruining
        copy_state(self.state, ruining.now)
        begin_fitting(self.model, self.state, fitting)
        enough = 0.0 if self.match_ranges else self.enough_seconds
        speed = self.speeds.setdefault(RECREATING, Speed())
        pace, made = Pace(stop, work), 0
        while (left := pace.left(made)) > 0:
            begin = time.monotonic()
            ruins = Ruins(self.unit * heat[0], self.unit * heat[1], float(made + left), enough)
            chunk = min(left, speed.chunk)
            room = (self.model, self.state, ruining)
            spent = recreate(*room, ruins, fitting, best, made, chunk) - made
            made += spent
            stop.spend(spent)
            speed.note(spent, time.monotonic() - begin)
            if best is self.found:
                self._tell()
            if best.figures[BEST_SECONDS] <= enough:
                break
        return ruining.now.steps[OP, : ruining.now.totals[LENGTH]].copy()

    def _fitting(self, packed_nbytes: int) -> Fitting:
        """How a round finds what can be packed in this many bytes; 0: whatever can be."""
        least, seconds = int(SMALL * packed_nbytes), OVER_SECONDS * self.unit
        return Fitting(self.packing, packed_nbytes, least, seconds, np.zeros(2))

    def is_enough(self) -> bool:
        """Is the best one so cheap that no other one can be cheaper?"""
        return bool(self.found.figures[BEST_SECONDS] <= self.enough_seconds)

    def _tell(self) -> None:
        if self.found.figures[BEST_LENGTH]:
            seconds = float(self.found.figures[BEST_SECONDS])
            tell("search", incumbent_seconds=seconds, unplanned_seconds=self.graph.seconds)


def copy_best(best: Best, other: Best) -> None:
    """Make the other one equal."""
    for values, others in zip(best, other, strict=True):
        others[:] = values


def best_sequence(best: Best) -> Array:
    """The sequence in ``best``, empty if there is none."""
    return best.sequence[: int(best.figures[BEST_LENGTH])].copy()
