"""What MXNet needs beside the ops of a schedule: anchors, gates and readers, and no unread ops.

Their bytes are all that a search has to know: :mod:`memplan.mxnet.realise.lowering` has the nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memplan.errors import ScheduleError
from memplan.memory.memory import Memory
from memplan.memory.packing import Packing
from memplan.step.graph import UPDATE, Handover, Op, Tensor, TrainingGraph
from memplan.step.liveness import readers
from memplan.step.schedule import Schedule, without_unread
from memplan.util.remember import remembered

# What an op of a graph with additions is: one of the graph that was planned, its gate, or its
# anchor. Or what reads a tensor once more.
OP, GATE, ANCHOR, READER = "op", "gate", "anchor", "reader"


@dataclass(frozen=True)
class Gate:
    """A copy of an input of an op, which the op reads in its place.

    ``place`` is that input's place among the op's inputs, or None for a variable, which is none of
    them: then the copy becomes the first.
    """

    place: int | None
    nbytes: int
    nelements: int


@dataclass(frozen=True)
class Reader:
    """An op that reads a tensor right behind others, which so write over none of it.

    It is of this ``kind``; ``nbytes`` and ``nelements`` are what it writes.
    """

    kind: str
    nbytes: int
    nelements: int


@dataclass(frozen=True)
class Additions:
    """What MXNet needs beside the ops of a graph, by their numbers.

    ``ndims`` are those of the first output of every op. ``gates`` are those of some ops.
    ``must_be_read`` are ops whose first output must have a reader, be it unread in the unplanned
    step, too. ``kept`` are the tensors that some ops must not write over, and ``readers`` those of
    these tensors. ``weight_of`` names the parameter of every update, and ``weights_read`` the
    parameters among these that an op or a gate reads.
    """

    ndims: tuple[int, ...]
    gates: Mapping[int, Gate] = field(default_factory=dict)
    must_be_read: frozenset[int] = frozenset()
    kept: Mapping[int, Sequence[int]] = field(default_factory=dict)
    readers: Mapping[int, Reader] = field(default_factory=dict)
    weight_of: Mapping[int, str] = field(default_factory=dict)
    weights_read: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class WithAdditions:
    """A schedule with anchors, gates and readers; ``origins[i]`` tells what op i of its graph is.

    The number there is that of the op, and of a reader that of the tensor.
    """

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

    def executed(self, schedule: Schedule) -> Schedule:
        return without_unread(schedule)

    def nbytes(self, schedule: Schedule) -> int:
        return self.memory.nbytes(self._lowered(schedule))

    def at_least(self, schedule: Schedule) -> int:
        return self.memory.at_least(self._lowered(schedule))

    def excess(self, schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        return self.memory.excess(self._lowered(schedule), budget_nbytes, roughly=roughly)

    def packing(self, schedule: Schedule) -> Packing | None:
        return self.memory.packing(self._lowered(schedule))

    def _lowered(self, schedule: Schedule) -> Schedule:
        """``schedule`` as MXNet gets it: one object, with which its packing is remembered."""
        # Kept with the additions themselves, so that no others ever have their id.
        pair: tuple[Additions, Schedule] = remembered(
            schedule,
            (LoweredMemory, id(self.additions)),
            lambda: (self.additions, with_additions(self.additions, schedule).schedule),
        )
        return pair[1]


def with_additions(additions: Additions, schedule: Schedule) -> WithAdditions:
    """``schedule`` with what MXNet needs, and without copies that nobody reads.

    Some ops abort where nobody reads their outputs, and some kernels skip the other outputs where
    nobody reads the first: an anchor, which asks for its shape, reads it. An op that MXNet takes
    for a backward op, although it is none, can have no control dependencies: it gets a gate, a
    copy of one of its inputs, that has them. What an op must not write over is read right after it,
    unless it is read later anyway. Updates of parameters are put where they may run.

    Raises ScheduleError for the schedule of another graph.
    """
    if len(schedule.graph.ops) != len(additions.ndims):
        raise ScheduleError("the schedule belongs to another graph than the trace")
    schedule = without_unread(schedule)
    with_anchor = set(_anchored(schedule, additions.must_be_read))
    if not with_anchor and not additions.gates and not additions.kept:
        origins = tuple((OP, op) for op in range(len(schedule.graph.ops)))
        return _with_updates_in_place(additions, WithAdditions(schedule, origins))
    graph = _GraphWithAdditions(schedule.graph)
    for op, gate in additions.gates.items():
        graph.add_gate(op, gate)
    for op in sorted({schedule.ops[step] for step in with_anchor}):
        graph.add_anchor(op, additions.ndims[op])
    read_behind = _read_behind(schedule, additions.kept)
    for tensor in sorted({tensor for pairs in read_behind.values() for tensor, _ in pairs}):
        graph.add_reader(tensor, additions.readers[tensor])
    return _with_updates_in_place(additions, graph.scheduled(schedule, with_anchor, read_behind))


def _with_updates_in_place(additions: Additions, extended: WithAdditions) -> WithAdditions:
    """``extended`` with every update as soon as it may run, wherever the schedule has it.

    That is behind the last step that reads the parameter, recomputed ones included: what a schedule
    counts as one op may run again, and would read the new values. And it is behind the last step
    that reads this gradient, for an optimizer may write into it.
    """
    schedule, ops, origins = extended.schedule, extended.schedule.graph.ops, extended.origins
    updates = [step for step, op in enumerate(schedule.ops) if ops[op].kind == UPDATE]
    if not updates:
        return extended
    last_read: dict[object, int] = {}
    for step, (op, reads) in enumerate(zip(schedule.ops, schedule.reads, strict=True)):
        if ops[op].kind != UPDATE:
            last_read.update((name, step) for name in additions.weights_read.get(origins[op], ()))
            last_read.update((entry, step) for entry in zip(reads, ops[op].inputs, strict=True))
    updates_behind: dict[int, list[int]] = {}
    for step in updates:
        op = schedule.ops[step]
        [source], [tensor] = schedule.reads[step], ops[op].inputs
        weight = additions.weight_of[origins[op][1]]
        place = max(source, last_read.get(weight, 0), last_read.get((source, tensor), 0))
        updates_behind.setdefault(place, []).append(step)
    order: list[int] = []
    for step, op in enumerate(schedule.ops):
        if ops[op].kind != UPDATE:
            order += [step, *updates_behind.get(step, ())]
    place_of = {step: place for place, step in enumerate(order)}
    return dataclasses.replace(
        extended,
        schedule=Schedule(
            schedule.graph,
            tuple(schedule.ops[step] for step in order),
            tuple(tuple(place_of[s] for s in schedule.reads[step]) for step in order),
            tuple(place_of[step] for step in schedule.heads),
        ),
    )


def _anchored(schedule: Schedule, must_be_read: Collection[int]) -> Iterator[int]:
    """The steps whose first output is not read, although it must be.

    So it must where the unplanned step reads it, and of the ops in ``must_be_read``.
    """
    graph, heads = schedule.graph, set(schedule.graph.heads)
    read_at = readers(schedule)
    for step, op in enumerate(schedule.ops):
        first = graph.ops[op].outputs[0]
        if (step, first) in read_at:
            continue
        if op in must_be_read or graph.readers[first] or first in heads:
            yield step


def _read_behind(
    schedule: Schedule, kept: Mapping[int, Sequence[int]]
) -> dict[int, list[tuple[int, int]]]:
    """For each step the tensors to be read right behind it, and the steps that have written them.

    They are those ``kept`` that the step reads last.
    """
    result: dict[int, list[tuple[int, int]]] = {}
    read_later: set[tuple[int, int]] = set()
    for step in reversed(range(len(schedule.ops))):
        op = schedule.graph.ops[schedule.ops[step]]
        pairs = dict(zip(op.inputs, schedule.reads[step], strict=True))
        last = [(t, pairs[t]) for t in kept.get(schedule.ops[step], ())]
        if last := [pair for pair in last if pair not in read_later]:
            result[step] = last
        read_later.update(pairs.items())
    return result


@dataclass(frozen=True)
class _Numbered:
    """A graph with additions: ``origins[i]`` tells what its op i is.

    ``index_of`` gives the number of an op of the graph without them (its gate is the one before),
    ``anchor_of`` that of its anchor, and ``reader_of`` that of what reads a tensor.
    """

    graph: TrainingGraph
    origins: tuple[tuple[str, int], ...]
    index_of: Mapping[int, int]
    anchor_of: Mapping[int, int]
    reader_of: Mapping[int, int]


class _GraphWithAdditions:
    """A graph to which gates, anchors and readers are added."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.tensors = list(graph.tensors)
        self.gates: dict[int, Op] = {}
        self.gated: dict[int, Op] = {}
        self.anchors: dict[int, Op] = {}
        self.readers: dict[int, Op] = {}

    def _tensor(self, name: str, nbytes: int, nelements: int) -> int:
        self.tensors.append(Tensor(name, nbytes, nelements))
        return len(self.tensors) - 1

    def add_gate(self, index: int, gate: Gate) -> None:
        op = self.graph.ops[index]
        name = f"{op.name}_gate"
        tensor = self._tensor(f"{name}[0]", gate.nbytes, gate.nelements)
        inputs = list(op.inputs)
        gate_op = Op(name, "_copy", (), (tensor,))
        if gate.place is None:
            inputs.insert(0, tensor)
        else:
            shared = (Handover(0, 0, alias=True),)
            gate_op = dataclasses.replace(gate_op, inputs=(inputs[gate.place],), handovers=shared)
            inputs[gate.place] = tensor
        self.gates[index] = gate_op
        self.gated[index] = dataclasses.replace(op, inputs=tuple(inputs))

    def add_anchor(self, index: int, ndim: int) -> None:
        op = self.graph.ops[index]
        name = f"{op.name}_anchor"
        tensor = self._tensor(f"{name}[0]", 8 * ndim, ndim)
        self.anchors[index] = Op(name, "shape_array", op.outputs[:1], (tensor,))

    def add_reader(self, tensor: int, reader: Reader) -> None:
        producer = self.graph.ops[self.graph.producer[tensor]]
        name = f"{producer.name}_reader{self.graph.position[tensor]}"
        written = self._tensor(f"{name}[0]", reader.nbytes, reader.nelements)
        self.readers[tensor] = Op(name, reader.kind, (tensor,), (written,))

    def numbered(self) -> _Numbered:
        """All ops, each with its number."""
        ops: list[Op] = []
        origins: list[tuple[str, int]] = []
        index_of: dict[int, int] = {}
        for index, op in enumerate(self.graph.ops):
            if index in self.gates:
                ops.append(self.gates[index])
                origins.append((GATE, index))
            index_of[index] = len(ops)
            ops.append(self.gated.get(index, op))
            origins.append((OP, index))
        ops = [op.renumbered(index_of) for op in ops]
        anchor_of = {index: len(ops) + i for i, index in enumerate(self.anchors)}
        ops += self.anchors.values()
        origins += [(ANCHOR, index) for index in self.anchors]
        reader_of = {tensor: len(ops) + i for i, tensor in enumerate(self.readers)}
        ops += self.readers.values()
        origins += [(READER, tensor) for tensor in self.readers]
        graph = dataclasses.replace(
            self.graph,
            ops=tuple(ops),
            tensors=tuple(self.tensors),
            nforward=self.graph.nforward + sum(op < self.graph.nforward for op in self.gates),
        )
        return _Numbered(graph, tuple(origins), index_of, anchor_of, reader_of)

    def scheduled(
        self,
        schedule: Schedule,
        with_anchor: set[int],
        read_behind: Mapping[int, Sequence[tuple[int, int]]],
    ) -> WithAdditions:
        """``schedule`` with all that was added, whose steps come around those that need them."""
        numbered = self.numbered()
        ops: list[int] = []
        reads: list[tuple[int, ...]] = []
        step_of: dict[int, int] = {}
        for step, index in enumerate(schedule.ops):
            sources = [step_of[source] for source in schedule.reads[step]]
            if index in self.gates:
                gate = self.gates[index]
                place = self.gated[index].inputs.index(gate.outputs[0])
                places = slice(place, place + len(gate.inputs))
                reads.append(tuple(sources[places]))
                sources[places] = [len(ops)]
                ops.append(numbered.index_of[index] - 1)
            ops.append(numbered.index_of[index])
            reads.append(tuple(sources))
            step_of[step] = len(ops) - 1
            if step in with_anchor:
                ops.append(numbered.anchor_of[index])
                reads.append((step_of[step],))
            for tensor, source in read_behind.get(step, ()):
                ops.append(numbered.reader_of[tensor])
                reads.append((step_of[source],))
        heads = tuple(step_of[step] for step in schedule.heads)
        with_all = Schedule(numbered.graph, tuple(ops), tuple(reads), heads)
        return WithAdditions(with_all, numbered.origins)
