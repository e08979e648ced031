"""The calls of which a step in packed memory is made.

Each step of a lowered schedule becomes one call of an operator, on the arrays that
:mod:`memplan.mxnet.realise.packed_arrays` has for it. Which kind of call, :meth:`Calls.calls` says:

- an op whose backward op needs its state is recorded by autograd, and the backward op is the
  ``backward`` of that (RecordedCall, BackwardCall), but where the state is kept for both;
- an update is the optimizer's (UpdateCall);
- any other op is called alone (Call), if need be behind a copy of what it writes over (CallAfter),
  or of inputs brought into the usual layout (TurningCall). One that only changes the shape of what
  it would write over a copy of is a copy that brings the layout along (LayoutCopy). The gradient of
  a Concat is several calls (PartCalls).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx

from memplan.mxnet.realise.concat_parts import SLICE, slices
from memplan.mxnet.realise.direct_call import State, may_be_direct, may_keep_state
from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.explicit import step_attrs
from memplan.mxnet.realise.imperative import (
    BackwardArrays,
    BackwardCall,
    Call,
    CallAfter,
    PartCalls,
    RecordedCall,
    TurningCall,
)
from memplan.mxnet.realise.kept_operators import KeptOperators, Key, keys
from memplan.mxnet.realise.layout_copy import LayoutCopy, copy_of
from memplan.mxnet.realise.loop_copies import with_copies
from memplan.mxnet.realise.packed_arrays import StepArrays
from memplan.mxnet.realise.packed_rules import gradients_read, needs_state
from memplan.mxnet.realise.unread import asked_for_unread
from memplan.mxnet.realise.update_calls import AnyCall, UpdateCall, Updates
from memplan.mxnet.realise.usual_layout import in_usual_layout
from memplan.mxnet.trace.nnvm import VARIABLE, Entry, Node, is_hidden, to_symbol
from memplan.mxnet.trace.operators import CUSTOM, is_made_of_symbol, runs_user_code
from memplan.step.graph import UPDATE

NDArray = Any


class Calls:
    """Makes the calls of a lowered schedule.

    A long step runs the same ops on the same ``arrays`` again and again: such calls are one object.
    ``mode`` is of an executor, which keeps the operators of user code and loops from step to step;
    None: they are made anew for every call, but for the objects of user code in ``operators``.
    """

    def __init__(
        self,
        arrays: StepArrays,
        mode: Mode | None,
        operators: KeptOperators | None,
        updates: Updates | None,
    ) -> None:
        self.arrays, self.lowered, self.layouts = arrays, arrays.lowered, arrays.layouts
        self.mode, self.operators, self.updates = mode, operators, updates
        user_ops = [node for node in self.lowered.nodes if node.op == CUSTOM]
        self._user_ops = dict(zip(user_ops, keys(node.name for node in user_ops), strict=True))
        self._handles: dict[tuple[int, ...], Handles] = {}
        self._alike: dict[tuple[Any, ...], Call] = {}

    def calls(self) -> list[AnyCall]:
        """A call for every step."""
        followers, states = self._followers()
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
                gradient, weight = self.arrays.inputs(step)
                result.append(UpdateCall(self.updates, node.inputs[1][0].name, weight, gradient))
            elif step in followers:
                inputs, outputs = self.arrays.inputs(step), self.arrays.outputs(step)
                first = self._copy(step, inputs, outputs)
                backward = self._backward_arrays(followers[step], read)
                function = self._function(node)
                call = RecordedCall(function, attrs, inputs, outputs, backward, first)
                recorded[followers[step]] = call
                result.append(call)
            else:
                result.append(self._call(step, node, attrs, states.get(step)))
        return result

    def _call(
        self, step: int, node: Node, attrs: Mapping[str, str], state: State | None
    ) -> Call | PartCalls:
        """A call of an operator alone."""
        read, written = self.arrays.inputs(step), self.arrays.outputs(step)
        function = self._function(node)
        unread = [k for k in range(len(written)) if not self.arrays.is_there(step, k)]
        turned = self.layouts.turned.get(self.lowered.schedule.ops[step], ())
        arrays = [read[place] for place in turned]
        first = self._copy(step, read, written)
        if step in self.arrays.copied and first is None and not arrays:
            place, k = self.arrays.copied[step]
            return LayoutCopy(self._handled([read[place]]), self._handled([written[k]]))
        is_plain = first is None and not arrays and not unread
        if is_plain and (parts := slices(node, self.arrays.memory.ctx.device_type)):
            return self._in_parts(parts, read[0], written)
        inputs, outputs = self._handled(read), self._handled(written)
        if state is None and may_keep_state(node.op, inputs, outputs):
            state = State()
        if arrays:
            return TurningCall(arrays, first, function, attrs, inputs, outputs, unread, state)
        if first is not None:
            return CallAfter(first, function, attrs, inputs, outputs, unread, state)
        if function is not node.op:
            return Call(function, attrs, inputs, outputs)
        if state is not None:
            return Call(function, attrs, inputs, outputs, unread, state)
        key = (function, *attrs.items(), id(inputs), id(outputs))
        if key not in self._alike:
            self._alike[key] = Call(function, attrs, inputs, outputs, unread)
        return self._alike[key]

    def _in_parts(
        self, parts: Sequence[Mapping[str, str]], read: NDArray, written: Sequence[NDArray]
    ) -> PartCalls:
        """Calls that slice what is ``read`` into the arrays ``written``, as one."""
        whole = self._handled([read])
        return PartCalls(
            Call(SLICE, attrs, whole, self._handled([array]))
            for attrs, array in zip(parts, written, strict=True)
        )

    def _copy(self, step: int, read: list[NDArray], written: Sequence[NDArray]) -> Call | None:
        """A call that copies what a step is to write over a copy of, if it has the same shape.

        The copy takes the place of that among the arrays that are ``read``.
        """
        if step not in self.arrays.copied:
            return None
        place, k = self.arrays.copied[step]
        node = self.lowered.node_at(step)
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

    def _followers(self) -> tuple[dict[int, int], dict[int, State]]:
        """For each step that autograd is to record, the step at which its backward op runs.

        And the states of steps that share one without autograd.
        """
        nodes, latest = self.lowered.nodes, dict[int, int]()
        result, states = {}, {}
        for step, op in enumerate(self.lowered.schedule.ops):
            latest[op] = step
            forward = nodes[op].forward
            if forward is None or not needs_state(nodes[op]):
                continue
            first = latest[self.lowered.index_of[forward]]
            if self._keeps_state(first, step):
                states[first] = states[step] = State()
            elif not self._is_of_weight_alone(step):
                result[first] = step
        return result, states

    def _keeps_state(self, first: int, step: int) -> bool:
        """Can the op of ``first``, and its backward op at ``step``, share a state?

        Not where that adds to a gradient outside of the memory, as autograd does.
        """
        if any(writer == step for writer, _ in self.arrays.outside):
            return False
        return all(
            may_keep_state(
                self.lowered.node_at(each).op,
                self._handled(self.arrays.inputs(each)),
                self._handled(self.arrays.outputs(each)),
            )
            for each in (first, step)
        )

    def _is_of_weight_alone(self, step: int) -> bool:
        """Is it the backward op of an Embedding, which needs no state, but no array of indices?

        MXNet's C API would ask it for their gradient, too. Autograd adds, and writes sparse ones.
        """
        node, outputs = self.lowered.node_at(step), self._handled(self.arrays.outputs(step))
        return (
            node.op == "_backward_Embedding"
            and not self.arrays.is_there(step, 0)
            and (step, 1) not in self.arrays.outside
            and may_be_direct(node.op, outputs)
        )

    def _read(self, steps: Iterable[int]) -> set[tuple[int, int]]:
        """The outputs of these ``steps`` that some step reads, or that stay to the end."""
        among, schedule = set(steps), self.lowered.schedule
        position = schedule.graph.position
        heads = zip(schedule.heads, schedule.graph.heads, strict=True)
        result = {(step, position[tensor]) for step, tensor in heads if step in among}
        for step, sources in enumerate(schedule.reads if among else ()):
            if not among.isdisjoint(sources):
                result.update((s, k) for s, k in self.arrays.entries(step) if s in among)
        return result

    def _backward_arrays(self, step: int, read: Collection[tuple[int, int]]) -> BackwardArrays:
        """What the backward op at this ``step`` writes, as far as it is ``read``, and reads."""
        inputs, node = self.arrays.inputs(step), self.lowered.node_at(step)
        assert node.forward is not None
        needed = asked_for_unread(node.forward)
        gradients = [
            array if (step, k) in read or k in needed else None
            for k, array in enumerate(self.arrays.outputs(step))
        ]
        outside = self.arrays.outside.items()
        return BackwardArrays(
            gradients,
            used=[inputs[place] for place in gradients_read(node)],
            sums=[g.array for (writer, _), g in outside if writer == step and g.is_added],
            by_user_code=inputs if runs_user_code(node.op) else [],
            layouts=self._layouts(step, inputs, gradients),
        )

    def _layouts(
        self, step: int, read: Sequence[NDArray], written: Sequence[NDArray | None]
    ) -> list[tuple[NDArray, NDArray]]:
        """The arrays that the op at a ``step`` leaves in the layout of one that it has ``read``."""
        op, result = self.lowered.schedule.ops[step], []
        node = self.lowered.nodes[op]
        for k, array in enumerate(written):
            taken = self.layouts.overwritten.get((op, k))
            if array is not None and taken is not None and taken.is_needed:
                place = node.inputs.index(taken.source)
                if node.infos.inputs[place] == node.infos.outputs[k]:
                    result.append((read[place], array))
        return result


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
