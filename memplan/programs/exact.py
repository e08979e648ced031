"""An exact search over the schedules of a small step, in any order, within a budget of live bytes.

Programs of moments say nothing of what has no room between two first executions. Of small graphs
every way to run the step can be looked at, the cheapest first (A*). A state is which ops have run
at least once and which tensors are held; what is left to do takes at least what
:meth:`memplan.programs.exact_step.ExactStep.units_left` says. Tensors are dropped only where the
next op has no room, as few as make it, for what is held longer never costs more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import combinations

from memplan.programs.exact_step import Call, ExactStep, enough_of
from memplan.programs.proof import Fact
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# Graphs of at most so many ops are searched, until so many states are made: a second or two of a
# core, and 30 MB. Set on random chains and branches at 40 to 80% of the step: of 30 ops all ended,
# of 40 two thirds, of 60 a quarter, of 80 none.
MOST_OPS, STATES = 64, 60_000

# A choice is an op that runs next and what is dropped for it. Many lead to a state that is known,
# so a search ends as well after this many times as many choices as it may make states. A state is
# compared with this many others at most: with thousands, that took most of the time.
CHOICES, COMPARED = 20, 500

# A giver is a buffer that an op may write over if it dies there. Of an op with more of them that
# are read later, it is not tried which are given up: all count as written over, and as staying.
MOST_GIVERS = 4

# A bound is told when it has risen by this part of the step's seconds, and the clock is read once
# in this many choices.
RISE, LOOK = 0.001, 256

# The last op that has run, and the way before it.
Way = tuple[int, "Way"] | None


class ExactSearch:
    """The open states, that of the lowest bound first; by ops that have run, what was held.

    A state is two masks: ``done``, the ops that have run, and ``held``, the tensors in memory. Its
    cost is in the ``units`` of :class:`memplan.programs.exact_step.ExactStep`.
    """

    def __init__(
        self, graph: TrainingGraph, budget_nbytes: int, *, recompute_backward: bool = False
    ) -> None:
        self.graph, self.budget_nbytes = graph, budget_nbytes
        self.step = ExactStep(graph, recompute_backward=recompute_backward)
        self.nstates = self.nchoices = 0
        # By ``done``: the least cost of each ``held`` that was made, and (held, cost) of those that
        # were looked at.
        self.best: dict[int, dict[int, int]] = {}
        self.seen: dict[int, list[tuple[int, int]]] = {}
        # A heap of (bound, minus how many ops have run, number, cost, done, held, way).
        self.open: list[tuple[int, int, int, int, int, int, Way]] = []
        self._enter(0, 0, 0, None)

    def run(self, stop: Stop, *, states: int = STATES) -> Iterator[Fact]:
        """What is proved, now and then; at the end of the search the optimum, or that none fits."""
        step, told = self.step, 0
        rise = int(RISE * self.graph.seconds / step.unit_seconds)
        while self.open:
            lowest, _, _, units, done, held, way = heapq.heappop(self.open)
            if self._is_worse(units, done, held):
                continue
            if done == step.every_op and not step.heads & ~held:
                yield self._fact(lowest, way)
                return
            if lowest >= told + rise:
                yield self._fact(lowest, None)
                told = lowest
            # Where this is cut, some of what follows the state is not among the open ones: its own
            # bound holds then, and not the least of theirs.
            if self._is_cut(self._expand(units, done, held, way), stop, states):
                yield self._fact(lowest, None)
                return
        yield Fact(None, math.inf)

    def _is_cut(self, choices: Iterator[None], stop: Stop, states: int) -> bool:
        """Enter what follows a state; does the work or the clock end before all of it is?"""
        for _ in choices:
            self.nchoices += 1
            if self.nstates >= states or self.nchoices >= CHOICES * states:
                return True
            if self.nchoices % LOOK == 0 and stop.is_over():
                return True
        return False

    def _fact(self, units: int, way: Way) -> Fact:
        """The bound, and the schedule of a way to the end if that is one within the budget."""
        seconds, ops = units * self.step.unit_seconds, []
        while way is not None:
            op, way = way
            ops.append(op)
        if not ops:
            return Fact(None, seconds)
        schedule = Schedule.sequence(self.graph, reversed(ops))
        fits = simulate(schedule).peak_nbytes <= self.budget_nbytes
        return Fact(schedule if fits else None, seconds)

    def _enter(self, units: int, done: int, held: int, way: Way) -> None:
        """A state, unless it is known at no more cost, or is seen to have no way to the end."""
        known = self.best.setdefault(done, {})
        if known.get(held, math.inf) <= units:
            return
        left = self.step.units_left(done, held)
        if left is None:
            return
        known[held] = units
        self.nstates += 1
        entry = (units + left, -done.bit_count(), self.nstates, units, done, held, way)
        heapq.heappush(self.open, entry)

    def _is_worse(self, units: int, done: int, held: int) -> bool:
        """Is a state known that has run the same ops, and holds all that this does, for no more?

        It is compared with the first that were looked at, and is one of them from now on.
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
        """Enter what can follow: each op that can run, after each choice of drops that it needs.

        It yields behind each choice, for the search to end there: of n equal tensors there are
        nearly 2**n.
        """
        runs = list(self._runs(done, held))
        for k, over in runs:
            if over <= 0 and self._costs_nothing(k, done):
                runs = [(k, over)]
                break
        for k, over in runs:
            call, then = self.step.calls[k], done | 1 << k
            useful = self.step.after(then).useful
            for dropped in self._drops(call, then, held, over):
                after = ((held & ~dropped) | call.outputs) & useful
                self._enter(units + call.units, then, after, (k, way))
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

    def _drops(self, call: Call, then: int, held: int, over: int) -> Iterator[int]:
        """What may be dropped for a run that is ``over`` the budget, as little as makes room."""
        if over <= 0:
            yield 0
            return
        after = self.step.after(then)
        operands = call.inputs | call.outputs
        others = self.step.buffers(held & after.useful)
        free = [b for b in others if not b & operands and not b & held & after.stuck]
        free.sort(key=self.step.nbytes_by_mask.__getitem__, reverse=True)
        sizes = [self.step.nbytes_by_mask[b] for b in free]
        staying = [b for b in call.givers if b & held & after.useful & ~call.outputs]
        if len(staying) > MOST_GIVERS:  # as if all of them could be written over, and yet stay
            over -= sum(nbytes for nbytes, _ in call.takeovers)
            staying = []
        for number in range(len(staying) + 1):
            for chosen in combinations(staying, number):
                given = 0
                for b in chosen:
                    given |= b
                left = self._over(call, then, held, given) if chosen else over
                for dropped in enough_of(free, sizes, left):
                    yield dropped | given

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
