"""Simulated annealing over sets of flags, with the memory that MXNet really allocates.

What MXNet allocates depends on the order in which blocks of many sizes come free, which no linear
constraint describes; replaying its allocator takes milliseconds, so it is simply tried.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from memplan.search.kernels.arrays import Array
from memplan.search.kernels.mirroring import Evaluator
from memplan.search.kernels.replay import UNLIMITED
from memplan.search.rematerialize import inner_forward
from memplan.search.segments import (
    articulation_points,
    flags_keeping,
    output_nbytes,
    threshold_cuts,
)
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule
from memplan.util.progress import tell
from memplan.util.stop import Pace, Stop

# Cost is overhead (extra seconds / unplanned seconds) plus one of these for every 100% over the
# budget, in turn: with the lower one annealing gets further where tensors are many and small (the
# zoo's DenseNet-121 and ResNet-152), and stays over the budget where they are few (ResNet-18).
PENALTIES = (0.5, 1.0)
# Temperatures, in units of that cost, from the first to the last step of a chain, and at the first
# of one that begins with the best of those before.
HOT, COLD = 0.01, 0.0001
REHEATED = 0.003
# A chain makes this many moves for every flag: more chains find more than longer ones. Set on the
# zoo's ResNet-50 and MobileNet.
MOVES_BY_FLAG = 160

MOVES_BETWEEN_LOOKS_AT_THE_CLOCK = 16

# How many segmentations are tried for each kind of points to cut at.
CUTS = 24

# What a move costs in work: so much for every op, as the step is replayed, and this at least.
# Measured on the zoo's ResNet-50 and memonger's ResNet.
WORK_BY_OPS, LEAST_WORK = 0.03, 30.0
# With fewer moves for every flag than this, annealing finds hardly anything. Set on memonger's LSTM
# over 100 steps, where half as many found nothing cheaper than a cut.
FEWEST_BY_FLAGS = 1.5
# Where neither moves nor work are bounded.
MOST_MOVES = 1 << 40


@functools.cache
def compile_annealing() -> None:
    """Compile, or load what was compiled before: once in a process, and not in anybody's time."""
    forward = Op("warm", "op", (), (0,), 1.0)
    backward = Op("back", "op", (0,), (1,), 1.0, differentiates=0)
    tensors = (Tensor("warm", 4, 1), Tensor("back", 4, 1))
    graph = TrainingGraph((forward, backward), tensors, (0, 1), 1)
    anneal(graph, frozenset(), 0, stop=Stop.after(1e6), moves=1)


