"""The temporary space of MXNet's executor, replayed on a schedule.

A library computes some ops beside the place where they are to write over what they read, and some
beside the place of an output that nobody reads. Both depend on the schedule: where an op reads a
recomputed input and another one the first, that dies at other ops than in the unplanned step, and
some ops run again for the order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memplan.step.liveness import readers
from memplan.step.schedule import Schedule
from memplan.step.simulate import Arena, replay
from memplan.util.remember import remembered


class Temporary(NamedTuple):
    """Op by op, the bytes that a step takes more if one of its runs is computed so (none: nothing).

    ``overwriting``: where it writes its first output over what it reads; ``unread``: where nobody
    reads that. The largest counts, for the runs of a step have the same space in turn; that some
    have memory beside it is left out.
    """

    overwriting: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()


NOTHING = Temporary()


def further_space(schedule: Schedule, temporary: Temporary) -> int:
    """The bytes of temporary space for ``schedule`` beyond those of the unplanned step.

    Where a schedule needs less, none count: bounds hold for every schedule with the space of the
    unplanned step.
    """
    if not any(map(any, temporary)):
        return 0
    unplanned = Schedule.unplanned(schedule.graph)
    return max(0, space_nbytes(schedule, temporary) - space_nbytes(unplanned, temporary))


def space_nbytes(schedule: Schedule, temporary: Temporary) -> int:
    """The most that a run of ``schedule`` takes."""
    key = (space_nbytes, temporary)
    return remembered(schedule, key, lambda: _space_nbytes(schedule, temporary))


def _space_nbytes(schedule: Schedule, temporary: Temporary) -> int:
    most = _of_unread(schedule, temporary.unread)
    if max(temporary.overwriting, default=0) <= most:
        return most
    arena = _Overwritten(schedule, temporary.overwriting)
    replay(schedule, arena)
    return max(most, arena.nbytes)


def _of_unread(schedule: Schedule, nbytes: Sequence[int]) -> int:
    """The most that a run takes whose first output nobody reads."""
    if not any(nbytes):
        return 0
    ops, read_at, runs = schedule.graph.ops, readers(schedule), enumerate(schedule.ops)
    return max((nbytes[op] for s, op in runs if (s, ops[op].outputs[0]) not in read_at), default=0)


class _Overwritten(Arena):
    """The most that a run takes that writes its first output over what it reads."""

    def __init__(self, schedule: Schedule, nbytes_of_op: Sequence[int]) -> None:
        self.schedule, self.nbytes_of_op = schedule, nbytes_of_op
        self.nbuffers = self.nbytes = 0

    def request(self, step: int, tensor: int) -> int:
        self.nbuffers += 1
        return self.nbuffers

    def share(self, buffer: int, step: int, tensor: int) -> None:
        op = self.schedule.ops[step]
        if tensor == self.schedule.graph.ops[op].outputs[0]:
            self.nbytes = max(self.nbytes, self.nbytes_of_op[op])
