"""Runs a training step in packed memory: its ops are called one by one, in bundles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.memory.packing import Packing, check_packing, pack
from memplan.mxnet.realise.engine import bundles
from memplan.mxnet.realise.explicit import step_nodes
from memplan.mxnet.realise.imperative import BackwardCall, RecordedCall
from memplan.mxnet.realise.kept_bundles import Bundle
from memplan.mxnet.realise.kept_operators import KeptOperators
from memplan.mxnet.realise.lowering import Lowered, lower
from memplan.mxnet.realise.monitor import Monitor, check_monitor
from memplan.mxnet.realise.packed import Packed
from memplan.mxnet.realise.packed_arrays import Outside, StepArrays
from memplan.mxnet.realise.packed_calls import Calls, Mode
from memplan.mxnet.realise.packed_layouts import in_layouts_of_unplanned
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.step_scope import StepScope
from memplan.mxnet.realise.update_calls import AnyCall, UpdateCall, Updates
from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.nnvm import Node
from memplan.step.graph import UPDATE
from memplan.step.halves import second_half
from memplan.step.schedule import Schedule

NDArray = Any

# So many calls are handed to the engine at once: it runs them while others are made ready. The
# first bundles are smaller, so that it does not wait for them, and each is so many times as large
# as the one before: to hand one over takes as long as to make some calls.
BUNDLE, GROWTH = 32, 4

# So many calls between updates that change in every step are kept apart from these: to hand over a
# bundle more takes about as long as to make them.
BESIDE = 8


class PackedStep:
    """Runs the training steps of a schedule in one array of bytes, on ``ctx``.

    ``outputs`` are those of the network, then the gradients, if parameters are not updated within
    the step; they stay until the next step begins.

    The ``schedule`` is of a ``trace`` made for "packed" or "updating", ``packing`` that of the
    plan; without one, it is packed anew, and may take more. ScheduleError for the packing of
    another schedule. ``arrays`` are the arguments, states and gradients of heads. Steps that run in
    turn may share ``memory``; where that is not large enough, or None, the step makes its own.
    User code is run by the objects in ``operators``; None: they are made anew for every step.
    ``updates`` are for "updating". ``gradients`` are arrays, by argument, for those that the step
    writes outside of its memory, or adds to: they are in :attr:`outputs`. Without an array the step
    makes one.
    """

    def __init__(
        self,
        trace: Trace,
        schedule: Schedule,
        *,
        ctx: mx.Context,
        arrays: Mapping[str, NDArray],
        memory: PackedMemory | None = None,
        operators: KeptOperators | None = None,
        updates: Updates | None = None,
        packing: Packing | None = None,
        gradients: Mapping[str, NDArray] | None = None,
    ) -> None:
        Packed().check_context(ctx)
        if trace.form.updates and updates is None:
            raise ArgumentError(
                "a plan made with realisation='updating' updates the parameters within the step, "
                "and nothing was given that does so; train by TrainStep with a trainer, or by "
                "Module, or give updates"
            )
        lowered = lower(trace, schedule)
        if packing is None:
            packing = pack(lowered.schedule)
        else:
            check_packing(lowered.schedule, packing)
        if memory is None or memory.nbytes < packing.nbytes:
            memory = PackedMemory(packing.nbytes, ctx)
        self.memory = memory
        self._mode, self._scope = Mode(), StepScope()
        mode = self._mode if operators is not None and operators.are_all_kept else None
        self._updates = updates if trace.form.updates else None
        outside = _outside(trace, lowered, ctx, gradients or {})
        layouts = in_layouts_of_unplanned(trace, lowered, ctx)
        of_steps = StepArrays(lowered, packing.offsets, memory, arrays, outside, layouts)
        self._calls = Calls(of_steps, mode, operators, self._updates).calls()
        self._middle = second_half(lowered.schedule)
        self._update_calls = [call for call in self._calls if isinstance(call, UpdateCall)]
        self._weights = {call.name: call.weight for call in self._update_calls}
        self._bundles: dict[tuple[int, int], list[Bundle]] = {}
        if self._updates is not None:
            self._updates.serve(self)
        self._kind = False, False, False
        self._trace, self._schedule = trace, schedule
        self._mib = packing.nbytes >> 20
        self._monitor: Monitor | None = None
        self._is_unfinished = False
        self.outputs, self._kept = _outputs(trace, of_steps)
        in_memory = of_steps.in_memory()
        self._fences = _fences(self._calls, memory, in_memory)
        self._left = memory.fences(self.outputs, in_memory)

    def forward(self, is_train: bool = True) -> list[NDArray]:
        """Run a step; the outputs."""
        if self._updates is None:
            self._begin()
            self._run(0, len(self._calls))
        else:
            with self._updates.step(self._weights):
                updates = self._updates
                kind = updates.in_turn, updates.by_operators, updates.are_changing
                if kind[:2] != self._kind[:2]:  # the optimizer is another one
                    self.forget_updates()
                elif kind != self._kind:
                    self._bundles.clear()
                self._kind = kind
                self._begin()
                self._run(0, len(self._calls))
        return self.outputs

    def forget_updates(self) -> None:
        """Hold no states of an optimizer, between two steps: neither do bundles that were kept."""
        self._bundles.clear()
        for call in self._update_calls:
            call.forget()

    def first(self) -> None:
        """Run the first half of a step."""
        self._begin()
        self._run(0, self._middle)

    def second(self) -> None:
        """Run the second half of a step. Nothing else has run in the memory since the first."""
        self._run(self._middle, len(self._calls))

    def _begin(self) -> None:
        """Before a step."""
        self.memory.begin(self._left)
        if self._is_unfinished:
            for call in self._calls:
                if isinstance(call, RecordedCall):
                    call.forget()
        self._is_unfinished = True

    def _prepare(self) -> None:
        """Before calls are made."""
        self._mode.is_training = self._scope.was_training
        self.memory.prepare()

    def _run(self, begin: int, end: int) -> None:
        """Run the step from the call ``begin`` to before ``end``."""
        try:
            with self._scope:
                self._make(begin, end)
        except BaseException:  # Ctrl-C may have come before the scope was left
            self._scope.restore()
            raise
        self._is_unfinished = end < len(self._calls)
        if not self._is_unfinished:
            self.memory.end(self._kept)

    def _make(self, begin: int, end: int) -> None:
        """Make these calls, within the scope."""
        self._prepare()
        if self._monitor is not None or not bundles():
            for step in range(begin, end):
                self.memory.alone(self._calls[step])
                if self._monitor is not None:
                    self._monitor.show(step)
        else:
            for bundle in self._bundled(begin, end):
                first = bundle.calls[0]
                if first in self._fences:
                    self.memory.apart(first, self._fences[first])
                elif first.is_alone:
                    self.memory.alone(first)
                else:
                    self.memory.bundled(bundle)

    def _bundled(self, begin: int, end: int) -> list[Bundle]:
        """The calls from ``begin`` to ``end`` in the bundles in which the engine gets them."""
        if (begin, end) not in self._bundles:
            self._bundles[begin, end] = _bundles(self._calls[begin:end], are_changing=self._kind[2])
        return self._bundles[begin, end]

    def timed(self) -> list[float]:
        """Run a step, one call after the other; the seconds of each, and of waiting for it.

        Parameters must not be updated within the step.
        """
        self.memory.begin(self._left)
        with self._scope:
            self._prepare()
            return [self.memory.timed(call) for call in self._calls]

    def set_monitor_callback(self, callback: Callable[..., Any], monitor_all: bool = False) -> None:
        """Call ``callback`` with every output of every op, as MXNet's executors do.

        Ops then run one by one. UsageError for ``monitor_all``, which wants their inputs, too.
        """
        check_monitor(monitor_all)
        outputs = [call.outputs for call in self._calls]
        self._monitor = Monitor(callback, list(zip(self._nodes(), outputs, strict=True)))

    def debug_str(self) -> str:
        """The ops in order and the memory, as MXNet's executors describe theirs."""
        lines = [f"Op:{node.op}, Name={node.name}" for node in self._nodes()]
        lines.append(f"Total {self._mib} MB allocated")
        lines.append("Total 0 TempSpace resource requested")  # mx.mod.Module counts lines
        return "\n".join(lines) + "\n"

    def _nodes(self) -> list[Node]:
        """The node of every step; made anew, as they would take as much memory as the calls."""
        return step_nodes(lower(self._trace, self._schedule))