def anneal(
    graph: TrainingGraph,
    start: frozenset[int],
    budget_nbytes: int | None,
    *,
    stop: Stop,
    moves: int | None = None,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest mirrored schedule met whose blocks fit the budget, or None if none did.

    Without a budget: the one with the fewest bytes. Makes this many ``moves``
    before ``stop``: the same seed gives the same schedule, unless the clock has hurried it, which
    the stop says. Without ``moves`` it makes as many as the stop has work for, or takes all of the
    time; none where those are too few to find more than ``start``. Many moves are made in several
    chains: half of them begin with ``start``, the others with the best so far. An interrupt ends
    it, and is raised only if no schedule was met yet.
    """
    evaluate = Evaluator(graph)
    if not evaluate.flaggable:
        return None
    search = _Search(evaluate, evaluate.flags(start), budget_nbytes, graph.seconds, seed)
    work = max(LEAST_WORK, WORK_BY_OPS * len(graph.ops))
    if moves is None:
        moves = int(min(MOST_MOVES, max(1.0, stop.work_left / work)))
        if moves < FEWEST_BY_FLAGS * len(evaluate.flaggable):
            moves = 0
    try:
        for number, most in _moves(moves, work, stop):
            nchains = max(1, most // (MOVES_BY_FLAG * len(evaluate.flaggable)))
            chain, place = divmod(nchains * number / most, 1.0)
            if chain != search.chain:
                hot = HOT if 2 * chain < nchains else REHEATED
                penalty = PENALTIES[int(nchains - chain - 1) % 2]  # the last one has the first
                search.begin(int(chain), hot, penalty)
            search.move(place)
    except KeyboardInterrupt:
        if search.best is None:
            raise
    if search.best is None:
        return None
    return mirror(graph, frozenset(int(op) for op in search.best.nonzero()[0]))


def _moves(moves: int, work: float, stop: Stop) -> Iterator[tuple[int, int]]:
    """Before each move: how many are made, and for how many in all there is time."""
    pace, number = Pace(stop, moves), 0
    while (rest := pace.left(number)) > 0:
        count = min(MOVES_BETWEEN_LOOKS_AT_THE_CLOCK, rest)
        yield from ((number + more, number + rest) for more in range(count))
        stop.spend(work * count)
        number += count


def mirrored_schedule(
    graph: TrainingGraph,
    budget_nbytes: int | None,
    *,
    match_range: int,
    stop: Stop,
    moves: int | None,
    seed: int,
) -> Schedule | None:
    """The cheapest schedule within the budget found by annealing over flags, bounded as there.

    An op that is flagged runs again just before it is first needed, as in MXNet's mirroring
    (:mod:`memplan.step.mirroring`); every step then reads the latest execution. None if nothing
    fits. Without a budget: the one with the fewest bytes.
    """
    ranged_graph = dataclasses.replace(graph, match_range=match_range)
    cuts = (
        cut
        for points in (articulation_points(graph), inner_forward(graph))
        for cut in threshold_cuts(graph, points, at_most=CUTS)
    )
    start = best_flags(ranged_graph, cuts, budget_nbytes)
    schedule = anneal(ranged_graph, start, budget_nbytes, stop=stop, moves=moves, seed=seed)
    if schedule is None:
        return None
    # MXNet never runs what no head depends on; a sequence runs every op.
    unreached_ops = sorted(set(range(len(graph.ops))).difference(schedule.ops))
    return Schedule.sequence(graph, (*schedule.ops, *unreached_ops))


def best_flags(
    graph: TrainingGraph,
    cuts: Iterable[Collection[int]],
    budget_nbytes: int | None,
    *,
    most_seconds: float = math.inf,
) -> frozenset[int]:
    """Flags that keep one of ``cuts``, or none: the cheapest within the budget.

    Where none fits, and without a budget: those of the fewest bytes. Of those that take more than
    ``most_seconds``, none is taken.
    """
    evaluate = Evaluator(graph)
    best, best_rank = frozenset[int](), (math.inf, math.inf)
    for flags in chain([best], (flags_keeping(graph, cut) for cut in cuts)):
        cost = evaluate(evaluate.flags(flags))
        rank = (max(0, cost.allocated_nbytes - (budget_nbytes or 0)), cost.seconds)
        if rank < best_rank and cost.seconds <= most_seconds:
            best, best_rank = flags, rank
    return best


def keep_more(
    graph: TrainingGraph, flags: frozenset[int], budget_nbytes: int
) -> frozenset[int] | None:
    """``flags`` without those of as many ops as fit the budget; None where all do not fit it.

    First are those that take the most time for every byte that they write. How many there is room
    for is found by halving, for searches that can afford few replays.
    """
    evaluate = Evaluator(graph)

    gain = {op: graph.ops[op].seconds / max(1, output_nbytes(graph, op)) for op in flags}
    ranked = sorted(flags, key=lambda op: (-gain[op], op))

    def fits(nkept: int) -> bool:
        cost = evaluate(evaluate.flags(ranked[nkept:]))
        return cost.allocated_nbytes <= budget_nbytes

    if not fits(0):
        return None
    most, too_many = 0, len(ranked) + 1
    while too_many - most > 1:
        middle = (most + too_many) // 2
        if fits(middle):
            most = middle
        else:
            too_many = middle
    return frozenset(ranked[most:])


class _Search:
    """The flags of now, and the best so far."""

    def __init__(
        self,
        evaluate: Evaluator,
        start: Array,
        budget_nbytes: int | None,
        unplanned_seconds: float,
        seed: int,
    ) -> None:
        self.evaluate, self.start, self.budget_nbytes = evaluate, start, budget_nbytes
        self.unplanned_seconds = unplanned_seconds
        self.random = random.Random(seed)
        self.chain, self.hot, self.penalty = -1, HOT, PENALTIES[0]
        self.current, self.cost = start, math.inf
        self.best: Array | None = None
        self.best_cost = math.inf
        self._take(start, math.inf)

    def begin(self, chain: int, hot: float, penalty: float) -> None:
        """Begin a chain: with the start if it is as hot as the first one, else with the best.

        As long as nothing fits the budget a chain goes on from the flags of the one before.
        """
        self.chain, self.hot, self.penalty = chain, hot, penalty
        first = self.current if self.best is None else self.start if hot == HOT else self.best
        self._take(first, math.inf)

    def move(self, place: float) -> None:
        """Try a random change; this part of the chain is made."""
        temperature = self.hot * (COLD / self.hot) ** place
        # A rise that is taken with probability exp(-rise / temperature) is one up to this: what
        # rises more need not be replayed to its end.
        most = self.cost - temperature * math.log(1.0 - self.random.random())
        self._take(_neighbour(self.current, self.evaluate.flaggable, self.random), most)

    def _take(self, flags: Array, most: float) -> None:
        """Make ``flags`` those of now if they cost at most this."""
        steps, seconds = self.evaluate.order(flags)
        overhead = seconds / self.unplanned_seconds - 1.0 if self.unplanned_seconds else 0.0
        enough = self._enough_nbytes(most, overhead)
        if enough < 0.0:
            return
        nbytes = self.evaluate.allocated_nbytes(steps, enough)
        if nbytes > enough:
            return
        self.current, self.cost = flags, self._cost(nbytes, overhead)
        if self.cost < self.best_cost and self._fits(nbytes):
            self.best, self.best_cost = flags, self.cost
            self._tell()

    def _fits(self, nbytes: int) -> bool:
        return self.budget_nbytes is None or nbytes <= self.budget_nbytes

    def _cost(self, nbytes: int, overhead: float) -> float:
        """What is minimised: within the budget the overhead."""
        if self.budget_nbytes is None:
            # Relative change is what counts, and a little for time, so that ties go to the cheaper.
            return math.log(max(1, nbytes)) + 0.01 * overhead
        return overhead + self.penalty * max(0.0, nbytes / max(1, self.budget_nbytes) - 1.0)

    def _enough_nbytes(self, most: float, overhead: float) -> float:
        """The bytes with which the cost is ``most``; negative if it is more in any case."""
        if self.budget_nbytes is None:
            return math.exp(min(most - 0.01 * overhead, math.log(UNLIMITED)))
        if overhead > most:
            return -1.0
        return max(1, self.budget_nbytes) * (1.0 + (most - overhead) / self.penalty)

    def _tell(self) -> None:
        if self.budget_nbytes is not None:
            seconds = (1.0 + self.best_cost) * self.unplanned_seconds
            tell("annealing", incumbent_seconds=seconds, unplanned_seconds=self.unplanned_seconds)


def _neighbour(flags: Array, candidates: tuple[int, ...], rng: random.Random) -> Array:
    """``flags`` after one random move: one op toggled, a run set alike, or a checkpoint moved."""
    result = flags.copy()
    place = int(rng.random() * len(candidates))
    op = candidates[place]
    kind = rng.random()
    if kind < 0.45:
        result[op] = not flags[op]
    elif kind < 0.75:
        for other in candidates[place : place + rng.choice((2, 3, 4, 8))]:
            result[other] = not flags[op]
    else:
        other = candidates[(place + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))) % len(candidates)]
        result[op], result[other] = flags[other], flags[op]
    return result
