"""Training a Gluon block by a plan: forward, backward and recomputation in one call, or in two.

step = TrainStep(net, gluon.loss.SoftmaxCrossEntropyLoss(), budget="4GiB")
for x, y in batches:
    loss = step(x, y)
    trainer.step(x.shape[0])

step = TrainStep(net, budget="4GiB")
for x, y in batches:
    with autograd.record():
        loss = any_function(step.forward(x), y)
    step.backward(loss)
    trainer.step(x.shape[0])
"""

from __future__ import annotations

import sys
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.train.arrays.nesting import Arrays, as_inputs, one_context, per_context, specs_of
from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss
from memplan.mxnet.train.autograd_grad import refuse_grad
from memplan.mxnet.train.block_plans import BlockPlans, Params
from memplan.mxnet.train.blocks.block_network import BlockNetwork
from memplan.mxnet.train.blocks.block_parameters import GivenArrays, check_arrays
from memplan.mxnet.train.blocks.called_with_symbols import trained_blocks
from memplan.mxnet.train.blocks.hooks import call_after, call_before
from memplan.mxnet.train.bound_step import BoundStep
from memplan.mxnet.train.evaluation import make_room, make_room_before_calls
from memplan.mxnet.train.first_half import FirstHalf, differentiate, heads_of, overwriting
from memplan.mxnet.train.given_once import GivenOnce
from memplan.mxnet.train.parameters_of_step import contexts_of_params
from memplan.mxnet.train.pool import Pool, release, training_need
from memplan.mxnet.train.step_trainer import StepTrainer
from memplan.mxnet.train.taking_turns import in_turn
from memplan.planning.plan import Plan
from memplan.planning.planner import Budget
from memplan.planning.realisation import UPDATING, may_pack, runs_whole_steps
from memplan.planning.shapes import ShapePlanner
from memplan.step.costs import Costs
from memplan.strategies import Strategy
from memplan.util.arguments import flag, with_named_options
from memplan.util.numbers import plain, shown

# What MXNet says of a loss that autograd has not recorded, between names of its own sources.
_NOT_RECORDED = ("is not in a computational graph", "no inputs in computation graph")


