"""A schedule as MXNet can run it: without what nobody reads, with anchors and gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.errors import ScheduleError
from memplan.memory.memory import Memory
from memplan.memory.packing import Packing
from memplan.step.graph import UPDATE, Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.remember import remembered

# What an op of a lowered graph is: one of the graph that was planned, its gate, or its anchor.
OP, GATE, ANCHOR = "op", "gate", "anchor"


@dataclass(frozen=True)
class Gate:
    """A copy of an input of an op, which the op reads in its place.

    ``copied`` is that input's place among the op's inputs, or None for a variable, which is none of
    them: then the copy becomes the first.
    """

    copied: int | None
    nbytes: int
    nelements: int


@dataclass(frozen=True)
class Additions:
    """What MXNet needs beside the ops of a graph, by their numbers.

    ``ndims`` are those of the first output of every op. ``gates`` are those of some ops.
    ``updated`` names the parameter of every update, and ``read`` the parameters among these that
    an op or a gate reads.
    """

    ndims: tuple[int, ...]
    gates: Mapping[int, Gate] = field(default_factory=dict)
    updated: Mapping[int, str] = field(default_factory=dict)
    read: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowered:
    """A schedule with anchors and gates; ``origins[i]`` tells what op i of its graph is."""

    schedule: Schedule
    origins: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class LoweredMemory(Memory):
    """The bytes in ``memory`` of what MXNet gets for a schedule, anchors and gates included."""

    additions: Additions
    memory: Memory

    @property
    def match_ranges(self) -> tuple[int, ...]:
        return self.memory.match_ranges

    def nbytes(self, schedule: Schedule) -> int:
        return self.memory.nbytes(self._lowered(schedule))

    def at_least(self, schedule: Schedule) -> int:
        return self.memory.at_least(self._lowered(schedule))

    def excess(self, schedule: Schedule, budget_nbytes: int) -> int:
        return self.memory.excess(self._lowered(schedule), budget_nbytes)

    def packing(self, schedule: Schedule) -> Packing | None:
        return self.memory.packing(self._lowered(schedule))

    def _lowered(self, schedule: Schedule) -> Schedule:
        """``schedule`` as MXNet gets it: one object, with which its packing is remembered."""
        # Kept with the additions themselves, so that no others ever have their id.
        found: tuple[Additions, Schedule] = remembered(
            schedule,
            (LoweredMemory, id(self.additions)),
            lambda: (self.additions, lowered(self.additions, schedule).schedule),
        )
        return found[1]


def lowered(additions: Additions, schedule: Schedule) -> Lowered:
    """``schedule`` with what MXNet needs, and without copies that nobody reads.

    Some ops abort where nobody reads their outputs, and some kernels skip the other outputs where
    nobody reads the first: an anchor, which asks for its shape, reads it. An op that MXNet takes
    for a backward op, although it is none, can have no control dependencies: it gets a gate, a
    copy of one of its inputs, that has them. Updates of parameters are put where they may run.

    Raises ScheduleError for the schedule of another graph.
    """
    if len(schedule.graph.ops) != len(additions.ndims):
        raise ScheduleError("the schedule belongs to another graph than the trace")
    kept = _read_steps(schedule)
    anchored = set(_anchored(schedule, kept))
    if len(kept) == len(schedule.ops) and not anchored and not additions.gates:
        origins = tuple((OP, op) for op in range(len(schedule.graph.ops)))
        return _with_updates_in_place(additions, Lowered(schedule, origins))
    graph = _Extended(schedule.graph)
    for op, gate in additions.gates.items():
        graph.add_gate(op, gate)
    for op in sorted({schedule.ops[step] for step in anchored}):
        graph.add_anchor(op, additions.ndims[op])
    return _with_updates_in_place(additions, graph.lowered(schedule, kept, anchored))


def _with_updates_in_place(additions: Additions, made: Lowered) -> Lowered:
    """``made`` with every update as soon as it may run, wherever the schedule has it.

    That is behind the last step that reads the parameter, recomputed ones included: what a schedule
    counts as one op may run again, and would read the new values. And it is behind the last step
    that reads this gradient, for an optimizer may write into it.
    """
    schedule, ops = made.schedule, made.schedule.graph.ops
    updates = [step for step, op in enumerate(schedule.ops) if ops[op].kind == UPDATE]
    if not updates:
        return made
    last_read: dict[object, int] = {}
    for step, (op, reads) in enumerate(zip(schedule.ops, schedule.reads, strict=True)):
        if ops[op].kind != UPDATE:
            last_read.update((name, step) for name in additions.read.get(made.origins[op], ()))
            last_read.update((entry, step) for entry in zip(reads, ops[op].inputs, strict=True))
    behind: dict[int, list[int]] = {}
    for step in updates:
        op = schedule.ops[step]
        [source], [tensor] = schedule.reads[step], ops[op].inputs
        weight = additions.updated[made.origins[op][1]]
        place = max(source, last_read.get(weight, 0), last_read.get((source, tensor), 0))
        behind.setdefault(place, []).append(step)
    order: list[int] = []
    for step, op in enumerate(schedule.ops):
        if ops[op].kind != UPDATE:
            order += [step, *behind.get(step, ())]
    place_of = {step: place for place, step in enumerate(order)}
    return dataclasses.replace(
        made,
        schedule=Schedule(
            schedule.graph,
            tuple(schedule.ops[step] for step in order),
            tuple(tuple(place_of[s] for s in schedule.reads[step]) for step in order),
            tuple(place_of[step] for step in schedule.heads),
        ),
    )


def _read_steps(schedule: Schedule) -> list[int]:
    """The steps but for those of repeated ops whose outputs nobody reads and nobody awaits."""
    left = [0] * len(schedule.graph.ops)
    for op in schedule.ops:
        left[op] += 1
    read = set(schedule.heads)
    awaited: set[int] = set()
    kept = []
    for step in reversed(range(len(schedule.ops))):
        op = schedule.ops[step]
        if step in read or left[op] == 1 or (op in awaited and step == schedule.first_run[op]):
            read.update(schedule.reads[step])
            awaited.discard(op)
            awaited.update(schedule.graph.ops[op].after)
            kept.append(step)
        else:
            left[op] -= 1
    return kept[::-1]


def _anchored(schedule: Schedule, kept: Iterable[int]) -> Iterator[int]:
    """The steps whose first output is not read, although the unplanned step reads it."""
    graph, heads = schedule.graph, set(schedule.graph.heads)
    read = set(zip(schedule.heads, graph.heads, strict=True))
    for step in kept:
        read.update(zip(schedule.reads[step], graph.ops[schedule.ops[step]].inputs, strict=True))
    for step in kept:
        first = graph.ops[schedule.ops[step]].outputs[0]
        if (step, first) not in read and (graph.readers[first] or first in heads):
            yield step


class _Extended:
    """A graph to which gates and anchors are added."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.tensors = list(graph.tensors)
        self.gates: dict[int, Op] = {}
        self.gated: dict[int, Op] = {}
        self.anchors: dict[int, Op] = {}

    def _tensor(self, name: str, nbytes: int, nelements: int) -> int:
        self.tensors.append(Tensor(name, nbytes, nelements))
        return len(self.tensors) - 1

    def add_gate(self, index: int, added: Gate) -> None:
        op = self.graph.ops[index]
        name = f"{op.name}_gate"
        written = self._tensor(f"{name}[0]", added.nbytes, added.nelements)
        read = list(op.inputs)
        gate = Op(name, "_copy", (), (written,))
        if added.copied is None:
            read.insert(0, written)
        else:
            shared = (Handover(0, 0, alias=True),)
            gate = dataclasses.replace(gate, inputs=(read[added.copied],), handovers=shared)
            read[added.copied] = written
        self.gates[index] = gate
        self.gated[index] = dataclasses.replace(op, inputs=tuple(read))

    def add_anchor(self, index: int, ndim: int) -> None:
        op = self.graph.ops[index]
        name = f"{op.name}_anchor"
        written = self._tensor(f"{name}[0]", 8 * ndim, ndim)
        self.anchors[index] = Op(name, "shape_array", op.outputs[:1], (written,))

    def lowered(self, schedule: Schedule, kept: Sequence[int], anchored: set[int]) -> Lowered:
        found: list[Op] = []
        origins: list[tuple[str, int]] = []
        index_of: dict[int, int] = {}
        for index, op in enumerate(self.graph.ops):
            if index in self.gates:
                found.append(self.gates[index])
                origins.append((GATE, index))
            index_of[index] = len(found)
            found.append(self.gated.get(index, op))
            origins.append((OP, index))
        found = [op.renumbered(index_of) for op in found]
        anchor_of = {index: len(found) + i for i, index in enumerate(self.anchors)}
        found += self.anchors.values()
        origins += [(ANCHOR, index) for index in self.anchors]
        graph = dataclasses.replace(
            self.graph,
            ops=tuple(found),
            tensors=tuple(self.tensors),
            nforward=self.graph.nforward + sum(op < self.graph.nforward for op in self.gates),
        )
        ops: list[int] = []
        reads: list[tuple[int, ...]] = []
        step_of: dict[int, int] = {}
        for step in kept:
            index = schedule.ops[step]
            sources = [step_of[source] for source in schedule.reads[step]]
            if index in self.gates:
                gate = self.gates[index]
                place = self.gated[index].inputs.index(gate.outputs[0])
                read = slice(place, place + len(gate.inputs))
                reads.append(tuple(sources[read]))
                sources[read] = [len(ops)]
                ops.append(index_of[index] - 1)
            ops.append(index_of[index])
            reads.append(tuple(sources))
            step_of[step] = len(ops) - 1
            if step in anchored:
                ops.append(anchor_of[index])
                reads.append((step_of[step],))
        heads = tuple(step_of[step] for step in schedule.heads)
        return Lowered(Schedule(graph, tuple(ops), tuple(reads), heads), tuple(origins))
