"""The calls of planned blocks, and the functions of MXNet's that finish their steps.

What a planned block returns under autograd.record() is a variable to autograd: its graph begins
there. So the rest of the step must run right after autograd's backward, in the thread that called
it, before anything else is asked of MXNet's engine, which then orders gradients, statistics and
updates as it always does. The backward function of an autograd.Function or a Custom op comes too
late: another thread runs it, when the optimizer's updates may have been asked for already. Hence
the functions of MXNet's that scripts call are wrapped.
"""

from __future__ import annotations

import functools
import gc
import inspect
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet import autograd

from memplan.errors import UsageError
from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.arrays.gradients import passed_on
from memplan.mxnet.train.arrays.nesting import leaves, listed, one_context
from memplan.mxnet.train.arrays.parameters import is_trained
from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss
from memplan.mxnet.train.blocks.block_parameters import GivenArrays, reason_unknown
from memplan.mxnet.train.blocks.cached_graphs import make_graph, may_read_trained
from memplan.mxnet.train.blocks.kept_by_cells import cells_use_arrays
from memplan.mxnet.train.evaluation import is_evaluation
from memplan.mxnet.train.first_half import FirstHalf, differentiate, overwriting, warn_of_shared
from memplan.mxnet.train.own_calls import OwnCalls
from memplan.mxnet.train.taking_turns import TURN, is_mxnets_thread
from memplan.mxnet.train.train_step import TrainStep
from memplan.util.weak_keys import keys_of

Block = Any

# Of so many calls of a block on a context, since the last of which the step was finished, it is
# known that backward must not go through them: they hold what the block returned.
REMEMBERED = 8

_GONE = (
    "backward goes through an earlier call of a planned block, or through one for the second time, "
    "and what it needs is no longer there (F.BlockGrad of an earlier output counts as going "
    "through it, detach() does not); call a planned block once and backward once in every step, "
    "and call it under autograd.pause(train_mode=True) where nobody wants gradients; or train it "
    "unplanned"
)


