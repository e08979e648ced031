"""A block that trains by a plan in the loop that its user has: called, and differentiated.

What a planned block returns under autograd.record() is a variable to autograd: its graph begins
there. So the rest of the step must run right after autograd's backward, in the thread that called
it, before anything else is asked of MXNet's engine, which then orders gradients, statistics and
updates as it always does. The backward function of an autograd.Function or a Custom op comes too
late: another thread runs it, when the optimizer's updates may have been asked for already. Hence
the two functions of MXNet's that scripts call are wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import mxnet as mx
from mxnet import autograd

from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.train.bound_step import FirstHalf
from memplan.mxnet.train.nesting import leaves, one_context
from memplan.mxnet.train.train_step import TrainStep

Block = Any


def planned(block: Block, **options: Any) -> Block:
    """``block`` itself, which from now on trains by a plan, in a loop that stays as it is.

    ``options`` are those of :class:`TrainStep`: ``budget``, ``realisation`` and the like. Called
    under ``autograd.record()``, the block runs the forward part of its plan;
    ``loss.backward()`` or ``autograd.backward(losses)`` of a loss computed from what it returned
    runs the rest. Everything else, inference included, is as before; ``block.planned_step`` is the
    TrainStep. For this ``NDArray.backward`` and ``mx.autograd.backward`` are wrapped, once.

    Raises what TrainStep raises; UsageError where the graph of a step is differentiated twice, or
    that of an earlier call after a later one, for both would need memory that is gone;
    ArgumentError for a block that is planned already, or a trainer.
    """
    if options.get("trainer") is not None:
        raise ArgumentError("a planned block needs no trainer: the loop calls trainer.step itself")
    if hasattr(block, "planned_step"):
        raise ArgumentError(f"block {block.name!r} is planned already")
    step = TrainStep(block, **options)
    kind = type(block)
    block.__class__ = type(kind.__name__, (_Forward, kind), {"__module__": kind.__module__})
    block.planned_step, block._past = step, {}
    _wrap()
    _ALL.add(block)
    return block


class _Forward:
    """What a planned block does first when it is called."""

    planned_step: TrainStep
    #: The steps that are finished, or never will be, by context.
    _past: dict[mx.Context, FirstHalf]

    def forward(self, *args: Any) -> Any:
        given = list(leaves(args))
        arrays = all(isinstance(array, mx.nd.NDArray) for array in given)
        if not (given and arrays and autograd.is_recording() and autograd.is_training()):
            return super().forward(*args)  # type: ignore[misc]
        ctx = one_context(args)
        before = self.planned_step.unfinished.pop(ctx, None)
        self._past = {place: half for place, half in self._past.items() if place != ctx}
        if before is not None:
            self._past[ctx] = before
        return self.planned_step.first_half(args).outputs

    def after_backward(self) -> None:
        """Run the rest of every step through whose outputs autograd has gone."""
        unfinished = self.planned_step.unfinished
        if any(half.is_reached() for half in self._past.values()):
            self._past.clear()
            unfinished.clear()
            raise UsageError(
                "backward went through an earlier call of a planned block, or through one for the "
                "second time, and what it needs is no longer there; call a planned block once and "
                "backward once in every step, or train it unplanned"
            )
        for ctx in [ctx for ctx, half in unfinished.items() if half.is_reached()]:
            self._past[ctx] = unfinished.pop(ctx)
            self._past[ctx].finish()


_ALL: WeakSet[_Forward] = WeakSet()


@functools.cache
def _wrap() -> None:
    """Wrap MXNet's functions, the first time."""
    mx.nd.NDArray.backward = _with_plans(mx.nd.NDArray.backward)
    mx.autograd.backward = _with_plans(mx.autograd.backward)


def _with_plans(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def wrapped(*args: Any, **options: Any) -> None:
        backward(*args, **options)
        for block in list(_ALL):
            block.after_backward()

    return wrapped