class TrainStep:
    """Trains ``block`` by a plan: in place of autograd.record() and backward().

    ``step(x, y)`` returns the loss and leaves the gradients in the parameters, as
    ``loss.backward()`` does; then comes ``trainer.step(batch_size)``. The parameters stay those of
    ``block``, which serves for inference, saving and exporting as before. They may be cast, frozen,
    moved or set anew in between. Whoever changes what a layer computes, such as the probability of
    DropBlock, calls ``block.hybridize()``, as for MXNet's own graph of the block; one of the
    script's that is not hybridized runs in every step, with Symbols, as does a function for a loss.

    Every new combination of input shapes is planned when it is first seen, or asked for by
    :meth:`plan`; :attr:`plans` has them all. They share their memory; where that would exceed the
    budget, they are bound in turn.

    - ``loss`` is a gluon Loss or any function of the block's outputs and the labels that works on
      Symbols; it may return several losses. A list of losses takes one output and one label each.
      None: the block itself computes the loss, of the inputs and the labels; or the caller does,
      of arrays, between :meth:`forward` and :meth:`backward`.
    - ``budget`` (for one context; a share is one of each step), ``strategy``, ``time_limit``,
      ``costs`` and ``reserve`` are those of :func:`memplan.plan`.
    - ``realisation`` is "packed", "explicit" or "auto", the first of these that can train it.
    - ``unseen`` says how shapes after the first are planned: with a tenth of the work, from a
      schedule that is known ("plan"), or as "nearest" or "unplanned" (docs/training.md).
    - With ``keep_outputs`` the block's outputs stay in memory to the end of the step, in
      :attr:`outputs`, for metrics.
    - With ``trainer`` a step does what ``trainer.step`` does, too, with its ``ignore_stale_grad``.
      A packed step updates each parameter as soon as its gradient is complete, and leaves no
      gradients; where the trainer cannot do that, a warning says why, and it ends by that call.

    Raises ArgumentError for arguments that cannot be used, such as a block that is no HybridBlock.
    """

    block, loss, keep_outputs = GivenOnce(), GivenOnce(), GivenOnce()

    @with_named_options
    def __init__(
        self,
        block: mx.gluon.HybridBlock,
        loss: Any = None,
        *,
        budget: Budget = None,
        strategy: str | Strategy = "auto",
        time_limit: float = 60,
        costs: Costs | None = None,
        reserve: int | str = 0,
        realisation: str = "auto",
        keep_outputs: bool = False,
        unseen: str = "plan",
        trainer: mx.gluon.Trainer | None = None,
        ignore_stale_grad: bool = False,
    ) -> None:
        self._blocks = trained_blocks(block, loss)
        if not runs_whole_steps(realisation) or realisation == UPDATING:
            raise ArgumentError(
                f"realisation must be 'auto', 'packed' or 'explicit' for a Gluon block, got "
                f"{shown(realisation)}: Gluon ignores what mirroring marks, and packed steps of "
                f"TrainStep(trainer=...) update the parameters as they are"
            )
        self._trainer = StepTrainer(trainer, may_pack(realisation), ignore_stale_grad)
        self.block, self.loss = block, loss
        self.keep_outputs = flag("keep_outputs", keep_outputs)
        #: The block's outputs in the last step, with ``keep_outputs``; else None.
        self.outputs: Arrays = None
        planner = ShapePlanner(
            budget=budget,
            strategy=strategy,
            realisation=realisation,
            time_limit=time_limit,
            costs=costs,
            reserve=reserve,
            optimizer=self._trainer.optimizer,
            unseen=unseen,
            share_of_first=False,
        )
        self._plans = BlockPlans(
            self._blocks, loss, planner, self._trainer, keep_outputs=self.keep_outputs
        )
        self.graphs = self._plans.graphs
        self._bound: dict[Any, BoundStep] = {}
        self._pools: dict[mx.Context, Pool] = {}
        #: The steps of which only the first half has run, by context.
        self.unfinished: dict[mx.Context, FirstHalf] = {}
        self._given = GivenArrays(self._blocks)

    @property
    def plans(self) -> dict[tuple[tuple[int, ...], ...], Plan]:
        """By shapes of inputs and labels: the plan last made, of any dtypes, in halves or whole."""
        return self._plans.by_shapes()

    @in_turn
    def plan(self, x: Arrays, y: Arrays = None, *, in_halves: bool = False) -> Plan:
        """The plan for such inputs and labels: arrays, or shapes of float32 arrays.

        With ``in_halves`` that by which :meth:`forward` and :meth:`backward` run.
        """
        batch = (per_context(x, y) or [(x, y)])[0]
        params = self._plans.params()
        kind = specs_of((as_inputs(batch[0]), batch[1])), in_halves
        ctx = contexts_of_params(params.values())[0]
        network = self._plans.forget_changed(kind, self._bound.values(), to_run=False)
        return self._plans.find(kind, params, ctx, network)[0]

    @in_turn
    def __call__(
        self,
        x: Arrays,
        y: Arrays = None,
        *more: Arrays,
        scale: float = 1.0,
        batch_size: int | None = None,
    ) -> Arrays:
        """Run a training step on inputs ``x`` and labels ``y``; the loss, as the loss returns it.

        ``x`` is an array or a tuple of the block's inputs, ``y`` whatever the loss takes as
        labels. To train on several contexts, give lists with an entry for each of them, as
        ``split_and_load`` makes them; then the losses are such a list too. The gradients are
        those of ``scale`` times the loss; with AMP:
        ``with amp.scale_loss(1.0, trainer) as scale: loss = step(x, y, scale=scale)``.

        The block is in training mode, wherever this is called, as under ``autograd.record()``.
        ``batch_size`` is what ``trainer.step`` would be called with, for a step that was given a
        trainer; None: the first dimension of the first input, on all contexts together.

        Raises ArgumentError for arrays or parameters that cannot be used and under
        ``autograd.record(train_mode=False)``, TraceError for a network that cannot be planned, and
        whatever :func:`memplan.plan` raises.
        """
        if more:
            raise ArgumentError(
                f"a step takes its inputs and its labels, and got {2 + len(more)} arguments; give "
                f"several inputs, or several labels, as one tuple, step((x1, x2), y), and scale "
                f"and batch_size by their names"
            )
        _check_mode()
        scale = _scale_of(scale)
        batches = per_context(x, y)
        parts = [(as_inputs(x), y) for x, y in batches or [(x, y)]]
        call_before(self, parts)
        self._given.check()
        self._trainer.begin(parts, batch_size)
        with autograd.pause():
            results = [self._ready(part, in_halves=False).step(part, scale) for part in parts]
        self._trainer.finish()
        losses, outputs = zip(*results, strict=True)
        call_after(self, parts, losses if self.loss is None else outputs)
        self.outputs = outputs[0] if batches is None else list(outputs)
        return losses[0] if batches is None else list(losses)

    @in_turn
    def forward(self, *inputs: Arrays, batch_size: int | None = None) -> Arrays:
        """Run the forward part of a step; what the block returns, to compute any loss of it.

        ``inputs`` are those of the block, or one list or tuple of them, or a list with an entry
        for each context. Under ``autograd.record()`` the loss is computed from the arrays returned,
        in Python and by whatever MXNet can differentiate; then :meth:`backward` must be called.
        The arrays are the caller's: no later step writes into them. A trainer updates at the end
        of :meth:`backward`, with ``batch_size``.

        Raises UsageError where backward is missing, and otherwise what calling the step raises.
        """
        if self.loss is not None:
            raise ArgumentError(
                "this TrainStep computes its loss itself: call it, or make one without a loss, "
                "TrainStep(block), for forward and backward"
            )
        _check_mode()
        x = inputs[0] if len(inputs) == 1 else inputs
        batches = per_context(x, None)
        parts = [(as_inputs(batch), None) for batch, _ in batches or [(x, None)]]
        call_before(self, parts)
        self._given.check()
        self._trainer.begin(parts, batch_size)
        outputs = [self.first_half(inputs) for inputs, _ in parts]
        call_after(self, parts, outputs)
        return outputs[0] if batches is None else outputs

    def first_half(self, inputs: tuple[Arrays, ...]) -> Arrays:
        """Run the first half of a step on ``inputs``, which are on one context; its outputs."""
        with autograd.pause():
            bound = self._ready((inputs, None), in_halves=True)
            outputs, half = bound.first_half((inputs, None), self.block)
        refuse_grad(half, self.block)
        self.unfinished[bound.executor.ctx] = half
        return outputs

    @in_turn
    def backward(self, loss: Arrays, head_grads: Any = None) -> None:
        """Run the rest of the step that :meth:`forward` began: gradients of ``loss``, a list too.

        ``head_grads`` are those of the losses, as for ``autograd.backward``; None: ones. Who has
        gradients of the outputs themselves gives the outputs for losses. Outputs on which no loss
        depends have zeros for gradients, as those of a hybridized block have.

        Raises UsageError where no forward has run, ArgumentError for a loss that cannot be
        differentiated, or does not depend on the outputs of the last forward.
        """
        if not self.unfinished:
            raise UsageError("there is nothing to differentiate: call forward() first, every time")
        heads, grads = heads_of(loss, head_grads)
        read, halves = ReadByLoss(heads), self.unfinished.values()
        for half in halves:
            half.check(read)
        with overwriting(halves):
            try:
                differentiate(lambda: autograd.backward(heads, grads), read, halves)
            except mx.MXNetError as error:
                reason = "" if any(text in str(error) for text in _NOT_RECORDED) else f": {error}"
                raise ArgumentError(
                    "the loss cannot be differentiated; compute it under autograd.record() from "
                    f"what forward() returned{reason}"
                ) from error
            unread = [str(ctx) for ctx, half in self.unfinished.items() if not half.is_reached()]
            if unread:
                raise ArgumentError(
                    f"the loss does not depend on what the last forward() returned on "
                    f"{', '.join(unread)}"
                )
            for half in halves:
                half.finish()
        self.unfinished.clear()
        self._trainer.finish()

    def abandon(self) -> None:
        """Leave the steps that :meth:`forward` began in this thread, or in one that has ended."""
        for half in [h for h in self.unfinished.values() if not h.belongs_elsewhere()]:
            half.leave()
            del self.unfinished[half.bound.executor.ctx]

    def make_room(self, inputs: Arrays) -> None:
        """Before MXNet evaluates the block on ``inputs``, in memory of its own."""
        make_room(self._bound, self._pools, inputs)

    def _ready(self, batch: Arrays, *, in_halves: bool) -> BoundStep:
        """The plan for ``batch``, bound."""
        kind, ctx = (specs_of(batch), in_halves), one_context(batch)
        if ctx in self.unfinished:
            raise UsageError(
                "the step that forward() began is not finished: call backward(loss), or abandon()"
            )
        composed = self._plans.forget_changed(kind, self._bound.values(), to_run=True)
        bound = self._bound.get((kind, ctx))
        if bound is None or not bound.is_fit() or self._trainer.is_new_to(bound, in_halves):
            del bound  # whose memory may have to go before there is another
            params = self._plans.params()
            check_arrays(params.values())
            plan, network = self._plans.find(kind, params, ctx, composed, to_run=True)
            bound = self._bound[kind, ctx] = self._bind(plan, network, params, ctx)
            bound.within = self._trainer.updates_within(bound.arguments, in_halves)
        self._pools[ctx].take_back(ctx)
        self._pools[ctx].serve(bound.gradients)
        self._plans.changes.run(kind, ctx)
        bound.prepare((composed or bound.network).form)
        return bound

    def _bind(
        self, plan: Plan, network: BlockNetwork, params: Params, ctx: mx.Context
    ) -> BoundStep:
        """Bind a plan; what was bound before goes if it is stale, or exceeds the budget beside."""
        need, pool = training_need(plan), self._pools.setdefault(ctx, Pool())
        pool.begin(ctx)
        pool.allow(plan)
        unfit = {place for (_, place), other in self._bound.items() if not other.is_current()}
        if not pool.admits(need):
            unfit.add(ctx)
        self._bound = {key: other for key, other in self._bound.items() if key[1] not in unfit}
        for place in unfit:
            self._pools[place].clear()
        pool.make_room(ctx)
        if plan.budget_nbytes is not None and not self.graphs.of_calls:
            make_room_before_calls(self)
        updates = self._trainer.updates() if plan.trace.form.updates else None
        bound = BoundStep(plan, network, params, ctx, pool, updates)
        pool.add(need, bound.executor.pool, bound.executor.memory)
        pool.serve(bound.gradients)
        bound.hand_over_gradients()  # the parameters hold those of what went
        for place in {ctx, *unfit}:
            release(place)
        return bound


def _check_mode() -> None:
    """ArgumentError where layers would compute as in inference."""
    if autograd.is_recording() and not autograd.is_training():
        raise ArgumentError(
            "TrainStep trains in training mode only; call it outside of "
            "autograd.record(train_mode=False). If layers are to compute as in inference, make "
            "BatchNorm with use_global_stats=True, and leave Dropout out"
        )


def _scale_of(scale: Any) -> float:
    """The number that ``scale`` is, or has in it if it is an array; ArgumentError if there is none.

    So it is where MXNet does not read the number. The script may write into its array later.
    """
    value = scale.asnumpy() if isinstance(scale, mx.nd.NDArray) else scale
    number = plain(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)
    is_huge = isinstance(number, int) and abs(number) > sys.float_info.max
    if not isinstance(number, int | float) or is_huge:
        raise ArgumentError(
            f"scale must be a number, got {shown(scale)}; with AMP it is what "
            f"amp.scale_loss(1.0, trainer) gives, else leave it out"
        )
    if 0.0 < abs(number) < sys.float_info.min:
        raise ArgumentError(
            f"scale is {number!r}, and MXNet reads no number so near to 0: it must be 0, or at "
            f"least {sys.float_info.min}"
        )
    return number
