"""The arrays of a step in packed memory: where each lies, and which ops share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memplan.mxnet.realise.lowering import Lowered
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.unread import is_left_out
from memplan.mxnet.trace.layouts import writes_in_layout_of_place
from memplan.mxnet.trace.nnvm import Entry, EntryInfo, Node
from memplan.mxnet.trace.operators import ignored_inputs
from memplan.step.graph import UPDATE

NDArray = Any


@dataclass(frozen=True)
class Outside:
    """An array beside the memory into which autograd writes a gradient, or to which it adds one."""

    array: NDArray
    is_added: bool


class Overwritten(NamedTuple):
    """What MXNet's executor writes an output over; ``is_needed``: over that, or a copy of it."""

    source: Entry
    is_needed: bool


@dataclass(frozen=True)
class Layouts:
    """What a step does so that ops find the layouts that they find in MXNet's executor.

    ``overwritten`` is what that writes over, by op and output, ``turned`` are the inputs that an op
    is to find in the usual layout.
    """

    overwritten: Mapping[tuple[int, int], Overwritten]
    turned: Mapping[int, Sequence[int]]


class _Location(NamedTuple):
    """Where an array lies: one array for several tensors, one after the other, or one of two.

    Where it has no elements the offset is only a number of its own.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str
    is_second: bool = False

    @property
    def other(self) -> _Location:
        return self._replace(is_second=not self.is_second)


class StepArrays:
    """The arrays that each step of a lowered schedule reads and writes.

    An output is known by its step, and which of the op's outputs it is. Those of ``outside``, which
    are gradients, are not in the ``memory``, others at ``offsets`` in it, by step and tensor, as
    ``layouts`` ask for. ``arguments`` are the arrays of variables, by name. :attr:`copied` are, for
    the steps that are to write over a copy of an input, the place of that input, and the output.
    """

    def __init__(
        self,
        lowered: Lowered,
        offsets: Mapping[tuple[int, int], int],
        memory: PackedMemory,
        arguments: Mapping[str, NDArray],
        outside: Mapping[tuple[int, int], Outside],
        layouts: Layouts,
    ) -> None:
        self.lowered, self.offsets, self.memory = lowered, offsets, memory
        self.arguments, self.outside, self.layouts = arguments, outside, layouts
        self.copied: dict[int, tuple[int, int]] = {}
        self._made: dict[_Location, NDArray] = {}
        self._ignored: dict[tuple[tuple[int, ...], str], NDArray] = {}
        self._locations: dict[tuple[int, int], _Location] = {}
        for step in range(len(lowered.schedule.ops)):
            self._place_outputs(step)

    def inputs(self, step: int) -> list[NDArray]:
        """The arrays that a step reads."""
        entries = self.entries(step)
        ignored = ignored_inputs(self.lowered.node_at(step))
        return [
            self._unread(source, k)
            if place in ignored
            else self.value(source, k)
            if isinstance(source, int)
            else self.arguments[source.name]
            for place, (source, k) in enumerate(entries)
        ]

    def outputs(self, step: int) -> list[NDArray]:
        """The arrays that a step writes."""
        return [self.value(step, k) for k in range(len(self._outputs(step)))]

    def value(self, step: int, k: int) -> NDArray:
        """The array of the ``k``-th output of a step."""
        if (step, k) in self.outside:
            return self.outside[step, k].array
        if (step, k) not in self._locations:
            return self._unread(self.lowered.node_at(step), k)
        at = self._locations[step, k]
        if at not in self._made:
            self._made[at] = self.memory.array(at.offset, at.shape, at.dtype)
        return self._made[at]

    def is_there(self, step: int, k: int) -> bool:
        """Is the ``k``-th output of a step written?"""
        return (step, k) in self._locations or (step, k) in self.outside

    def place(self, step: int, k: int) -> range:
        """The bytes of the memory in which the ``k``-th output of a step is; none if outside."""
        at = self._locations.get((step, k))
        tensor, _ = self._outputs(step)[k]
        nbytes = self.lowered.schedule.graph.tensors[tensor].nbytes
        return range(at.offset, at.offset + nbytes) if at is not None else range(0)

    def entries(self, step: int) -> list[tuple[Any, int]]:
        """What a step reads: the step, or the node of the variable, and which of its outputs.

        Where only the shape of an input is read, it is the node that the schedule's graph has.
        """
        node = self.lowered.node_at(step)
        sources, ignored = iter(self.lowered.schedule.reads[step]), ignored_inputs(node)
        return [
            (source if place in ignored or source.is_variable else next(sources), k)
            for place, (source, k) in enumerate(node.inputs)
        ]

    def in_memory(self) -> list[NDArray]:
        """The arrays made so far that lie in the memory, no two of which are the same to MXNet."""
        return list(self._made.values())

    def _place_outputs(self, step: int) -> None:
        """Where the arrays are that a step writes.

        An operator that is none of oneDNN's writes over its input only where it does so in MXNet's
        own executor (:mod:`memplan.mxnet.realise.in_place`): else its output is another array to
        MXNet, in the same memory. Where the plan keeps what MXNet writes over, a copy is written
        over instead, which brings its layout along, where that matters.
        """
        op = self.lowered.schedule.ops[step]
        node, graph = self.lowered.nodes[op], self.lowered.schedule.graph
        read = {self._locations[entry] for entry in self.entries(step) if entry in self._locations}
        for k, (tensor, info) in enumerate(self._outputs(step)):
            if (step, k) in self.outside or is_left_out(graph, tensor, info):
                continue
            if not info.nelements:  # each is an array of its own, wherever that may be
                self._locations[step, k] = _Location(tensor, info.shape, info.dtype)
                continue
            location = _Location(self.offsets[step, tensor], info.shape, info.dtype)
            taken = self.layouts.overwritten.get((op, k))
            sources = read.intersection((location, location.other))
            for source in sources:
                keeps_layout = not writes_in_layout_of_place(node)
                location = source if keeps_layout or taken is not None else source.other
            if not sources and taken is not None and taken.is_needed:
                self.copied[step] = node.inputs.index(taken.source), k
            self._locations[step, k] = location

    def _outputs(self, step: int) -> Sequence[tuple[int, EntryInfo]]:
        """The tensors that a step writes."""
        op = self.lowered.schedule.ops[step]
        node, written = self.lowered.nodes[op], self.lowered.schedule.graph.ops[op].outputs
        return () if node.op == UPDATE else list(zip(written, _infos(node), strict=True))

    def _unread(self, source: Node, k: int) -> NDArray:
        """An array of this shape that no call writes: MXNet takes one that is also written for a
        hand-over, and nothing need be written then."""
        info = _infos(source)[k]
        if (info.shape, info.dtype) not in self._ignored:
            array = self.memory.array(0, info.shape, info.dtype)
            self._ignored[info.shape, info.dtype] = array
        return self._ignored[info.shape, info.dtype]


def _infos(node: Node) -> tuple[EntryInfo, ...]:
    """Shapes and dtypes of the outputs, worked out for anchors and gates, which no trace has."""
    if node.infos.outputs:
        return node.infos.outputs  # type: ignore[return-value]
    source, k = node.inputs[0]
    info = source.infos.outputs[k]
    assert info is not None
    if node.op == "shape_array":
        return (EntryInfo((len(info.shape),), "int64", 8),)
    return (info,)
