"""The calls of which a step in packed memory is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mxnet as mx

from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.explicit import step_attrs
from memplan.mxnet.realise.imperative import (
    AnyCall,
    BackwardCall,
    Call,
    CallAfter,
    RecordedCall,
    TurningCall,
    UpdateCall,
    Updates,
)
from memplan.mxnet.realise.kept_operators import KeptOperators, Key, keys
from memplan.mxnet.realise.layout_copy import LayoutCopy, copy_of
from memplan.mxnet.realise.loop_copies import with_copies
from memplan.mxnet.realise.loops import states_to_differentiate
from memplan.mxnet.realise.lowering import Lowered
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.packed_rules import (
    gradients_read,
    needs_state,
)
from memplan.mxnet.realise.unread import is_left_out
from memplan.mxnet.realise.usual_layout import in_usual_layout
from memplan.mxnet.trace.layouts import writes_in_layout_of_place
from memplan.mxnet.trace.nnvm import VARIABLE, Entry, EntryInfo, Node, is_hidden, to_symbol
from memplan.mxnet.trace.operators import CUSTOM, ignored_inputs, is_made_of_symbol, runs_user_code
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


class _Place(NamedTuple):
    """Where an array lies: one array for several tensors, one after the other, or one of two.

    Where it has no elements the offset is only a number of its own.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str
    is_second: bool = False

    @property
    def other(self) -> _Place:
        return self._replace(is_second=not self.is_second)


