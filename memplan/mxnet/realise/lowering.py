"""A schedule as MXNet can run it: without what nobody reads, with anchors and gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memplan.errors import ScheduleError
from memplan.memory.memory import Memory
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.nnvm import EntryInfo, Node
from memplan.mxnet.trace.operators import ignored_inputs
from memplan.mxnet.trace.probe import counts_as_backward
from memplan.step.graph import UPDATE, Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule


@dataclass(frozen=True)
class Lowered:
    """A schedule as MXNet gets it, anchors and gates included; ``nodes[i]`` is the node of op i.

    ``index_of`` gives the op of a node of the trace, by the node's ``id``. What MXNet allocates
    is ``allocate(lowered.schedule)``.
    """

    schedule: Schedule
    nodes: tuple[Node, ...]
    index_of: Mapping[int, int]


@dataclass(frozen=True)
class LoweredMemory:
    """The bytes in ``memory`` of what MXNet gets for a schedule, anchors and gates included."""

    trace: Trace
    memory: Memory

    @property
    def match_ranges(self) -> tuple[int, ...]:
        """Those of ``memory``."""
        return self.memory.match_ranges

    @property
    def is_exact(self) -> bool:
        """A search does not count what is added."""
        return False

    def nbytes(self, schedule: Schedule) -> int:
        """The bytes of ``schedule`` as MXNet gets it."""
        return self.memory.nbytes(lower(self.trace, schedule).schedule)

    def at_least(self, schedule: Schedule) -> int:
        """A bound below :meth:`nbytes` that takes little time."""
        return self.memory.at_least(lower(self.trace, schedule).schedule)


def lower(trace: Trace, schedule: Schedule) -> Lowered:
    """``schedule`` with the extra steps that MXNet needs, and without copies that nobody reads.

    Some ops abort where nobody reads their outputs, and some kernels skip the other outputs where
    nobody reads the first: an anchor, which asks for its shape, reads it. An op that MXNet takes
    for a backward op, although it is none, can have no control dependencies: it gets a gate, a
    copy of one of its inputs, that has them. Updates of parameters are put where they may run.
    """
    if not trace.spells_out_backward or len(schedule.graph.ops) != len(trace.nodes):
        raise ScheduleError(
            "the schedule belongs to another graph than the trace, or the trace was not made with "
            "realisation='explicit'"
        )
    kept = _read_steps(schedule)
    anchored = set(_anchored(schedule, kept))
    gated = [i for i, node in enumerate(trace.nodes) if _needs_gate(node)]
    if len(kept) == len(schedule.ops) and not anchored and not gated:
        index_of = {id(node): index for index, node in enumerate(trace.nodes)}
        return _with_updates_in_place(Lowered(schedule, trace.nodes, index_of))
    graph = _Extended(schedule.graph, trace.nodes)
    for op in gated:
        graph.add_gate(op)
    for op in sorted({schedule.ops[step] for step in anchored}):
        graph.add_anchor(op)
    return _with_updates_in_place(graph.lowered(schedule, kept, anchored))


def _with_updates_in_place(lowered: Lowered) -> Lowered:
    """``lowered`` with every update as soon as it may run, wherever the schedule has it.

    That is behind the last step that reads the parameter, recomputed ones included: what a schedule
    counts as one op may run again, and would read the new values. And it is behind the last step
    that reads this gradient, for an optimizer may write into it.
    """
    schedule, nodes = lowered.schedule, lowered.nodes
    updates = [step for step, op in enumerate(schedule.ops) if nodes[op].op == UPDATE]
    if not updates:
        return lowered
    last_read: dict[object, int] = {}
    for step, (op, reads) in enumerate(zip(schedule.ops, schedule.reads, strict=True)):
        if nodes[op].op != UPDATE:
            last_read.update((id(source), step) for source, _ in nodes[op].inputs)
            inputs = schedule.graph.ops[op].inputs
            last_read.update((entry, step) for entry in zip(reads, inputs, strict=True))
    behind: dict[int, list[int]] = {}
    for step in updates:
        [source], [tensor] = schedule.reads[step], schedule.graph.ops[schedule.ops[step]].inputs
        weight, _ = nodes[schedule.ops[step]].inputs[1]
        place = max(source, last_read.get(id(weight), 0), last_read.get((source, tensor), 0))
        behind.setdefault(place, []).append(step)
    order: list[int] = []
    for step, op in enumerate(schedule.ops):
        if nodes[op].op != UPDATE:
            order += [step, *behind.get(step, ())]
    place_of = {step: place for place, step in enumerate(order)}
    return dataclasses.replace(
        lowered,
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


def _needs_gate(node: Node) -> bool:
    return not node.control and counts_as_backward(node)


class _Extended:
    """A graph to which gates and anchors are added."""

    def __init__(self, graph: TrainingGraph, nodes: Sequence[Node]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.tensors = list(graph.tensors)
        self.gates: dict[int, tuple[Op, Node]] = {}
        self.gated: dict[int, tuple[Op, Node]] = {}
        self.anchors: dict[int, tuple[Op, Node]] = {}

    def _tensor(self, name: str, nbytes: int, nelements: int) -> int:
        self.tensors.append(Tensor(name, nbytes, nelements))
        return len(self.tensors) - 1

    def add_gate(self, index: int) -> None:
        op, node = self.graph.ops[index], self.nodes[index]
        places = [p for p in range(len(node.inputs)) if p not in ignored_inputs(node)]
        internal = [p for p in places if not node.inputs[p][0].is_variable]
        infos = node.infos.inputs
        # A copy of a tensor shares its buffer, that of a variable does not: take the smallest.
        place = internal[0] if internal else min(places, key=lambda p: _nbytes(infos[p]))
        info = infos[place]
        name = f"{node.name}_gate"
        written = self._tensor(f"{name}[0]", _nbytes(info), info.nelements if info else 0)
        read = list(op.inputs)
        gate = Op(name, "_copy", (), (written,))
        if internal:
            position = sum(p < place for p in internal)
            shared = (Handover(0, 0, alias=True),)
            gate = dataclasses.replace(gate, inputs=(read[position],), handovers=shared)
            read[position] = written
        else:
            read.insert(0, written)
        gate_node = Node("_copy", name, inputs=[node.inputs[place]])
        self.gates[index] = (gate, gate_node)
        sources = list(node.inputs)
        sources[place] = (gate_node, 0)
        self.gated[index] = (
            dataclasses.replace(op, inputs=tuple(read)),
            dataclasses.replace(node, inputs=sources),
        )

    def add_anchor(self, index: int) -> None:
        node = self.nodes[index]
        info = node.infos.outputs[0]
        ndim = len(info.shape) if info else 0
        name = f"{node.name}_anchor"
        written = self._tensor(f"{name}[0]", 8 * ndim, ndim)
        self.anchors[index] = (
            Op(name, "shape_array", self.graph.ops[index].outputs[:1], (written,)),
            Node("shape_array", name, inputs=[(node, 0)]),
        )

    def lowered(self, schedule: Schedule, kept: Sequence[int], anchored: set[int]) -> Lowered:
        pairs: list[tuple[Op, Node]] = []
        index_of: dict[int, int] = {}
        for index, pair in enumerate(zip(self.graph.ops, self.nodes, strict=True)):
            if index in self.gates:
                pairs.append(self.gates[index])
            index_of[index] = len(pairs)
            pairs.append(self.gated.get(index, pair))
        pairs = [(_renumbered(op, index_of), node) for op, node in pairs]
        anchor_of = {index: len(pairs) + i for i, index in enumerate(self.anchors)}
        pairs += self.anchors.values()
        graph = dataclasses.replace(
            self.graph,
            ops=tuple(op for op, _ in pairs),
            tensors=tuple(self.tensors),
            nforward=self.graph.nforward + sum(op < self.graph.nforward for op in self.gates),
        )
        ops: list[int] = []
        reads: list[tuple[int, ...]] = []
        step_of: dict[int, int] = {}
        for step in kept:
            op = schedule.ops[step]
            sources = [step_of[source] for source in schedule.reads[step]]
            if op in self.gates:
                self._add_gated(op, sources, index_of[op], ops, reads)
            else:
                ops.append(index_of[op])
                reads.append(tuple(sources))
            step_of[step] = len(ops) - 1
            if step in anchored:
                ops.append(anchor_of[op])
                reads.append((step_of[step],))
        heads = tuple(step_of[step] for step in schedule.heads)
        return Lowered(
            Schedule(graph, tuple(ops), tuple(reads), heads),
            tuple(node for _, node in pairs),
            {id(node): index_of[index] for index, node in enumerate(self.nodes)},
        )

    def _add_gated(
        self,
        op: int,
        sources: list[int],
        index: int,
        ops: list[int],
        reads: list[tuple[int, ...]],
    ) -> None:
        """Append the gate of ``op`` and ``op`` itself, whose inputs come from ``sources``."""
        gate = self.gates[op][0]
        place = self.gated[op][0].inputs.index(gate.outputs[0])
        gate_step = len(ops)
        if gate.inputs:
            reads.append((sources[place],))
            sources[place] = gate_step
        else:
            reads.append(())
            sources.insert(place, gate_step)
        reads.append(tuple(sources))
        ops += [index - 1, index]


def _nbytes(info: EntryInfo | None) -> int:
    return info.nbytes if info else 0


def _renumbered(op: Op, index_of: dict[int, int]) -> Op:
    differentiates = None if op.differentiates is None else index_of[op.differentiates]
    return dataclasses.replace(
        op, differentiates=differentiates, after=tuple(index_of[other] for other in op.after)
    )
