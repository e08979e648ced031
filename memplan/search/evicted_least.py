"""The least memory that dropping at the peaks reaches."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.search.eviction import Evictions
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

# The least memory is looked for until this share of it is all that is open. A schedule that takes
# too many seconds is improved until this many attempts, over the number of ops, found nothing, from
# the fewest to the most. Set on ResNet-50 and memonger's ResNet.
NEAR = 0.002
PATIENCE_BY_OPS, FEWEST, MOST = 36_000, 20, 100


def evicted_least(
    graph: TrainingGraph, stop: Stop, *, most_seconds: float | None = None
) -> Schedule:
    """The least memory found in at most these seconds a step (None: one extra forward pass)."""
    for schedule in _lower_and_lower(graph, stop, most_seconds=most_seconds):
        best = schedule
    return best


def evicted_least_or_end(graph: TrainingGraph, stop: Stop, *, most_seconds: float) -> Schedule:
    """As :func:`evicted_least`; an interrupt ends it, and ``stop``, with the least so far."""
    best = Schedule.unplanned(graph)
    try:
        for schedule in _lower_and_lower(graph, stop, most_seconds=most_seconds):
            best = schedule
    except KeyboardInterrupt:
        stop.end()
    return best


def _lower_and_lower(
    graph: TrainingGraph, stop: Stop, *, most_seconds: float | None
) -> Iterator[Schedule]:
    """The unplanned schedule, and as they are found those of less memory: :func:`evicted_least`."""
    if most_seconds is None:
        most_seconds = graph.seconds + graph.forward_seconds
    unplanned = Schedule.unplanned(graph)
    yield unplanned
    low, high = 0, simulate(unplanned).peak_nbytes
    evictions = Evictions(graph, high)
    patience = max(FEWEST, min(MOST, PATIENCE_BY_OPS // max(1, len(graph.ops))))
    while high - low > max(1.0, NEAR * high) and not stop.is_over():
        middle = (low + high) // 2
        search = evictions.within(middle)
        best_fit = search.fit((), stop)
        if best_fit is not None and best_fit.schedule.seconds > most_seconds:
            best_fit = search.improve(best_fit, stop, patience=patience)
        if best_fit is None or best_fit.schedule.seconds > most_seconds:
            low = middle
        else:
            yield best_fit.schedule
            high = simulate(best_fit.schedule).peak_nbytes