def _fences(
    calls: Iterable[AnyCall], memory: PackedMemory, in_memory: Sequence[NDArray]
) -> dict[AnyCall, Any]:
    """For each call of autograd's the markers that keep its place among the calls in turn."""
    return {
        call: memory.fences(call.touched, in_memory)
        for call in calls
        if isinstance(call, BackwardCall) and call.touched is not None
    }


def _outputs(trace: Trace, arrays: StepArrays) -> tuple[list[NDArray], list[range]]:
    """The arrays of the network's outputs, then of the gradients that the step leaves.

    And the bytes of the memory that these are.
    """
    sources = iter(arrays.lowered.schedule.heads)
    outputs, places = [], []
    for node, k in trace.heads:
        if node.is_variable:
            outputs.append(arrays.arguments[node.name])
        elif node.op != UPDATE:
            step = next(sources)
            outputs.append(arrays.value(step, k))
            places.append(arrays.place(step, k))
    return outputs, places


def _outside(
    trace: Trace, lowered: Lowered, ctx: mx.Context, given: Mapping[str, NDArray]
) -> dict[tuple[int, int], Outside]:
    """The gradients outside of the memory, by the step that computes each, and which output it is.

    In the arrays ``given``, or in new ones.
    """
    requests = trace.grad_req
    noutputs = len(trace.heads) - len(wanted(requests))
    outside = trace.form.outside(trace.heads, noutputs, requests)
    names = [""] * noutputs + wanted(requests)
    tensors = [
        entry for entry in zip(names, trace.heads, strict=True) if not entry[1][0].is_variable
    ]
    result = {}
    for (name, (node, k)), step in zip(tensors, lowered.schedule.heads, strict=True):
        if (node, k) in outside:
            is_added = requests[name] == "add"
            array = given.get(name)
            if array is None:
                stype = "default" if is_added else "row_sparse"
                array = mx.nd.zeros(trace.shapes[name], ctx, trace.dtypes[name], stype=stype)
            result[step, k] = Outside(array, is_added)
    return result


def _bundles(calls: Iterable[AnyCall], *, are_changing: bool) -> list[Bundle]:
    """``calls`` in the bundles in which the engine gets them; some stand alone.

    No bundle that may be kept has calls that keep it from that, as far as is known by now, nor
    updates that ``are_changing``, if the calls beside these are many.
    """
    result: list[Bundle] = []
    for (apart, _), group in groupby(calls, key=lambda call: (call.is_alone, call.may_be_direct)):
        for rest in _beside_updates(group) if are_changing else [list(group)]:
            while rest:
                size = 1 if apart else min(GROWTH ** len(result), BUNDLE)
                result.append(Bundle(rest[:size]))
                del rest[:size]
    return result


def _beside_updates(calls: Iterable[AnyCall]) -> Iterator[list[AnyCall]]:
    """``calls`` in their order, in parts: many that are no updates are a part of their own."""
    part: list[AnyCall] = []
    for is_update, group in groupby(calls, key=lambda call: isinstance(call, UpdateCall)):
        some = list(group)
        if is_update or len(some) < BESIDE:
            part += some
        else:
            yield part
            yield some
            part = []
    yield part
