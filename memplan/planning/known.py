"""Schedules that this process has made of a graph, so that a refusal names no more than they take.

What another process says of the same network cannot depend on them: they count only where a search
ends with more bytes, and a refusal says so then.
"""

from __future__ import annotations

import threading
from typing import Any

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule

# Of so many graphs, those of the last plans, so many schedules of the fewest bytes are kept: on a
# network of 10,000 ops each takes some megabytes.
GRAPHS, SCHEDULES = 2, 3

_KNOWN: dict[Any, tuple[tuple[int, float, Schedule], ...]] = {}
_LOCK = threading.Lock()


def remember(schedule: Schedule, nbytes: int) -> None:
    """``schedule`` is known to the next jobs of such a graph; MXNet allocates ``nbytes`` for it."""
    key, seconds = _unnamed(schedule.graph), schedule.seconds
    with _LOCK:
        others = _KNOWN.pop(key, ())
        if not any(n <= nbytes and s <= seconds for n, s, _ in others):
            others = tuple(entry for entry in others if entry[0] < nbytes or entry[1] < seconds)
            others = tuple(sorted((*others, (nbytes, seconds, schedule)), key=lambda e: e[:2]))
        _KNOWN[key] = others[:SCHEDULES]  # the last key now
        if len(_KNOWN) > GRAPHS:
            del _KNOWN[next(iter(_KNOWN))]


def known(graph: TrainingGraph) -> tuple[Schedule, ...]:
    """The schedules that are remembered of a graph like this one, whatever its names and costs."""
    if not _KNOWN:
        return ()
    with _LOCK:
        schedules = [schedule for _, _, schedule in _KNOWN.get(_unnamed(graph), ())]
    return tuple(Schedule.trusted(graph, s.ops, s.reads, s.heads) for s in schedules)


def forget() -> None:
    """Forget all schedules, for tests that are not to depend on each other."""
    with _LOCK:
        _KNOWN.clear()


def _unnamed(graph: TrainingGraph) -> Any:
    """What a schedule of ``graph`` depends on."""
    ops = (
        (op.kind, op.inputs, op.outputs, op.after, op.handovers, op.recomputable)
        for op in graph.ops
    )
    return (*ops, *(tensor.nbytes for tensor in graph.tensors), *graph.heads, graph.nforward)
