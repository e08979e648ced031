"""Room for what MXNet evaluates of a block between its steps, in memory of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.arrays.nesting import Arrays, contexts_of, leaves
from memplan.mxnet.train.bound_step import BoundStep
from memplan.mxnet.train.pool import Pool
from memplan.mxnet.train.taking_turns import TURN, is_mxnets_thread
from memplan.util.weak_keys import keys_of

# What takes no more stays beside a step: scripts that learn from what they try evaluate one example
# before each step, and small networks would spend more time on giving back than on their steps.
_LEAST_NBYTES, _LEAST_SHARE = 4 << 20, 1 / 32

#: The TrainSteps that were not made by `planned`, which hears of calls itself.
_STEPS: WeakKeyDictionary[Any, None] = WeakKeyDictionary()


def is_evaluation() -> bool:
    """Is what is computed now not to be differentiated, or not in training mode?"""
    return not (autograd.is_recording() and autograd.is_training())


def make_room(
    steps: Mapping[Any, BoundStep], pools: Mapping[mx.Context, Pool], inputs: Arrays
) -> None:
    """Before a block is evaluated on ``inputs``: what its ``steps`` hold is given back until the
    next one, where the budget has no room for both.

    ``steps`` are by kind and context, and ``pools``, in which they run, by context. Where another
    thread has the turn, to run a step, or waits for one as MXNet's own may, all stays.
    """
    full = [ctx for ctx in contexts_of(inputs) if ctx in pools and pools[ctx].can_give_back]
    if not full:  # as in most calls
        return
    if is_mxnets_thread() or not TURN.acquire(blocking=False):
        return
    try:
        for ctx in full:
            nelements = sum(leaf.size for leaf in leaves(inputs) if contexts_of(leaf) == {ctx})
            bound = [step for (_, place), step in steps.items() if place == ctx]
            if not _is_room(pools[ctx], bound, nelements):
                pools[ctx].give_back(ctx)
    finally:
        TURN.release()


def _is_room(pool: Pool, steps: Iterable[BoundStep], nelements: int) -> bool:
    """Is there room beside the ``steps`` for an evaluation of inputs of so many elements?

    What that takes is known of inputs as large as a step's, and taken to be in proportion. Where
    Ctrl-C came as other steps were to take the place of those, nothing is known.
    """
    largest = max(steps, key=lambda step: step.ninputs, default=None)
    if largest is None:
        return False
    need, factor = largest.inference_need, nelements / max(largest.ninputs, 1)
    if factor * need.nbytes <= max(_LEAST_NBYTES, _LEAST_SHARE * pool.nbytes):
        return True
    return pool.admits(need.times(factor))


def make_room_before_calls(step: Any) -> None:
    """Call ``step.make_room`` before every evaluation of its block."""
    _STEPS[step] = None
    _wrap()


@functools.cache
def _wrap() -> None:
    wrap(mx.gluon.Block, "__call__", _making_room)


def _making_room(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def making_room(block: Any, *args: Any) -> Any:
        for step in keys_of(_STEPS):
            if step.block is block and is_evaluation():
                step.make_room(args)
        return call(block, *args)

    return making_room