class PlannedCalls:
    """The steps of a planned block, which was planned by these ``options``."""

    def __init__(self, block: Block, step: TrainStep, options: dict[str, Any]) -> None:
        self.step, self.options = step, options
        #: The last calls on each context whose steps are finished, or never will be.
        self._past: dict[mx.Context, deque[FirstHalf]] = {}
        self._given = GivenArrays([block])
        self.calls = OwnCalls()
        _wrap()
        _ALL[self] = None

    def forward(self, block: Block, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What ``block`` returns, and by its plan where it trains."""
        self.calls.nforwards += 1
        unplanned_forward = block._memplan_unplanned.forward.__get__(block)
        if named:
            args, named = _by_place(unplanned_forward, args, named)
        others = {type(i).__name__ for i in leaves(args) if not isinstance(i, mx.nd.NDArray)}
        others.update(named)
        arrays = any(isinstance(i, mx.nd.NDArray) for i in leaves(args))
        trains = autograd.is_recording() and autograd.is_training() and is_trained(block)
        trains = trains and not any(isinstance(i, mx.sym.Symbol) for i in leaves(args))
        if trains and others:
            self._warn_of_unplanned(
                f"it is called with more than arrays ({', '.join(sorted(others))}), as MXNet runs "
                f"no graph of a hybridized block so; make an array of it, or an attribute of the "
                f"block"
            )
        elif trains and arrays and is_mxnets_thread():  # before what waits for MXNet
            raise UsageError(
                "a Custom op trains a planned block, in a thread of MXNet's, for which the planned "
                "step may be waiting; call the block outside of the op, or train it unplanned"
            )
        elif trains and (reason := self._given.reason() or reason_unknown(block)):
            trains = False
            self._warn_of_unplanned(reason)
        if is_evaluation():
            self.step.make_room(args)
        if others or not (arrays and trains):
            with cells_use_arrays(block):
                return unplanned_forward(*args, **named)
        ctx = one_context(args)
        with TURN:
            make_graph(block, args, ctx)
            if may_read_trained(block, args):
                self._leave(ctx)
                outputs = self.step.first_half(args)
                if self.is_awaited():
                    _AWAITED[self] = None
                return outputs
        return unplanned_forward(*args)

    def _warn_of_unplanned(self, why: str) -> None:
        text = f"planned block {self.step.block.name!r} trains unplanned where {why}"
        warnings.warn(text, stacklevel=5)

    def _leave(self, ctx: mx.Context) -> None:
        """The step on ``ctx`` that is not finished never will be: another one begins."""
        past = self._past.setdefault(ctx, deque(maxlen=REMEMBERED))
        if any(half.is_finished for half in past):
            past.clear()
        before = self.step.unfinished.get(ctx)
        if before is None:
            return
        if before.belongs_elsewhere():
            raise UsageError(
                f"two threads train the planned block {self.step.block.name!r} on {ctx} at once, "
                f"and there is memory for one step; give each thread a context of its own. A "
                f"thread that leaves its step out says so by block.planned_step.abandon()"
            )
        before.leave()
        past.append(self.step.unfinished.pop(ctx))

    def is_awaited(self) -> bool:
        """Is there a call, of the last ones, that is still to be asked where backward comes?"""
        past = [half for halves in list(self._past.values()) for half in list(halves)]
        return any(half.is_awaited() for half in [*self.step.unfinished.values(), *past])

    def begun(self) -> list[FirstHalf]:
        """The steps that this thread may finish."""
        halves = self.step.unfinished.values()
        return [half for half in halves if not half.belongs_elsewhere()]

    def finished(self) -> list[FirstHalf]:
        """The last steps that are finished, of which what was recorded beside may not be."""
        return [half for halves in self._past.values() for half in halves if half.is_finished]

    def check_past(self, read: ReadByLoss) -> None:
        """UsageError for a loss of what an earlier call returned, or of a step that is finished.

        That is before autograd writes gradients of anything else.
        """
        past = [half for halves in list(self._past.values()) for half in list(halves)]
        if any(half.is_gone_through(read) for half in past):
            raise UsageError(_GONE)

    def after_failure(self) -> None:
        """Leave every step through whose outputs autograd began to go."""
        for half in (*self._pop_reached(), *self._past_reached()):
            half.forget()
            half.leave()

    def _pop_reached(self) -> list[FirstHalf]:
        unfinished = self.step.unfinished
        return [unfinished.pop(ctx) for ctx, h in list(unfinished.items()) if h.is_reached()]

    def _past_reached(self) -> list[FirstHalf]:
        return [half for halves in self._past.values() for half in halves if half.is_reached()]

    def after_backward(self) -> list[FirstHalf]:
        """The steps through whose outputs autograd has gone, of which the rest is to run.

        UsageError where it has gone through an earlier call, whose memory is no longer there.
        """
        halves, gone = self._pop_reached(), self._past_reached()
        if gone:  # by what was not asked before, as a backward within a Custom op
            for half in gone:
                half.forget()
            raise UsageError(_GONE)
        for half in halves:
            self._past[half.bound.executor.ctx].append(half)
        return halves


def _by_place(
    forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``forward`` in their order, as a graph takes them, and those without one."""
    bound = inspect.signature(forward).bind(*args, **named)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _check_mode(half: FirstHalf, asked: _Asked) -> None:
    """UsageError for a ``backward`` through it that is not to train."""
    if not asked.train_mode and half.is_read(asked.read):
        raise UsageError(
            "backward(train_mode=False) goes through a planned block, whose plan computes the "
            "gradients of training; leave train_mode out, or take a block that is not planned"
        )


def _check_statistics(halves: list[FirstHalf]) -> None:
    """UsageError where ``halves`` write the same statistics, in an order that only MXNet knows."""
    written: set[tuple[mx.Context, int]] = set()
    for half in halves if len(halves) > 1 else []:
        ctx = half.bound.executor.ctx
        for parameter in half.bound.statistics():
            if (ctx, id(parameter)) in written:
                raise UsageError(
                    f"planned blocks that share {parameter.name!r} were differentiated by one "
                    f"backward, and MXNet would update it in the order in which the graph of the "
                    f"loss has them, which memplan does not know; make one block of them, or call "
                    f"backward for each before the next is called, with grad_req='add'"
                )
            written.add((ctx, id(parameter)))


#: In the order in which they were planned, in which the rest of their steps runs.
_ALL: WeakKeyDictionary[PlannedCalls, None] = WeakKeyDictionary()

#: Those that are to stay for a ``backward``, though nobody else may have them by then: a function
#: that makes a block and returns a loss, say. MXNet's graph holds the outputs, not the block.
_AWAITED: dict[PlannedCalls, None] = {}


def _let_go(phase: str, _: Any) -> None:
    """Before Python looks for what nobody has: the blocks whose losses are gone are not awaited.

    A block and its step have each other, so that they do not go before.
    """
    for block in list(_AWAITED) if phase == "start" else []:
        if not block.is_awaited():
            _AWAITED.pop(block, None)


@functools.cache
def _wrap() -> None:
    """Wrap MXNet's functions, the first time, and hear of Python's collections."""
    gc.callbacks.append(_let_go)
    # The last is that of scripts for MXNet 0.10; its compute_gradient calls it.
    for owner in (mx.nd.NDArray, mx.autograd, mx.contrib.autograd):
        wrap(owner, "backward", with_second_halves)


def with_second_halves(backward: Callable[..., None]) -> Callable[..., None]:
    """``backward``, then the second halves of the steps that it has reached.

    Custom ops may call it, too, but not through a planned block: they run in MXNet's threads.
    """

    @functools.wraps(backward)
    def wrapped(*args: Any, **options: Any) -> None:
        # What is checked is what MXNet gets: some can be gone through once.
        args = (*map(listed, args[:1]), *args[1:])
        options |= {name: listed(options[name]) for name in ("heads", "outputs") if name in options}
        if is_mxnets_thread():
            backward(*args, **options)
            return
        # What is reached when autograd returns was reached by this thread.
        with TURN:
            blocks = keys_of(_ALL)
            try:
                asked = _Asked.by(args, options)
                _finish_steps(blocks, asked, lambda: backward(*args, **options))
            except BaseException:  # Ctrl-C, too, after which a notebook may go on
                for block in blocks:
                    block.after_failure()
                raise

    return wrapped


@dataclass(frozen=True)
class _Asked:
    """What a script asks of ``backward``: what its losses read, and how it is to go through that.

    All functions of MXNet's that are wrapped have their arguments in one order.
    """

    read: ReadByLoss
    train_mode: bool
    retains_graph: bool

    @classmethod
    def by(cls, args: tuple[Any, ...], options: dict[str, Any]) -> _Asked:
        """What these arguments ask for."""
        named = [options.get("heads"), options.get("outputs")]
        return cls(
            ReadByLoss(leaves([*args[:1], *named])),
            train_mode=bool([*args[3:4], options.get("train_mode", True)][0]),
            retains_graph=bool([*args[2:3], options.get("retain_graph", False)][0]),
        )


def _finish_steps(blocks: list[PlannedCalls], asked: _Asked, backward: Callable[[], None]) -> None:
    """Call ``backward``, and run the second halves of the steps of ``blocks`` that it reaches.

    UsageError, before that, for what it is not to go through.
    """
    begun = [half for block in blocks for half in block.begun()]
    finished = [half for block in blocks for half in block.finished()]
    for block in blocks:
        block.check_past(asked.read)
    for half in begun:
        half.check(asked.read)
        _check_mode(half, asked)
    warn_of_shared(begun, asked.read)
    for half in finished:
        half.bound.gradients.check(asked.read)
    with overwriting(begun):
        with passed_on([half.late for half in finished if half.late], asked.read):
            differentiate(backward, asked.read, begun)
        halves = [half for block in blocks for half in block.after_backward()]
        _check_statistics(halves)
        for half in halves:
            half.finish(retains_graph=asked.retains_graph)