class Calls:
    """Makes the calls of a lowered schedule.

    A long step runs the same ops on the same arrays again and again: such calls are one object.
    ``mode`` is of an executor, which keeps the operators of user code and loops from step to step;
    None: they are made anew for every call, but for the objects of user code in ``operators``.
    ``outside`` are the gradients, by step and output, that are not in the memory, ``in_place``
    what MXNet's executor writes over, by op and output, ``turned`` the inputs that an op is to find
    in the usual layout.
    """

    def __init__(
        self,
        lowered: Lowered,
        offsets: Mapping[tuple[int, int], int],
        memory: PackedMemory,
        arrays: Mapping[str, NDArray],
        mode: Mode | None,
        operators: KeptOperators | None,
        updates: Updates | None,
        outside: Mapping[tuple[int, int], Outside],
        in_place: Mapping[tuple[int, int], Overwritten],
        turned: Mapping[int, Sequence[int]],
    ) -> None:
        self.mode, self.operators = mode, operators
        user_ops = [node for node in lowered.nodes if node.op == CUSTOM]
        self._user_ops = dict(zip(user_ops, keys(node.name for node in user_ops), strict=True))
        self.lowered, self.offsets, self.memory, self.arrays = lowered, offsets, memory, arrays
        self.updates, self.outside = updates, outside
        self.in_place, self.turned = in_place, turned
        self._made: dict[_Place, NDArray] = {}
        self._ignored: dict[tuple[tuple[int, ...], str], NDArray] = {}
        self._handles: dict[tuple[int, ...], Handles] = {}
        self._alike: dict[tuple[Any, ...], Call] = {}
        self._places: dict[tuple[int, int], _Place] = {}
        self._copied: dict[int, tuple[int, int]] = {}
        for step in range(len(lowered.schedule.ops)):
            self._place_outputs(step)

    def calls(self) -> list[AnyCall]:
        """A call for every step."""
        followers = self._followers()
        read = self._read(followers.values())
        recorded: dict[int, RecordedCall] = {}
        result: list[AnyCall] = []
        ops_so_far: set[int] = set()
        for step, op in enumerate(self.lowered.schedule.ops):
            node = self.lowered.nodes[op]
            seen = step_attrs(node, is_copy=op in ops_so_far).items()
            attrs = {name: value for name, value in seen if not is_hidden(name)}
            ops_so_far.add(op)
            if step in recorded:
                result.append(BackwardCall(recorded[step]))
            elif node.op == UPDATE:
                assert self.updates is not None
                gradient, weight = self._inputs(step)
                result.append(UpdateCall(self.updates, node.inputs[1][0].name, weight, gradient))
            elif step in followers:
                inputs, outputs = self._inputs(step), self.outputs(step)
                call = RecordedCall(
                    self._function(node),
                    attrs,
                    inputs,
                    outputs,
                    first=self._copy(step, inputs, outputs),
                    **self._gradients(followers[step], read),
                )
                recorded[followers[step]] = call
                result.append(call)
            else:
                result.append(self._call(step, node, attrs))
        return result

    def outputs(self, step: int) -> list[NDArray]:
        """The arrays that a step writes."""
        return [self.value(step, k) for k in range(len(self._outputs(step)))]

    def value(self, step: int, k: int) -> NDArray:
        """The array of the ``k``-th output of a step."""
        if (step, k) in self.outside:
            return self.outside[step, k].array
        if (step, k) not in self._places:
            return self._unread(self.lowered.nodes[self.lowered.schedule.ops[step]], k)
        place = self._places[step, k]
        if place not in self._made:
            self._made[place] = self.memory.array(place.offset, place.shape, place.dtype)
        return self._made[place]

    def _is_there(self, step: int, k: int) -> bool:
        """Is the ``k``-th output of a step written?"""
        return (step, k) in self._places or (step, k) in self.outside

    def _place_outputs(self, step: int) -> None:
        """Where the arrays are that a step writes.

        An operator that is none of oneDNN's writes over its input only where it does so in MXNet's
        own executor (:mod:`memplan.mxnet.realise.in_place`): else its output is another array to
        MXNet, in the same memory. Where the plan keeps what MXNet writes over, a copy is written
        over instead, which brings its layout along, where that matters.
        """
        op = self.lowered.schedule.ops[step]
        node, graph = self.lowered.nodes[op], self.lowered.schedule.graph
        read = {self._places[entry] for entry in self._entries(step) if entry in self._places}
        for k, (tensor, info) in enumerate(self._outputs(step)):
            if (step, k) in self.outside or is_left_out(graph, tensor, info):
                continue
            if not info.nelements:  # each is an array of its own, wherever that may be
                self._places[step, k] = _Place(tensor, info.shape, info.dtype)
                continue
            place = _Place(self.offsets[step, tensor], info.shape, info.dtype)
            taken, sources = self.in_place.get((op, k)), read.intersection((place, place.other))
            for source in sources:
                keeps_layout = not writes_in_layout_of_place(node)
                place = source if keeps_layout or taken is not None else source.other
            if not sources and taken is not None and taken.is_needed:
                self._copied[step] = node.inputs.index(taken.source), k
            self._places[step, k] = place

    def in_memory(self) -> list[NDArray]:
        """The arrays made so far that lie in the memory, no two of which are the same to MXNet."""
        return list(self._made.values())

    def _outputs(self, step: int) -> Sequence[tuple[int, EntryInfo]]:
        """The tensors that a step writes."""
        op = self.lowered.schedule.ops[step]
        node, written = self.lowered.nodes[op], self.lowered.schedule.graph.ops[op].outputs
        return () if node.op == UPDATE else list(zip(written, _infos(node), strict=True))

    def _call(self, step: int, node: Node, attrs: Mapping[str, str]) -> Call:
        """A call of an operator alone."""
        read, written = self._inputs(step), self.outputs(step)
        function = self._function(node)
        unread = [k for k in range(len(written)) if not self._is_there(step, k)]
        turned = self.turned.get(self.lowered.schedule.ops[step], ())
        arrays = [read[place] for place in turned]
        first = self._copy(step, read, written)
        if step in self._copied and first is None and not arrays:
            place, k = self._copied[step]
            return LayoutCopy(self._handled([read[place]]), self._handled([written[k]]))
        inputs, outputs = self._handled(read), self._handled(written)
        if arrays:
            return TurningCall(arrays, first, function, attrs, inputs, outputs, unread)
        if first is not None:
            return CallAfter(first, function, attrs, inputs, outputs, unread)
        if function is not node.op:
            return Call(function, attrs, inputs, outputs)
        key = (function, *attrs.items(), id(inputs), id(outputs))
        if key not in self._alike:
            self._alike[key] = Call(function, attrs, inputs, outputs, unread)
        return self._alike[key]

    def _copy(self, step: int, read: list[NDArray], written: Sequence[NDArray]) -> Call | None:
        """A call that copies what a step is to write over a copy of, if it has the same shape.

        The copy takes the place of that among the arrays that are ``read``.
        """
        if step not in self._copied:
            return None
        place, k = self._copied[step]
        node = self.lowered.nodes[self.lowered.schedule.ops[step]]
        if node.infos.inputs[place] != node.infos.outputs[k]:
            return None
        parts = self._handled([read[place]]), self._handled([written[k]])
        read[place] = written[k]
        return copy_of(*parts)

    def _function(self, node: Node) -> str | Callable[..., Any]:
        if not is_made_of_symbol(node):
            return node.op
        op, key = _cached_op(node, self.mode), self._user_ops.get(node)
        return op if key is None else _of_user(op, self.operators, key)

    def _handled(self, arrays: Sequence[NDArray]) -> Handles:
        key = tuple(map(id, arrays))
        if key not in self._handles:
            self._handles[key] = Handles(arrays)
        return self._handles[key]

    def _followers(self) -> dict[int, int]:
        """For each step that autograd is to record, the step at which its backward op runs."""
        nodes, latest = self.lowered.nodes, dict[int, int]()
        result = {}
        for step, op in enumerate(self.lowered.schedule.ops):
            latest[op] = step
            forward = nodes[op].forward
            if forward is not None and needs_state(nodes[op]):
                result[latest[self.lowered.index_of[forward]]] = step
        return result

    def _read(self, steps: Iterable[int]) -> set[tuple[int, int]]:
        """The outputs of these ``steps`` that some step reads, or that stay to the end."""
        among, schedule = set(steps), self.lowered.schedule
        position = schedule.graph.position
        heads = zip(schedule.heads, schedule.graph.heads, strict=True)
        result = {(step, position[tensor]) for step, tensor in heads if step in among}
        for step, sources in enumerate(schedule.reads if among else ()):
            if not among.isdisjoint(sources):
                result.update((s, k) for s, k in self._entries(step) if s in among)
        return result

    def _entries(self, step: int) -> list[tuple[Any, int]]:
        """What a step reads: the step, or the node of the variable, and which of its outputs.

        Where only the shape of an input is read, it is the node that the schedule's graph has.
        """
        node = self.lowered.nodes[self.lowered.schedule.ops[step]]
        sources, ignored = iter(self.lowered.schedule.reads[step]), ignored_inputs(node)
        return [
            (source if place in ignored or source.is_variable else next(sources), k)
            for place, (source, k) in enumerate(node.inputs)
        ]

    def _gradients(self, backward: int, read: Collection[tuple[int, int]]) -> dict[str, list[Any]]:
        """What the backward op at this step writes, as far as it is read, and what it uses."""
        inputs = self._inputs(backward)
        node = self.lowered.nodes[self.lowered.schedule.ops[backward]]
        places = gradients_read(node)
        assert node.forward is not None
        needed = states_to_differentiate(node.forward)
        written = [
            array if (backward, k) in read or k in needed else None
            for k, array in enumerate(self.outputs(backward))
        ]
        sums = [g.array for (step, _), g in self.outside.items() if step == backward and g.is_added]
        used = [inputs[place] for place in places]
        by_user_code = inputs if runs_user_code(node.op) else []
        result = {"gradients": written, "used": used, "sums": sums, "by_user_code": by_user_code}
        return {**result, "layouts": self._layouts(backward, inputs, written)}

    def _layouts(
        self, step: int, read: Sequence[NDArray], written: Sequence[NDArray | None]
    ) -> list[tuple[NDArray, NDArray]]:
        """The arrays that the op at a ``step`` leaves in the layout of one that it has ``read``."""
        op, result = self.lowered.schedule.ops[step], []
        node = self.lowered.nodes[op]
        for k, array in enumerate(written):
            taken = self.in_place.get((op, k))
            if array is not None and taken is not None and taken.is_needed:
                place = node.inputs.index(taken.source)
                if node.infos.inputs[place] == node.infos.outputs[k]:
                    result.append((read[place], array))
        return result

    def _inputs(self, step: int) -> list[NDArray]:
        entries = self._entries(step)
        ignored = ignored_inputs(self.lowered.nodes[self.lowered.schedule.ops[step]])
        return [
            self._unread(source, k)
            if place in ignored
            else self.value(source, k)
            if isinstance(source, int)
            else self.arrays[source.name]
            for place, (source, k) in enumerate(entries)
        ]

    def _unread(self, source: Node, k: int) -> NDArray:
        """An array of this shape that no call writes: MXNet takes one that is also written for a
        hand-over, and nothing need be written then."""
        info = _infos(source)[k]
        if (info.shape, info.dtype) not in self._ignored:
            array = self.memory.array(0, info.shape, info.dtype)
            self._ignored[info.shape, info.dtype] = array
        return self._ignored[info.shape, info.dtype]


