"""Simulated annealing over sets of flags, with the memory that MXNet really allocates.

What MXNet allocates depends on the order in which blocks of many sizes come free, which no linear
constraint describes; replaying its allocator takes milliseconds, so it is simply tried.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from memplan.allocator import allocate
from memplan.graph import TrainingGraph
from memplan.mirroring import flaggable, mirror
from memplan.schedule import Schedule

# Cost is overhead (extra seconds / unplanned seconds) plus this for every 100% over the budget.
PENALTY = 2.0
# Temperatures, in units of that cost, from the first to the last step.
HOT, COLD = 0.01, 0.0003


@dataclass(frozen=True)
class _Evaluated:
    """A set of flags and what it costs; ``cost`` is the annealing's, ``fits`` the budget's word."""

    flags: frozenset[int]
    schedule: Schedule
    nbytes: int
    cost: float
    fits: bool


def anneal(
    graph: TrainingGraph,
    start: frozenset[int],
    budget_nbytes: int | None,
    *,
    seconds: float,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest mirrored schedule met whose blocks fit the budget, or None if none did.

    Without a budget: the one with the fewest bytes. Runs for about ``seconds``.
    """
    candidates = flaggable(graph)
    if not candidates:
        return None
    rng = random.Random(seed)
    begin = time.monotonic()
    current = _evaluate(graph, start & frozenset(candidates), budget_nbytes)
    best = current if current.fits else None
    while (elapsed := time.monotonic() - begin) < seconds:
        temperature = HOT * (COLD / HOT) ** (elapsed / seconds)
        flags = _neighbour(current.flags, candidates, rng)
        if flags is None:
            continue
        other = _evaluate(graph, flags, budget_nbytes)
        if other.fits and (best is None or other.cost < best.cost):
            best = other
        if other.cost <= current.cost or rng.random() < math.exp(
            (current.cost - other.cost) / temperature
        ):
            current = other
    return None if best is None else best.schedule


def _evaluate(graph: TrainingGraph, flags: frozenset[int], budget_nbytes: int | None) -> _Evaluated:
    schedule = mirror(graph, flags)
    nbytes = allocate(schedule).nbytes
    if budget_nbytes is None:
        # Relative change is what counts, and a little for time, so that ties go to the cheaper.
        cost = math.log(max(1, nbytes)) + 0.01 * schedule.overhead
        return _Evaluated(flags, schedule, nbytes, cost, True)
    over = max(0.0, nbytes / max(1, budget_nbytes) - 1.0)
    return _Evaluated(flags, schedule, nbytes, schedule.overhead + PENALTY * over, over == 0.0)


def _neighbour(
    flags: frozenset[int], candidates: tuple[int, ...], rng: random.Random
) -> frozenset[int] | None:
    """``flags`` after one random move: one op toggled, a run set alike, or a checkpoint moved."""
    place = rng.randrange(len(candidates))
    op = candidates[place]
    kind = rng.random()
    if kind < 0.45:
        return flags ^ {op}
    if kind < 0.75:
        run = candidates[place : place + rng.choice((2, 3, 4, 8))]
        return flags.difference(run) if op in flags else flags.union(run)
    other = place + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))
    if not 0 <= other < len(candidates) or (op in flags) == (candidates[other] in flags):
        return None
    return flags ^ {op, candidates[other]}
