"""The memory that what runs on a device shares: it runs in turn, one executor for each shape."""

from __future__ import annotations

import dataclasses
import gc
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx

from memplan.memory.blocks import allocate
from memplan.mxnet.realise.estimate.workspace_estimate import executor_nbytes
from memplan.mxnet.realise.in_place import kept_in_training
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.train.arrays.gradients import Gradients
from memplan.mxnet.train.arrays.input_memory import InputMemory
from memplan.mxnet.train.arrays.marks import REMEMBERED, Earlier
from memplan.planning.plan import Plan
from memplan.step.schedule import Schedule
from memplan.util.heap import KEPT_NBYTES, give_back_what_is_free, keep_below, returning_ends

# What MXNet's thread frees to return what is free at the end of its memory: glibc looks there
# where 64 KiB and more are freed, and has what is below 128 KiB in that memory.
_FREED_NBYTES = 96 << 10

NDArray = Any


@dataclass(frozen=True)
class Need:
    """Memory to run in: ``blocks`` of an executor of MXNet's, or one array, bytes each.

    Beside it operators take what the plan of a step counts, or ``of_inference_nbytes``.
    """

    blocks: tuple[int, ...] = ()
    packed_nbytes: int = 0
    is_step: bool = False
    of_inference_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.blocks) + self.packed_nbytes + self.of_inference_nbytes

    def times(self, factor: float) -> Need:
        """This for inference with so many times the inputs."""
        blocks = tuple(math.ceil(factor * nbytes) for nbytes in self.blocks)
        return Need(blocks, of_inference_nbytes=math.ceil(factor * self.of_inference_nbytes))


class Pool:
    """Memory in which steps and inference run in turn.

    MXNet gives every block of a further executor, the largest first, the smallest unused block
    that is large enough, and adds one where there is none (src/executor/graph_executor.cc,
    InitDataEntryMemory): what two executors hold is more than what either needs. Packed steps
    share an array, and executors have none of it.
    """

    def __init__(self) -> None:
        #: The executor that was bound first, to bind others with; None if there is none.
        self.executor: mx.executor.Executor | None = None
        # The memories of packed steps, each larger than those before it.
        self._memories: list[PackedMemory] = []
        #: For the inputs of the steps of a block.
        self.inputs = InputMemory()
        #: By which autograd knew parameters in the steps that ran here before.
        self.earlier: Earlier = deque(maxlen=REMEMBERED)
        self._gradients: Gradients | None = None
        self._blocks: list[int] = []
        self._arrays_nbytes = self._of_inference_nbytes = 0
        # What the operators of the plans' steps take at most, and whether a step is bound.
        self._of_steps_nbytes, self._has_step = 0, False
        self._room = 0
        #: Is there a budget that inference must keep, too?
        self.is_limited = True
        self._is_new, self._is_given_back = True, False

    def begin(self, ctx: mx.Context) -> None:
        """Before the first step here, give back the memory of models that nobody has any more.

        A block of Gluon refers to itself, and a planned one and its step to each other: they, and
        the gradients in the array of the step, go when Python looks for garbage. It does so when
        so many objects have been made, however large the arrays are.
        """
        if self._is_new:
            self._is_new = False
            gc.collect()
            release(ctx)

    def allow(self, plan: Plan) -> None:
        """All may take what the budget of ``plan`` leaves; without one, what the plan takes.

        Of several plans the largest counts.
        """
        room = plan.allocated_nbytes
        if plan.budget_nbytes is None:
            self.is_limited = False
        else:
            room += plan.budget_nbytes - plan.total_nbytes
        self._room = max(self._room, room)
        self._of_steps_nbytes = max(self._of_steps_nbytes, plan.workspace_nbytes)

    @property
    def memory(self) -> PackedMemory | None:
        """The largest memory of packed steps; None if there is none."""
        return self._memories[-1] if self._memories else None

    @property
    def nbytes(self) -> int:
        """What all that was bound here holds, but for what operators take."""
        return sum(self._blocks) + self._arrays_nbytes

    def admits(self, need: Need) -> bool:
        """Is there room for this? In an empty pool there is."""
        if not self.nbytes:
            return True
        more = sum(self._lacking(need.blocks))
        if need.packed_nbytes > (0 if self.memory is None else self.memory.nbytes):
            more += need.packed_nbytes
        if not more and not self.is_limited:
            return True
        return self.nbytes + more + self._beside(need) <= self._room + self._of_steps_nbytes

    @property
    def can_give_back(self) -> bool:
        """Is there a budget, and memory that packed steps can give back until the next one runs?"""
        return self.is_limited and any(memory.can_give_back for memory in self._memories)

    def give_back(self, ctx: mx.Context) -> None:
        """Until the next step, give back what packed steps hold and nobody can read."""
        release(ctx)
        for memory in self._memories:
            if memory.can_give_back:
                memory.give_back()
                self._is_given_back = True
        # MXNet makes the arrays of each evaluation anew: to return them between would take longer.
        keep_below(KEPT_NBYTES)

    def take_back(self, ctx: mx.Context) -> None:
        """Before a step: have evaluations, to which memory was given back, leave theirs."""
        if self._is_given_back:
            self._is_given_back = False
            release(ctx)

    def add(
        self, need: Need, executor: mx.executor.Executor | None, memory: PackedMemory | None = None
    ) -> None:
        """An ``executor`` has been bound here, or a packed step that runs in ``memory``."""
        self._blocks += self._lacking(need.blocks)
        self._has_step = self._has_step or need.is_step
        self._of_inference_nbytes = max(self._of_inference_nbytes, need.of_inference_nbytes)
        self.executor = self.executor or executor
        if memory is not None and memory is not self.memory:
            self._arrays_nbytes += memory.nbytes
            self._memories.append(memory)

    def make_room(self, ctx: mx.Context) -> None:
        """Where nothing is bound on ``ctx`` now, free what was bound, in whose place a step comes.

        On a device there may be no room for both.
        """
        if not self.nbytes and self._gradients is not None:
            self._gradients.leave()
            release(ctx)

    def serve(self, gradients: Gradients) -> None:
        """The step that computes these runs next: those of the one before it are to be kept."""
        last, self._gradients = self._gradients, gradients
        if last is not None and last is not gradients:
            gradients.follow(last)

    def is_held_from(self, gradients: Gradients) -> bool:
        """May a script hold what the step before has left here, where these gradients come?"""
        last = self._gradients
        return last is not None and last is not gradients and last.are_orphaned()

    def clear(self) -> None:
        """Let go of all that was bound; what is allowed stays."""
        self.executor = None
        self._memories.clear()
        self.inputs.clear()
        self._blocks.clear()
        self._arrays_nbytes = self._of_inference_nbytes = 0
        self._has_step = False

    def _beside(self, need: Need) -> int:
        """What the operators of what is bound, and of this, take; 0 where the plans count none."""
        if not self._of_steps_nbytes:
            return 0
        of_steps = self._of_steps_nbytes if self._has_step or need.is_step else 0
        return of_steps + max(self._of_inference_nbytes, need.of_inference_nbytes)

    def _lacking(self, blocks: Sequence[int]) -> list[int]:
        free = sorted(self._blocks)
        lacking = []
        for size in sorted(blocks, reverse=True):
            place = bisect_left(free, size)
            if place < len(free):
                free.pop(place)
            else:
                lacking.append(size)
        return lacking


