"""Replays a schedule and says what it costs: bytes alive at every step, their peak, seconds.

This is the only scorer of plans: strategies return schedules and never their own figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.remember import remembered


class Arena:
    """Where tensors are placed while a schedule is replayed.

    A subclass defines ``request``, and of the other methods those that it needs.

    ``step`` is the step of the schedule that runs, ``tensor`` an index into the graph's tensors:
    together they name an output, as names need not differ and an op may run twice.
    """

    def request(self, step: int, tensor: int) -> int:
        """A buffer for ``tensor``."""
        raise NotImplementedError

    def share(self, buffer: int, step: int, tensor: int) -> None:
        """``tensor`` is written into ``buffer``, which it takes over or shares."""

    def release(self, buffer: int, step: int) -> None:
        """After ``step`` nobody needs the content of ``buffer`` any more."""

    def end_of_requests(self, step: int) -> None:
        """All outputs of ``step`` are placed; releases follow."""


def _reads(schedule: Schedule, first: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """The outputs that every step reads, and how often each output is read.

    The outputs of all steps are numbered in order; those of a step begin with ``first[step]``.
    """
    graph = schedule.graph
    ops, position = graph.ops, graph.position
    sources = [
        [first[step] + position[a] for step, a in zip(reads, ops[op].inputs, strict=True)]
        for op, reads in zip(schedule.ops, schedule.reads, strict=True)
    ]
    nreads = [0] * first[-1]
    for source in chain.from_iterable(sources):
        nreads[source] += 1
    for step, tensor in zip(schedule.heads, graph.heads, strict=True):
        nreads[first[step] + position[tensor]] += 1
    return sources, nreads


def replay(schedule: Schedule, arena: Arena) -> None:
    """Place every output of every step in ``arena``, as MXNet's executor does.

    The rules are those of MXNet's memory pass (src/nnvm/plan_memory.cc): an output takes over
    the buffer of an input that dies at the step (or shares it, where the hand-over is an alias),
    the others are requested, largest first; then the buffers whose last reader this step was are
    released, and at once those of outputs that nobody reads.
    """
    graph = schedule.graph
    ops, tensors, placements = graph.ops, graph.tensors, graph.placements
    first = [0, *accumulate(len(ops[op].outputs) for op in schedule.ops)]
    sources, nreads = _reads(schedule, first)
    buffer_of = [-1] * first[-1]
    users: dict[int, int] = {}
    for step, index in enumerate(schedule.ops):
        op, base, sources_of_step = ops[index], first[step], sources[step]
        if op.handovers:
            source_places = set()
            for source_place, place, alias in op.handovers:
                buffer = buffer_of[sources_of_step[source_place]]
                output = base + place
                if (
                    buffer >= 0
                    and buffer_of[output] < 0
                    and nreads[output]
                    and source_place not in source_places
                    and (alias or users[buffer] == 1)
                    and tensors[op.outputs[place]].nelements
                ):
                    source_places.add(source_place)
                    buffer_of[output] = buffer
                    users[buffer] += nreads[output]
                    arena.share(buffer, step, op.outputs[place])
        for place in placements[index]:
            if buffer_of[base + place] < 0:
                buffer = arena.request(step, op.outputs[place])
                buffer_of[base + place] = buffer
                users[buffer] = nreads[base + place]
        arena.end_of_requests(step)
        for source in sources_of_step:
            buffer = buffer_of[source]
            if buffer >= 0:
                users[buffer] -= 1
                if users[buffer] == 0:
                    arena.release(buffer, step)
        for output in range(base, first[step + 1]):
            if not nreads[output] and buffer_of[output] >= 0:
                arena.release(buffer_of[output], step)


@dataclass(frozen=True)
class Timeline:
    """What a schedule costs: ``live_nbytes[s]`` bytes are alive while step s runs."""

    live_nbytes: tuple[int, ...]
    seconds: float

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive at any step (0 for an empty schedule)."""
        return max(self.live_nbytes, default=0)

    @property
    def peak_step(self) -> int:
        """The first step at which the peak is reached."""
        return self.live_nbytes.index(self.peak_nbytes)


class _LiveBytes(Arena):
    """Unlimited perfectly fitting buffers: counts the bytes alive.

    A hand-over adds none: both sides have the same size.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.tensors = graph.tensors
        self.sizes: list[int] = []
        self.live = 0
        self.at_step: list[int] = []

    def request(self, step: int, tensor: int) -> int:
        self.sizes.append(self.tensors[tensor].nbytes)
        self.live += self.sizes[-1]
        return len(self.sizes) - 1

    def release(self, buffer: int, step: int) -> None:
        self.live -= self.sizes[buffer]

    def end_of_requests(self, step: int) -> None:
        self.at_step.append(self.live)


def simulate(schedule: Schedule) -> Timeline:
    """The bytes alive at every step of ``schedule``, hand-overs taken, and its seconds."""
    return remembered(schedule, simulate, lambda: _simulated(schedule))


def _simulated(schedule: Schedule) -> Timeline:
    arena = _LiveBytes(schedule.graph)
    replay(schedule, arena)
    return Timeline(tuple(arena.at_step), schedule.seconds)
