"""Random valid schedules."""

from __future__ import annotations

import random

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule


def random_order(graph: TrainingGraph, rng: random.Random) -> list[int]:
    """Every op once, in a random order that respects all dependencies."""
    missing = [len(set(needed)) for needed in graph.dependencies]
    ready = [op for op, count in enumerate(missing) if not count]
    order = []
    while ready:
        # Mostly the op that became ready last: backward and forward ops alternate in places.
        place = len(ready) - 1 if rng.random() < 0.6 else rng.randrange(len(ready))
        op = ready.pop(place)
        order.append(op)
        for other in graph.followers[op]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return order


def random_schedule(graph: TrainingGraph, seed: int, *, repeated: float = 0.5) -> Schedule:
    """A random order in which about ``repeated`` of the repeatable ops run again, some twice."""
    rng = random.Random(seed)
    steps = random_order(graph, rng)
    again = [op for op in range(len(graph.ops)) if graph.ops[op].recomputable]
    again = [op for op in again if rng.random() < repeated]
    for op in again + rng.sample(again, len(again) // 5):
        first = steps.index(op)
        steps.insert(rng.randint(first + 1, len(steps)), op)
    return Schedule.sequence(graph, steps)