@dataclass
class Mode:
    """Is whoever runs the step in training mode?"""

    is_training: bool = False


def _cached_op(node: Node, mode: Mode | None) -> Callable[..., Any]:
    """The operator alone, made at every call; with a ``mode`` once, as in an executor.

    In a loop MXNet's executor knows the mode of who runs it only.
    """
    is_kept = mode is not None
    sources: list[Entry] = [(Node(VARIABLE, f"input{i}"), 0) for i in range(len(node.inputs))]
    attrs = dict(node.key)
    call = Node(node.op, node.name, attrs, sources, (), node.noutputs, with_copies(node))
    # A network below the limit would be recorded op by op.
    flags = {"inline_limit": 0, "static_alloc": is_kept, "static_shape": is_kept}
    op = mx.nd.CachedOp(to_symbol([(call, k) for k in range(node.noutputs)]), flags.items())
    if mode is None or node.subgraphs is None:
        return op

    def in_mode(*inputs: NDArray, out: Sequence[NDArray]) -> None:
        with mx.autograd.train_mode() if mode.is_training else mx.autograd.predict_mode():
            op(*inputs, out=out)

    return in_mode


def _of_user(
    op: Callable[..., Any], operators: KeptOperators | None, key: Key
) -> Callable[..., None]:
    """``op``, which runs user code: that reads the usual layout, and its object is kept."""

    def call(*inputs: NDArray, out: Sequence[NDArray]) -> None:
        kept = contextlib.nullcontext() if operators is None else operators.for_ops([key])
        with in_usual_layout(inputs), kept:
            op(*inputs, out=out)

    return call


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