def release(ctx: mx.Context) -> None:
    """Give the memory of arrays that nobody holds any more back to the device, now.

    On a CPU the C library has kept the smaller ones, and the next executor's may not fit there.
    What is made from now on is not kept, until a step says otherwise.
    """
    mx.nd.waitall()
    ctx.empty_cache()
    if ctx.device_type != "gpu":
        keep_below(0)
        with returning_ends():
            mx.nd.zeros((_FREED_NBYTES,), ctx, "int8").wait_to_read()  # in MXNet's thread
            mx.nd.waitall()
        give_back_what_is_free()


def training_need(plan: Plan) -> Need:
    """What the step of a ``plan`` runs in."""
    if plan.trace.form.in_one_array:
        return Need(packed_nbytes=plan.allocated_nbytes, is_step=True)
    lowered = lower(plan.trace, plan.schedule).schedule
    return Need(allocate(lowered, match_range=plan.match_range).blocks, is_step=True)


def inference_need(trace: Trace, device_type: str) -> Need:
    """What :func:`memplan.mxnet.realise.bind.bind_inference` runs in.

    What its operators take is known on a CPU: an estimate, as that of steps is.
    """
    graph = trace.graph
    ops = [*graph.ops[: graph.nforward]]
    by_onednn = is_by_onednn(device_type)
    if by_onednn:
        kept = kept_in_training(graph, trace.nodes, trace.stock_order)
        for index, tensors in kept.items():
            left = [h for h in ops[index].handovers if ops[index].inputs[h.input] not in tensors]
            ops[index] = dataclasses.replace(ops[index], handovers=tuple(left))
    ntensors = sum(len(op.outputs) for op in ops)
    forward = dataclasses.replace(
        graph,
        ops=tuple(ops),
        tensors=graph.tensors[:ntensors],
        heads=trace.output_tensors,
    )
    beside = 0
    if by_onednn:
        nodes = trace.nodes[: graph.nforward]
        beside, *_ = executor_nbytes(forward, nodes, leaves_holes=False)
    return Need(allocate(Schedule.unplanned(forward)).blocks, of_inference_nbytes=beside)
