"""The calls of which a step in packed memory is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np

from memplan.mxnet.realise.explicit import step_nodes
from memplan.mxnet.realise.imperative import (
    AnyCall,
    BackwardCall,
    Call,
    RecordedCall,
    UpdateCall,
    Updates,
)
from memplan.mxnet.realise.lowering import Lowered
from memplan.mxnet.realise.packed_memory import Memory
from memplan.mxnet.realise.packed_rules import (
    gradients_read,
    needs_state,
    skips_unread,
)
from memplan.mxnet.trace.nnvm import VARIABLE, Entry, EntryInfo, Node, is_hidden, to_symbol
from memplan.mxnet.trace.operators import ignored_inputs, is_made_of_symbol
from memplan.step.graph import UPDATE

NDArray = Any


@dataclass(frozen=True)
class Outside:
    """An array beside the memory into which autograd writes a gradient, or to which it adds one."""

    array: NDArray
    is_added: bool


class Calls:
    """Makes the calls of a lowered schedule. ``values[step]`` are the arrays that a step writes.

    ``outside`` are the gradients, by step and output, that are not in the memory.
    """

    def __init__(
        self,
        lowered: Lowered,
        offsets: Mapping[tuple[int, int], int],
        memory: Memory,
        arrays: Mapping[str, NDArray],
        mode: Mode | None,
        updates: Updates | None,
        outside: Mapping[tuple[int, int], Outside],
    ) -> None:
        self.mode = mode
        self.lowered, self.offsets, self.memory, self.arrays = lowered, offsets, memory, arrays
        self.updates, self.outside = updates, outside
        self.nodes = step_nodes(lowered)
        self.step_of = {node: step for step, node in enumerate(self.nodes)}
        self.made: dict[tuple[int, tuple[int, ...], str], NDArray] = {}
        self.values = [self._outputs(step) for step in range(len(self.nodes))]
        self.read = {entry for node in self.nodes for entry in node.inputs}
        for step, tensor in zip(lowered.schedule.heads, lowered.schedule.graph.heads, strict=True):
            place = lowered.schedule.graph.position[tensor]
            self.read.add((self.nodes[step], place))

    def calls(self) -> list[AnyCall]:
        """A call for every step."""
        followers = self._followers()
        recorded: dict[int, RecordedCall] = {}
        result: list[AnyCall] = []
        for step, node in enumerate(self.nodes):
            attrs = {name: value for name, value in node.attrs.items() if not is_hidden(name)}
            inputs, outputs = self._inputs(step), self.values[step]
            op = _cached_op(node, self.mode) if is_made_of_symbol(node) else node.op
            if step in followers:
                backward = followers[step]
                made = RecordedCall(op, attrs, inputs, outputs, **self._gradients(backward))
                recorded[backward] = made
                result.append(made)
            elif step in recorded:
                result.append(BackwardCall(recorded[step]))
            elif node.op == UPDATE:
                assert self.updates is not None
                gradient, weight = inputs
                result.append(UpdateCall(self.updates, node.inputs[1][0].name, weight, gradient))
            else:
                result.append(Call(op, attrs, inputs, outputs))
        return result

    def _followers(self) -> dict[int, int]:
        """Of steps that autograd records, the step at which the backward op runs."""
        nodes = self.lowered.nodes
        latest: dict[int, int] = {}
        result = {}
        for step, op in enumerate(self.lowered.schedule.ops):
            latest[op] = step
            forward = nodes[op].forward
            if forward is not None:
                before = latest[self.lowered.index_of[forward]]
                if needs_state(nodes[op]) or (
                    self.memory.ctx.device_type == "cpu"
                    and skips_unread(nodes[op])
                    and not self._all_read(step)
                    and self._finds_what_was_read(step, before)
                ):
                    result[before] = step
        return result

    def _all_read(self, step: int) -> bool:
        return all((self.nodes[step], k) in self.read for k in range(len(self.values[step])))

    def _finds_what_was_read(self, step: int, before: int) -> bool:
        """Does the backward op at ``step`` read the very tensors of its forward op's run?"""
        backward = self.lowered.nodes[self.lowered.schedule.ops[step]]
        forward = backward.forward
        assert forward is not None
        now = dict(zip(backward.inputs, self.nodes[step].inputs, strict=True))
        then = zip(forward.inputs, self.nodes[before].inputs, strict=True)
        return all(now.get(entry, ran) == ran for entry, ran in then) and not any(
            source is forward for source, _ in backward.inputs
        )

    def _gradients(self, backward: int) -> dict[str, list[Any]]:
        """What the backward op at this step writes, as far as it is read, and what it uses."""
        node, inputs = self.nodes[backward], self._inputs(backward)
        places = gradients_read(self.lowered.nodes[self.lowered.schedule.ops[backward]])
        written = [
            array if (node, k) in self.read else None
            for k, array in enumerate(self.values[backward])
        ]
        sums = [g.array for (step, _), g in self.outside.items() if step == backward and g.is_added]
        return {"gradients": written, "used": [inputs[place] for place in places], "sums": sums}

    def _inputs(self, step: int) -> list[NDArray]:
        return [
            self._ignored(source, k)
            if place in ignored_inputs(self.nodes[step])
            else self._value(source, k)
            for place, (source, k) in enumerate(self.nodes[step].inputs)
        ]

    def _value(self, source: Node, k: int) -> NDArray:
        if source.is_variable:
            return self.arrays[source.name]
        return self.values[self.step_of[source]][k]

    def _ignored(self, source: Node, k: int) -> NDArray:
        """An array of this shape, but no other's: MXNet takes one that is also written for a
        hand-over, and nothing need be written then."""
        array = self._value(source, k)
        return self.memory.array(0, array.shape, np.dtype(array.dtype).name)

    def _outputs(self, step: int) -> list[NDArray]:
        index = self.lowered.schedule.ops[step]
        graph, node = self.lowered.schedule.graph, self.lowered.nodes[index]
        if node.op == UPDATE:
            return []
        tensors = zip(graph.ops[index].outputs, _infos(node), strict=True)
        return [
            self.outside[step, k].array
            if (step, k) in self.outside
            else self._array(self.offsets[step, tensor] if info.nelements else 0, info)
            for k, (tensor, info) in enumerate(tensors)
        ]

    def _array(self, offset: int, info: EntryInfo) -> NDArray:
        """The array of this kind at ``offset``: of several tensors, one after the other."""
        key = (offset, info.shape, info.dtype)
        if key not in self.made:
            self.made[key] = self.memory.array(offset, info.shape, info.dtype)
        return self.made[key]


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
    call = Node(node.op, node.name, attrs, sources, [], node.noutputs, node.subgraphs)
    # A network below the limit would be recorded op by op.
    flags = {"inline_limit": 0, "static_alloc": is_kept, "static_shape": is_kept}
    op = mx.nd.CachedOp(to_symbol([(call, k) for k in range(node.noutputs)]), flags.items())
    if mode is None or node.subgraphs is None:
        return op

    def in_mode(*inputs: NDArray, out: Sequence[NDArray]) -> None:
        with mx.autograd.train_mode() if mode.is_training else mx.autograd.predict_mode():
            op(*inputs, out=out)

    return in_mode


def _infos(node: Node) -> tuple[EntryInfo, ...]:
    """Of the outputs; those of anchors, which ask for a shape, and gates, copies, are not known."""
    if node.infos.outputs:
        return node.infos.outputs  # type: ignore[return-value]
    source, k = node.inputs[0]
    info = source.infos.outputs[k]
    assert info is not None
    if node.op == "shape_array":
        return (EntryInfo((len(info.shape),), "int64", 8),)
    return (info,)
