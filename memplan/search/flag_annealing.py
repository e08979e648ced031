"""Simulated annealing over sets of flags, with the memory that MXNet really allocates.

What MXNet allocates depends on the order in which blocks of many sizes come free, which no linear
constraint describes; replaying its allocator takes milliseconds, so it is simply tried.
"""

from __future__ import annotations

import math
import random
import time

from memplan.search.kernels.flags import Array, Cost, Evaluator
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule
from memplan.util.progress import tell

# Cost is overhead (extra seconds / unplanned seconds) plus this for every 100% over the budget.
PENALTY = 1.0
# Temperatures, in units of that cost, from the first to the last step.
HOT, COLD = 0.01, 0.0001

MOVES_BETWEEN_LOOKS_AT_THE_CLOCK = 16


def anneal(
    graph: TrainingGraph,
    start: frozenset[int],
    budget_nbytes: int | None,
    *,
    seconds: float,
    seed: int = 0,
) -> Schedule | None:
    """The cheapest mirrored schedule met whose blocks fit the budget, or None if none did.

    Without a budget: the one with the fewest bytes. Runs for about ``seconds``, or until an
    interrupt, which is raised only if none was met yet.
    """
    evaluate = Evaluator(graph)
    candidates = evaluate.flaggable
    if not candidates:
        return None
    rng = random.Random(seed)
    begin = time.monotonic()
    current = evaluate.flags(start)
    cost, fits = _cost(evaluate(current), graph.seconds, budget_nbytes)
    best, best_cost = (current, cost) if fits else (None, math.inf)
    try:
        while (elapsed := time.monotonic() - begin) < seconds:
            temperature = HOT * (COLD / HOT) ** (elapsed / seconds)
            for _ in range(MOVES_BETWEEN_LOOKS_AT_THE_CLOCK):
                other = _neighbour(current, candidates, rng)
                other_cost, fits = _cost(evaluate(other), graph.seconds, budget_nbytes)
                if fits and other_cost < best_cost:
                    best, best_cost = other, other_cost
                if other_cost <= cost or rng.random() < math.exp((cost - other_cost) / temperature):
                    current, cost = other, other_cost
            if budget_nbytes is not None and best is not None:
                # Within the budget the cost is the overhead.
                found = (1.0 + best_cost) * graph.seconds
                tell("annealing", incumbent_seconds=found, unplanned_seconds=graph.seconds)
    except KeyboardInterrupt:
        if best is None:
            raise
    if best is None:
        return None
    return mirror(graph, frozenset(int(op) for op in best.nonzero()[0]))


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
