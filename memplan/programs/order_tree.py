"""A higher bound: moments that the graph does not order, in each of their orders.

Of two moments one comes first in every schedule. So no schedule takes less than the least of the
bounds of all the orders that the graph leaves open, each of which is imposed on a program of its
own (:mod:`memplan.programs.moment_program`). The leaves of a tree are these orders: the lowest leaf
gets one moment more, in each of its places.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, chain, count, islice

from memplan.programs.moment_program import Bound, MomentProgram
from memplan.programs.moment_ranking import relatives
from memplan.programs.moment_refinement import drops_of, ops_over
from memplan.programs.moments import Moments
from memplan.programs.proof import Fact, ProofOptions
from memplan.programs.solver import Program
from memplan.search.eviction import Evictions
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# Of the ops that may become moments, relaxations tell which says most: of this many that are over
# the budget at this leaf, of this many of those with several places that read and write most, and
# of those that were looked at before, this many at once. Set on high_resolution and dense_blocks of
# benchmarks/gaps.py, and on its small_unet and ssd.
FULLEST, UNORDERED, TRIALS = 2, 4, 8

# Of the moments that a plan shows this many are looked at, too, that these times the ops are at
# most this: all of them unless relaxations take long. Set on fcn_resnet50_voc and senet_154 of
# GluonCV and on ssd, at 30, 40 and 30% of the step. On HRNet of 2,283 ops they take time and raise
# nothing.
GIVEN_SIZE = 12_000

# An op that raised a relaxation by little may raise one of more moments by this many times as much:
# where it could not be the best even then, it is not looked at again. Set on fcn_resnet50_voc.
HOPE = 3.0

# Where the best of them raises the relaxation by less than this part of the step's time, the
# integer program of the leaf is solved, with this part of the usual effort. Set on the same.
LITTLE, INTEGER_EFFORT = 0.005, 0.1

# Those that raise it by as much, in whole times this part of the step's time, are told apart by how
# many places they have: fewer make fewer leaves. Set on a U-Net, and on GluonCV's simple_pose.
ALIKE = 0.0002

# Where a search ends at a gap, programs do not count the smallest tensors, which have this part
# of the budget together at most: mostly statistics of BatchNorms. Relaxations take half to four
# fifths of the time, and say less by a hundredth of a point of overhead. Set on high_resolution and
# ssd of benchmarks/gaps.py, and on GluonCV's darknet53, fcn_resnet50_voc and senet_154.
NEGLIGIBLE = 1e-3

# Relaxations and integer programs that are solved at most, times the effort.
SOLVES = 300


@dataclass(frozen=True, order=True)
class _Leaf:
    """Moments in one order, in which no schedule takes less than ``seconds``.

    ``relaxed_seconds`` is what their relaxation says alone, which has the answer ``bound``. With
    ``is_solved`` the integer program has been solved, too, and ``bound`` is its answer, if it has
    one.
    """

    seconds: float
    relaxed_seconds: float
    number: int
    bound: Bound = field(compare=False)
    is_solved: bool = field(default=False, compare=False)


def raise_bound(
    graph: TrainingGraph,
    budget_nbytes: int,
    stop: Stop,
    options: ProofOptions,
) -> Iterator[Fact]:
    """What is proved as the tree grows, until that is the ``enough_seconds`` of ``options``."""
    tree = OrderTree(graph, budget_nbytes, stop, options)
    while tree.seconds < tree.enough_seconds and tree.grow():
        yield Fact(None, tree.seconds)


class OrderTree:
    """The leaves: every schedule has the moments of one of them in its order."""

    def __init__(
        self,
        graph: TrainingGraph,
        budget_nbytes: int,
        stop: Stop,
        options: ProofOptions,
    ) -> None:
        self.graph, self.budget_nbytes, self.options = graph, budget_nbytes, options
        self.stop, enough = stop, options.enough_seconds
        self.enough_seconds = math.inf if enough is None else enough
        backward = options.recompute_backward
        negligible_nbytes = NEGLIGIBLE * budget_nbytes if options.gap_seconds else 0.0
        self.moments = Moments(
            graph, recompute_backward=backward, negligible_nbytes=negligible_nbytes
        )
        self.evictions = Evictions(graph, budget_nbytes, recompute_backward=backward)
        self.ancestors, _ = relatives(graph)
        self.promising = self.moments.promising(budget_nbytes)
        working_nbytes = [self.moments.working_nbytes(t) for t in range(len(graph.ops))]
        self.largest = sorted(range(len(graph.ops)), key=lambda t: -working_nbytes[t])
        # By how much each op that was looked at raised a relaxation last: mostly less at each leaf.
        self.gains: dict[int, float] = dict.fromkeys(options.candidates, math.inf)
        # In how many places each was looked at, at most, if in several.
        self.nplaces: dict[int, int] = {}
        self.numbers = count()
        nothing = Bound(graph.seconds, (), ())
        self.leaves = [_Leaf(graph.seconds, graph.seconds, next(self.numbers), nothing)]
        self.nsolved = 0

    @property
    def seconds(self) -> float:
        """No schedule takes less, in any order: what holds for the lowest leaf holds for all."""
        return self.leaves[0].seconds

    def grow(self) -> bool:
        """Raise the lowest leaf by another moment or by its integer program; False at the end."""
        leaf = self.leaves[0]
        children = self._best_children(leaf)
        if children is None:
            return False
        lowest = min((child.seconds for child in children), default=-math.inf)
        is_little = lowest < leaf.relaxed_seconds + LITTLE * self.graph.seconds
        if is_little and leaf.bound.ops and not leaf.is_solved:
            heapq.heapreplace(self.leaves, self._solved(leaf))
            return True
        if children:
            heapq.heappop(self.leaves)
        for child in children:
            seconds = max(leaf.seconds, child.seconds)
            heapq.heappush(self.leaves, _Leaf(seconds, child.seconds, next(self.numbers), child))
        return bool(children)

    def _best_children(self, leaf: _Leaf) -> list[Bound] | None:
        """Relaxations with one moment more in all its places, the lowest being the highest found.

        None if time or work is over before all of them are known.
        """
        ops = leaf.bound.ops
        stages = self.evictions.stages(drops_of(leaf.bound, self.evictions))
        for t in self._candidates(ops, stages):
            self.gains.setdefault(t, math.inf)
        self._look_again(ops)
        over = self._over(stages) if leaf.is_solved else set[int]()
        best: list[Bound] = []
        highest = (-math.inf, 0)
        for t in self._trials(ops, over):
            orders = self._orders(ops, t)
            if self._rank(HOPE * self.gains[t], orders) <= highest:
                continue
            children: list[Bound] = []
            gain = math.inf
            for order in orders:
                if self._is_over():
                    return None
                children.append(self._relaxation(order))
                gain = min(gain, children[-1].seconds - leaf.relaxed_seconds)
                if self._rank(gain, orders) <= highest:
                    break
            else:  # in every one of its places
                best, highest = children, self._rank(gain, orders)
            self.gains[t] = gain
            self.nplaces[t] = max(len(orders), self.nplaces.get(t, 1))
        return best

    def _look_again(self, ops: tuple[int, ...]) -> None:
        """Forget what ops gained that have more places among ``ops`` than ever before.

        An op that gains nothing beside moments that the graph orders may gain much, in every one of
        its places, beside one that it does not.
        """
        for t in self.gains.keys() - ops:
            if len(self._orders(ops, t)) > self.nplaces.get(t, 1):
                self.gains[t] = math.inf

    def _over(self, stages: Sequence[Sequence[int]]) -> set[int]:
        """The ops whose first runs are over the budget."""
        live = simulate(Schedule.sequence(self.graph, chain.from_iterable(stages))).live_nbytes
        firsts = accumulate(map(len, stages))
        return {t for t, end in enumerate(firsts) if live[end - 1] > self.budget_nbytes}

    def _trials(self, ops: tuple[int, ...], over: Set[int] = frozenset()) -> list[int]:
        """What to look at now: some of the candidates that are given, and some of the others.

        Of those that are ``over`` the budget in the answer of an integer program, if there are any:
        the others allow the same answer again.
        """
        untried = self.gains.keys() - ops
        untried = untried & over or untried
        ranked = sorted(untried, key=lambda t: (-self.gains[t], t))
        given = [t for t in ranked if t in self.options.candidates]
        others = [t for t in ranked if t not in self.options.candidates]
        ngiven = max(1, GIVEN_SIZE // max(1, len(self.graph.ops)))
        return others[:TRIALS] + given[:ngiven]

    def _rank(self, gain: float, orders: Sequence[tuple[int, ...]]) -> tuple[float, int]:
        """By which the best moment is chosen: what it gains, and of as much the fewest places."""
        unit = ALIKE * self.graph.seconds  # none where no op takes any time, and nothing is gained
        nalike = math.floor(gain / unit) if unit and math.isfinite(gain) else gain
        return nalike, -len(orders)

    def _candidates(self, ops: tuple[int, ...], stages: Sequence[Sequence[int]]) -> Iterator[int]:
        """Ops that are over the budget in these stages, and ops that the moments do not order."""
        fullest = ops_over(self.graph, stages, self.budget_nbytes, ops)
        yield from islice((t for t in fullest if t not in ops), FULLEST)
        unordered = (t for t in self.largest if len(self._orders(ops, t)) > 1)
        others = unordered if ops else self.promising
        yield from islice((t for t in others if t not in ops), UNORDERED)

    def _orders(self, ops: tuple[int, ...], t: int) -> list[tuple[int, ...]]:
        """``ops`` with t in each of the places that the graph leaves it."""
        first = max((i + 1 for i, op in enumerate(ops) if self.ancestors[t] >> op & 1), default=0)
        last = min((i for i, op in enumerate(ops) if self.ancestors[op] >> t & 1), default=len(ops))
        return [(*ops[:i], t, *ops[i:]) for i in range(first, last + 1)]

    def _is_over(self) -> bool:
        return self.nsolved >= self.options.effort * SOLVES or self.stop.is_over()

    def _relaxation(self, ops: tuple[int, ...]) -> Bound:
        self.nsolved += 1
        with Program(self.options.solver) as program:
            moments = MomentProgram(self.moments, ops, self.budget_nbytes, program)
            return moments.bound(self.stop, relax=True)

    def _solved(self, leaf: _Leaf) -> _Leaf:
        """The leaf with what its integer program says.

        Only answers that take less than what is enough are asked for: without one, all take that.
        """
        self.nsolved += 1
        with Program(self.options.solver, restarts=False) as program:
            moments = MomentProgram(self.moments, leaf.bound.ops, self.budget_nbytes, program)
            moments.demand_less(self.enough_seconds)
            effort, gap = INTEGER_EFFORT * self.options.effort, self.options.program_gap
            solved = moments.bound(self.stop, effort=effort, gap_seconds=gap)
        seconds = max(leaf.seconds, min(solved.seconds, self.enough_seconds))
        # What this answer has no room for proves more, as a moment, than that of a relaxation.
        answer = solved if solved.present else leaf.bound
        return _Leaf(seconds, leaf.relaxed_seconds, next(self.numbers), answer, is_solved=True)
