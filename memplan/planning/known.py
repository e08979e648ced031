"""Schedules that this process has made of a graph, so that a refusal names no more than they take.

What another process says of the same network cannot depend on them: they count only where a search
ends with more bytes, and a refusal says so then.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from memplan.planning.cache import digest
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.base import MOST_OVERHEAD

# Of this many graphs, those of the last plans, this many schedules of the fewest bytes are kept
# within the usual overhead, and as many beyond it: on a network of 10,000 ops each takes some
# megabytes.
GRAPHS, SCHEDULES = 2, 3


class _Known(NamedTuple):
    """A schedule without its graph, and what it takes, by the costs that it was made by."""

    nbytes: int
    overhead: float
    ops: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]


_KNOWN: dict[str, list[_Known]] = {}
_LOCK = threading.Lock()


def remember(schedule: Schedule, nbytes: int) -> None:
    """``schedule`` is known to the next jobs of such a graph; MXNet allocates ``nbytes`` for it.

    It stands beside schedules made by other costs: their overheads can be compared, and no seconds.
    """
    key = _unnamed(schedule.graph)
    new = _Known(nbytes, schedule.overhead, schedule.ops, schedule.reads, schedule.heads)
    with _LOCK:
        others = _KNOWN.pop(key, [])
        if not any(old.nbytes <= nbytes and old.overhead <= new.overhead for old in others):
            others = [old for old in others if old.nbytes < nbytes or old.overhead < new.overhead]
            others = sorted([*others, new], key=lambda old: (old.nbytes, old.overhead))
        usual = [old for old in others if old.overhead <= MOST_OVERHEAD]
        beyond = [old for old in others if old.overhead > MOST_OVERHEAD]
        _KNOWN[key] = usual[:SCHEDULES] + beyond[:SCHEDULES]  # the last key now
        if len(_KNOWN) > GRAPHS:
            del _KNOWN[next(iter(_KNOWN))]


def known(graph: TrainingGraph) -> tuple[Schedule, ...]:
    """The schedules that are remembered of a graph like this one, whatever its names and costs."""
    if not _KNOWN:
        return ()
    with _LOCK:
        found = _KNOWN.get(_unnamed(graph), [])
    return tuple(Schedule.trusted(graph, old.ops, old.reads, old.heads) for old in found)


def _unnamed(graph: TrainingGraph) -> str:
    """Tells apart what a schedule of ``graph`` depends on, in few bytes."""
    ops = tuple(
        (op.kind, op.inputs, op.outputs, op.after, op.handovers, op.recomputable)
        for op in graph.ops
    )
    sizes = tuple(tensor.nbytes for tensor in graph.tensors)
    return digest(repr((ops, sizes, graph.heads, graph.nforward)))
