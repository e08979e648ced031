"""Simulated annealing over sets of flags, with the memory that MXNet really allocates.

What MXNet allocates depends on the order in which blocks of many sizes come free, which no linear
constraint describes; replaying its allocator takes milliseconds, so it is simply tried.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from memplan.search.kernels.arrays import Array
from memplan.search.kernels.mirroring import Cost, Evaluator
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

# Cost is overhead (extra seconds / unplanned seconds) plus this for every 100% over the budget.
PENALTY = 1.0
# Temperatures, in units of that cost, from the first to the last step.
HOT, COLD = 0.01, 0.0001

MOVES_BETWEEN_LOOKS_AT_THE_CLOCK = 16

# How many segmentations are tried for each kind of points to cut at.
CUTS = 24

# What a move costs in work: so much for every op, as the step is replayed, and this at least.
# Measured on the zoo's ResNet-50.
WORK_BY_OPS, LEAST_WORK = 0.055, 20.0
# With fewer moves for every flag than this, annealing finds hardly anything. Set on memonger's LSTM
# over 100 steps, where half as many found nothing cheaper than a cut.
FEWEST_BY_FLAGS = 1.0
# Where neither moves nor work are bounded.
MOST_MOVES = 1 << 40


@functools.cache
def compile_annealing() -> None:
    """Compile, or load what was compiled before: once in a process, and not in anybody's time."""
    forward = Op("warm", "op", (), (0,), 1.0)
    backward = Op("back", "op", (0,), (1,), 1.0, differentiates=0)
    tensors = (Tensor("warm", 4, 1), Tensor("back", 4, 1))
    graph = TrainingGraph((forward, backward), tensors, (0, 1), 1)
    anneal(graph, frozenset(), 0, seconds=1e6, moves=1)


def anneal(
    graph: TrainingGraph,
    start: frozenset[int],
    budget_nbytes: int | None,
    *,
    seconds: float | Stop,
    moves: int | None = None,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest mirrored schedule met whose blocks fit the budget, or None if none did.

    Without a budget: the one with the fewest bytes. Makes this many ``moves`` in at most
    ``seconds``: the same seed gives the same schedule, unless the clock has hurried it, which a
    stop says. Without ``moves`` it makes as many as the stop has work for, or takes all of the
    time; none where those are too few to find more than ``start``. An interrupt ends it, and is
    raised only if no schedule was met yet.
    """
    stop = seconds if isinstance(seconds, Stop) else Stop.after(seconds)
    evaluate = Evaluator(graph)
    if not evaluate.flaggable:
        return None
    search = _Search(evaluate, start, budget_nbytes, graph.seconds, seed)
    work = max(LEAST_WORK, WORK_BY_OPS * len(graph.ops))
    if moves is None:
        moves = int(min(MOST_MOVES, max(1.0, stop.work_left / work)))
        if moves < FEWEST_BY_FLAGS * len(evaluate.flaggable):
            moves = 0
    try:
        for temperature in _temperatures(moves, work, stop):
            search.move(temperature)
    except KeyboardInterrupt:
        if search.best is None:
            raise
    if search.best is None:
        return None
    return mirror(graph, frozenset(int(op) for op in search.best.nonzero()[0]))


def _temperatures(moves: int, work: float, stop: Stop) -> Iterator[float]:
    """The temperature of each move: it falls with the moves that there is time for."""
    pace, made = Pace(stop, moves), 0
    while (left := pace.left(made)) > 0:
        temperature = HOT * (COLD / HOT) ** (made / (made + left))
        count = min(MOVES_BETWEEN_LOOKS_AT_THE_CLOCK, left)
        yield from itertools.repeat(temperature, count)
        stop.spend(work * count)
        made += count


def mirrored_schedule(
    graph: TrainingGraph,
    budget_nbytes: int | None,
    *,
    match_range: int,
    seconds: float | Stop,
    moves: int | None = None,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest schedule within the budget found by annealing over flags, bounded as there.

    An op that is flagged runs again just before it is first needed, as in MXNet's mirroring
    (:mod:`memplan.step.mirroring`); every step then reads the latest execution. None if nothing
    fits. Without a budget: the one with the fewest bytes.
    """
    placed = dataclasses.replace(graph, match_range=match_range)
    cuts = (
        cut
        for points in (articulation_points(graph), inner_forward(graph))
        for cut in threshold_cuts(graph, points, at_most=CUTS)
    )
    start = best_flags(placed, cuts, budget_nbytes)
    found = anneal(placed, start, budget_nbytes, seconds=seconds, moves=moves, seed=seed)
    return None if found is None else Schedule.sequence(graph, found.ops)


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

    def gain(op: int) -> float:
        return graph.ops[op].seconds / max(1, output_nbytes(graph, op))

    ranked = sorted(flags, key=lambda op: (-gain(op), op))

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
        start: frozenset[int],
        budget_nbytes: int | None,
        unplanned_seconds: float,
        seed: int,
    ) -> None:
        self.evaluate, self.budget_nbytes = evaluate, budget_nbytes
        self.unplanned_seconds = unplanned_seconds
        self.random = random.Random(seed)
        self.current = evaluate.flags(start)
        self.cost, fits = self._cost(self.current)
        self.best: Array | None = self.current if fits else None
        self.best_cost = self.cost if fits else math.inf

    def _cost(self, flags: Array) -> tuple[float, bool]:
        return _cost(self.evaluate(flags), self.unplanned_seconds, self.budget_nbytes)

    def move(self, temperature: float) -> None:
        """Try a random change."""
        other = _neighbour(self.current, self.evaluate.flaggable, self.random)
        cost, fits = self._cost(other)
        if fits and cost < self.best_cost:
            self.best, self.best_cost = other, cost
            self._tell()
        if cost <= self.cost or self.random.random() < math.exp((self.cost - cost) / temperature):
            self.current, self.cost = other, cost

    def _tell(self) -> None:
        if self.budget_nbytes is not None:
            # Within the budget the cost is the overhead.
            seconds = (1.0 + self.best_cost) * self.unplanned_seconds
            tell("annealing", incumbent_seconds=seconds, unplanned_seconds=self.unplanned_seconds)


def _cost(cost: Cost, unplanned_seconds: float, budget_nbytes: int | None) -> tuple[float, bool]:
    """What annealing minimises, and whether the budget is kept."""
    overhead = cost.seconds / unplanned_seconds - 1.0 if unplanned_seconds else 0.0
    if budget_nbytes is None:
        # Relative change is what counts, and a little for time, so that ties go to the cheaper.
        return math.log(max(1, cost.allocated_nbytes)) + 0.01 * overhead, True
    over = max(0.0, cost.allocated_nbytes / max(1, budget_nbytes) - 1.0)
    return overhead + PENALTY * over, over == 0.0


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
