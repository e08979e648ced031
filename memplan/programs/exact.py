"""An exact search over the schedules of a small step, in any order, within a budget of live bytes.

Programs of moments say nothing of what has no room between two first executions. Of small graphs
every way to run the step can be looked at, the cheapest first (A*). A state is which ops have run
at least once and which tensors are held; what is left to do takes at least what
:meth:`memplan.programs.exact_step.ExactStep.units_left` says. Tensors are dropped only where the
next op has no room, as few as make it, for what is held longer never costs more.

The end of the step is looked at first, and what is found there tells a search that begins before it
what is to come (:mod:`memplan.programs.exact_gates`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

from memplan.programs.exact_gates import Gate, gates_of, needs_after
from memplan.programs.exact_step import Call, ExactStep
from memplan.programs.proof import Fact
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# Graphs of at most so many ops are searched, until so many states are made: a second of a core. Set
# on random chains and branches at 40 to 80% of the step: of 40 ops nearly all ended, of 60 four
# fifths.
MOST_OPS, STATES = 80, 120_000

# Of more ops than this fewer end, and what programs prove in the time is worth more: such graphs
# get so many states. Of 80 ops a fifth ended.
MANY_OPS, STATES_OF_MANY = 64, 30_000

# Searches from the gates are ended at so many states each, then at this many times as many.
FIRST_STATES, MORE = 300, 4

# Of the gates before the first one after which most runs again, so many are looked at again.
GATES_BEFORE = 2

# A state may be made in several ways: so many choices are looked at, in times the states. A state
# is compared with so many others: with all of thousands, that took most of the time.
CHOICES, COMPARED = 20, 500

# Of an op that may write over more buffers than this, it is not asked which of them die there.
MOST_GIVERS = 4

# A bound is told when it has risen by this part of the step, and the clock is read as often as
# so many choices are looked at.
RISE, LOOK = 0.001, 256

# An op that has run, and before it others.
Way = tuple[int, "Way"] | None


class ExactSearch:
    """Searches from the gates, the last first, and of the whole step, with more and more states."""

    def __init__(
        self, graph: TrainingGraph, budget_nbytes: int, *, recompute_backward: bool = False
    ) -> None:
        self.graph, self.budget_nbytes = graph, budget_nbytes
        self.step = ExactStep(graph, recompute_backward=recompute_backward)
        self.gates = gates_of(graph)
        # By gate what runs again from there on, at least; those of which no more can be said.
        self.units_after = dict.fromkeys((gate.op for gate in self.gates), 0)
        self.settled: set[int] = set()
        self.nstates = self.nchoices = 0

    def run(self, stop: Stop, *, states: int = STATES) -> Iterator[Fact]:
        """What is proved, now and then; at the end of the search the optimum, or that none fits."""
        rise = int(RISE * self.graph.seconds / self.step.unit_seconds)
        highest, told, most = self.step.after(0).units_to_come, 0, FIRST_STATES
        all_units = highest
        places: list[Gate | None] = [*reversed(self.gates), None]
        while True:
            for gate in places:
                choices = min(CHOICES * most, CHOICES * states - self.nchoices)
                search = self._search(gate)
                found = search.run(stop, min(most, states - self.nstates), choices)
                self.nstates += search.nstates
                self.nchoices += search.nchoices
                if math.isinf(found.units):
                    yield Fact(None, math.inf)
                    return
                if gate is None:
                    highest = max(highest, int(found.units))
                    if not found.is_cut:
                        yield self._fact(highest, found.way)
                        return
                else:
                    self._learn(gate, found)
                    highest = max(highest, self.units_after[gate.op] + all_units)
                is_done = self.nstates >= states or self.nchoices >= CHOICES * states
                is_over = is_done or stop.is_over()
                if is_over or highest >= told + rise:
                    yield self._fact(highest, None)
                    told = highest
                if is_over:
                    return
            most *= MORE
            places = [*self._worth_another(), None]

    def _search(self, gate: Gate | None) -> _Search:
        """That of what follows a gate, or of the whole step: the gates to come are known.

        A gate of which no more is known than of one after it says nothing.
        """
        gates: list[tuple[Gate, int]] = []
        for other in reversed(self.gates):
            units = self.units_after[other.op]
            if other is gate:
                break
            if units > (gates[-1][1] if gates else 0):
                gates.append((other, units))
        return _Search(self.step, self.budget_nbytes, gates[::-1], gate)

    def _learn(self, gate: Gate, found: _Found) -> None:
        self.units_after[gate.op] = max(self.units_after[gate.op], int(found.units))
        if not found.is_cut:
            self.settled.add(gate.op)

    def _worth_another(self) -> list[Gate]:
        """The gates of which more may be known yet, the last first.

        What runs again mostly does so after the fullest moment: gates long before it tell nothing.
        """
        most = max(self.units_after.values(), default=0)
        fullest = [k for k, gate in enumerate(self.gates) if self.units_after[gate.op] == most]
        first = max(0, fullest[-1] - GATES_BEFORE) if fullest else 0
        return [gate for gate in self.gates[first:][::-1] if gate.op not in self.settled]

    def _fact(self, units: int, way: Way) -> Fact:
        """The bound, and the schedule of a way to the end if that is one within the budget."""
        seconds, ops = units * self.step.unit_seconds, []
        while way is not None:
            ops.append(way[0])
            way = way[1]
        if not ops:
            return Fact(None, seconds)
        schedule = Schedule.sequence(self.graph, reversed(ops))
        fits = simulate(schedule).peak_nbytes <= self.budget_nbytes
        return Fact(schedule if fits else None, seconds)


class _Found(NamedTuple):
    """What every way takes at least, infinite if there is none; the best if no state is open."""

    units: float
    way: Way
    is_cut: bool


class _Dropping(NamedTuple):
    """A choice of what is dropped, as far as it is made: ``chosen``; ``nbytes`` more must be.

    Of ``free`` those from ``place`` on may be dropped yet; ``rest`` is how much they have together.
    """

    free: Sequence[int]
    sizes: Sequence[int]
    rest: Sequence[int]
    place: int
    nbytes: int
    chosen: int


class _Search:
    """The open states, the lowest first, and for each set of ops that have run what was held.

    From a gate on the units are those of what runs again alone.
    """

    def __init__(
        self,
        step: ExactStep,
        budget_nbytes: int,
        gates: Sequence[tuple[Gate, int]],
        start: Gate | None,
    ) -> None:
        self.step, self.budget_nbytes, self.gates = step, budget_nbytes, gates
        self.start = start
        self.nstates = self.nchoices = 0
        # By the ops that have run: what is held, at what cost; what was looked at; what is read.
        self.best: dict[int, dict[int, int]] = {}
        self.seen: dict[int, list[tuple[int, int]]] = {}
        self.needs: dict[int, list[tuple[int, int]]] = {}
        self.open: list[tuple[int, int, int, int, int, int, Way, _Dropping | None]] = []

    def run(self, stop: Stop, states: int, choices: int) -> _Found:
        """The best way to the end, unless the work or the clock ends before it is found."""
        step, lowest = self.step, 0 if self.start else self.step.after(0).units_to_come
        following = self._begin()
        while True:
            # Where this is cut, some of what follows the state is not among the open ones: its own
            # bound holds then, and not the least of theirs.
            if self._is_cut(following, stop, states, choices):
                return _Found(lowest, None, True)
            if not self.open:
                return _Found(math.inf, None, False)
            lowest, _, _, units, done, held, way, dropping = heapq.heappop(self.open)
            if dropping is not None:
                following = self._drop(units, done, held, way, dropping)
            elif self._is_worse(units, done, held):
                following = iter(())
            elif done == step.every_op and not step.heads & ~held:
                return _Found(lowest, way, False)
            else:
                following = self._expand(units, done, held, way)

    def _begin(self) -> Iterator[None]:
        """Before anything has run, or where the op of the gate runs next."""
        if self.start is None:
            self._enter(0, 0, 0, None, None)
            return
        for done in self.start.sets:
            after = self.step.after(done)
            held = after.useful & after.written
            yield from self._run(-after.units_to_come, done, held, None, self.start.op)

    def _is_cut(self, following: Iterator[None], stop: Stop, states: int, choices: int) -> bool:
        """Enter what follows a state; does the work or the clock end before all of it is?"""
        for _ in following:
            self.nchoices += 1
            if self.nstates >= states or self.nchoices >= choices:
                return True
            if self.nchoices % LOOK == 0 and stop.is_over():
                return True
        return False

    def _enter(
        self, units: int, done: int, held: int, way: Way, dropping: _Dropping | None
    ) -> None:
        """A state, unless it is known at no more cost, or is seen to have no way to the end.

        While it is not chosen what is dropped, no more than ``held`` is.
        """
        known = self.best.setdefault(done, {})
        if dropping is None and known.get(held, math.inf) <= units:
            return
        needs = self.needs.get(done)
        if needs is None:
            needs = self.needs[done] = needs_after(self.step, done, self.gates)
        left = self.step.units_left(done, held, needs)
        if left is None:
            return
        if dropping is None:
            known[held] = units
        self.nstates += 1
        entry = (units + left, -done.bit_count(), self.nstates, units, done, held, way, dropping)
        heapq.heappush(self.open, entry)

    def _is_worse(self, units: int, done: int, held: int) -> bool:
        """Is a state known that has run the same and holds all of it for no more?

        Only the first ones that were looked at are compared.
        """
        if self.best[done][held] < units:
            return True
        seen = self.seen.setdefault(done, [])
        for other, cost in seen:
            if not held & ~other and cost <= units:
                return True
        if len(seen) < COMPARED:
            seen.append((held, units))
        return False

    def _expand(self, units: int, done: int, held: int, way: Way) -> Iterator[None]:
        """Enter what can follow: each op that can run, after each choice of drops that it needs."""
        runs = list(self._runs(done, held))
        for k, over in runs:
            if over <= 0 and self._costs_nothing(k, done):
                runs = [(k, over)]
                break
        for k, _ in runs:
            yield from self._run(units, done, held, way, k)

    def _run(self, units: int, done: int, held: int, way: Way, k: int) -> Iterator[None]:
        """Enter what is there once op k has run, or what may be dropped for it.

        Drop by drop, the cheapest first, for of n equal tensors there are nearly 2**n choices.
        """
        call, then = self.step.calls[k], done | 1 << k
        after = self.step.after(then)
        others = self.step.buffers(held & after.useful)
        operands = call.inputs | call.outputs
        free = [b for b in others if not b & operands and not b & held & after.stuck]
        free.sort(key=self.step.nbytes_by_mask.__getitem__, reverse=True)
        sizes = [self.step.nbytes_by_mask[b] for b in free]
        rest = [*accumulate(reversed(sizes), initial=0)][::-1]
        for given, over in self._given(call, then, held):
            dropping = _Dropping(free, sizes, rest, 0, over, given)
            yield from self._drop(units + call.units, then, held | call.outputs, (k, way), dropping)

    def _given(self, call: Call, then: int, held: int) -> Iterator[tuple[int, int]]:
        """What it may write over that would be of use, in each choice, and how much must go yet."""
        over = self._over(call, then, held, 0)
        useful = self.step.after(then).useful
        staying = [b for b in call.givers if b & held & useful & ~call.outputs]
        if over <= 0:
            staying = []
        elif len(staying) > MOST_GIVERS:  # as if all could be written over, and yet stay
            over -= sum(nbytes for nbytes, _ in call.takeovers)
            staying = []
        yield 0, over
        for number in range(1, len(staying) + 1):
            for chosen in combinations(staying, number):
                given = 0
                for b in chosen:
                    given |= b
                # An output that shares the buffer stays.
                yield given & ~call.outputs, self._over(call, then, held, given)

    def _drop(
        self, units: int, then: int, held: int, way: Way, dropping: _Dropping
    ) -> Iterator[None]:
        """Enter the state if there is room, or else the choices of the next buffer that goes."""
        useful, free = self.step.after(then).useful, dropping.free
        if dropping.nbytes <= 0:
            self._enter(units, then, held & ~dropping.chosen & useful, way, None)
            yield
            return
        for place in range(dropping.place, len(free)):
            if dropping.rest[place] < dropping.nbytes:
                return
            left = dropping.nbytes - dropping.sizes[place]
            chosen = dropping.chosen | free[place]
            remaining = held & ~chosen & useful
            if left <= 0:
                self._enter(units, then, remaining, way, None)
            elif dropping.rest[place + 1] >= left:
                further = dropping._replace(place=place + 1, nbytes=left, chosen=chosen)
                self._enter(units, then, remaining, way, further)
            yield

    def _runs(self, done: int, held: int) -> Iterator[tuple[int, int]]:
        """The ops that can run now, and by how many bytes each is over the budget."""
        useful = self.step.after(done).useful
        for k, call in enumerate(self.step.calls):
            if call.inputs & ~held:
                continue
            if done >> k & 1:
                if not call.repeatable or not call.outputs & useful & ~held:
                    continue
            elif call.follows & ~done:
                continue
            yield k, self._over(call, done | 1 << k, held, 0)

    def _over(self, call: Call, then: int, held: int, dropped: int) -> int:
        """By how many bytes a run is over the budget where ``dropped`` die there at the latest."""
        useful = self.step.after(then).useful & ~dropped
        nbytes = self.step.nbytes(held & (useful | call.inputs) | call.outputs)
        return nbytes - _taken_over(call, held & useful, self.step) - self.budget_nbytes

    def _costs_nothing(self, k: int, done: int) -> bool:
        """May op k, which can run now, run at once, whatever else is done?

        So it is where what it leaves takes no more than what stays until it has run, in any case,
        and is not written again.
        """
        call, then = self.step.calls[k], done | 1 << k
        useful = self.step.after(then).useful
        left = self.step.nbytes(call.outputs & useful)
        for b in self.step.buffers(call.inputs):
            writers = self.step.once_writers.get(b)
            if writers is not None and not writers & ~done and not b & useful:
                left -= self.step.nbytes_by_mask[b]
        return left <= 0


def _taken_over(call: Call, staying: int, step: ExactStep) -> int:
    """The bytes of outputs that are written over buffers of which nothing is ``staying``."""
    dying = [b for b in call.givers if not b & staying & ~call.outputs]
    if not dying:
        return 0
    saved = sum(
        nbytes for nbytes, givers in call.takeovers if any(giver in dying for giver in givers)
    )
    return min(saved, sum(step.nbytes_by_mask[b] for b in dying))
