"""A Trainer's part of a step: parameters are updated within it where that gives the same bits."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

from memplan.errors import ArgumentError, TraceError, UsageError
from memplan.mxnet.train.arrays.array_memory import chunk_of, part_of
from memplan.mxnet.train.arrays.nesting import Arrays, leaves
from memplan.mxnet.train.arrays.parameters import is_derived
from memplan.mxnet.train.arrays.withheld import check_fresh
from memplan.mxnet.train.blocks.read_by import is_mxnets
from memplan.mxnet.train.bound_step import BoundStep
from memplan.mxnet.train.updates import OptimizerUpdates, refusal_of_updater, warn_behind
from memplan.planning.plan import Plan
from memplan.planning.realisation import UPDATING, may_pack
from memplan.util.arguments import flag
from memplan.util.numbers import shown

NDArray = Any
Parameter = Any

# What Trainer.step does, and what a loop may call in its place.
_METHODS = ("step", "update", "_update", "allreduce_grads", "_allreduce_grads")

# For a TrainStep that updates behind its step, by a trainer with which another one updates within.
_TO_ONE_OF_SEVERAL = (
    "That was another TrainStep with the same trainer, and this one updates behind its step: give "
    "this one ignore_stale_grad=True, with which it may update within, or each of them a trainer "
    "of its own"
)


class StepTrainer:
    """The ``trainer`` of a TrainStep, if it has one: it updates within the step, or behind it.

    ``within`` says whether it may within.
    """

    def __init__(
        self, trainer: gluon.Trainer | None, within: bool, ignore_stale_grad: bool
    ) -> None:
        if trainer is not None and not isinstance(trainer, gluon.Trainer):
            raise ArgumentError(f"trainer must be a gluon.Trainer, got {shown(trainer)}")
        self.trainer = trainer
        self._ignore_stale_grad = flag("ignore_stale_grad", ignore_stale_grad)
        self._within = within
        self._batch_size = 1
        self._is_done = True
        self._notes: set[str] = set()
        #: The arrays that parameters had, and which of these have the same memory.
        self._memories: tuple[list[NDArray], Sequence[Parameter]] = [], ()

    def updates_within(self, params: Iterable[Parameter], in_halves: bool) -> bool:
        """Can those of ``params``, all that a network reads, be updated within its step?

        Not in one that runs ``in_halves``: the caller's loss may have gradients of its own for the
        parameters. Otherwise a warning says why not, once.
        """
        if self.trainer is None or not self._within or in_halves:
            return False
        reason = self._refusal(params, self.trainer)
        if reason is not None:
            self._tell(reason)
        return reason is None

    def is_new_to(self, bound: BoundStep, in_halves: bool) -> bool:
        """Can it update within the step now, and could not when ``bound`` was, or vice versa?"""
        return bound.within is not self.updates_within(bound.arguments, in_halves)

    @property
    def optimizer(self) -> mx.optimizer.Optimizer | None:
        """The optimizer, if it is one of MXNet's: the states of others are not known."""
        optimizer = None if self.trainer is None else self.trainer.optimizer
        return optimizer if type(optimizer).__module__.startswith("mxnet.") else None

    def plan(self, planned: Callable[[str], Plan], realisation: str, within: bool) -> Plan:
        """What ``planned`` makes of this ``realisation``, or of updates ``within`` if they can be.

        They can where :meth:`updates_within` has said so, unless the network cannot be traced so.
        """
        if may_pack(realisation) and within:
            try:
                return planned(UPDATING)
            except TraceError as error:
                self._tell(str(error))
        return planned(realisation)

    def _tell(self, reason: str) -> None:
        if reason not in self._notes:
            self._notes.add(reason)
            warn_behind(reason)

    def _refusal(self, params: Iterable[Parameter], trainer: gluon.Trainer) -> str | None:
        params = list(params)
        ours = {p.name: p for p in params if p.grad_req != "null"}
        trained = {p.name: p for p in trainer._params if p.grad_req != "null"}
        computed = [name for name, p in ours.items() if is_derived(p)]
        sparse = [name for name, p in ours.items() if {p._stype, p._grad_stype} != {"default"}]
        foreign = [name for name, p in ours.items() if trained.get(name) is not p]
        stale = [name for name in trained if name not in ours]
        if type(trainer) is not gluon.Trainer:
            return f"the trainer is a {type(trainer).__name__}, which may do more than Gluon's"
        for name in _METHODS:
            if name in vars(trainer) and not isinstance(vars(trainer)[name], _Guard):
                return f"{name} of the trainer was replaced, and may do more than that of its class"
            if not is_mxnets(getattr(gluon.Trainer, name)):
                return f"{name} of the class Trainer was replaced, and may do more than MXNet's"
        if computed:
            return f"what the block reads of parameter {computed[0]!r} is computed from it"
        if sparse:
            return f"parameter {sparse[0]!r} or its gradient is sparse"
        if foreign:
            return f"parameter {foreign[0]!r} is none of the trainer's"
        if stale and not self._ignore_stale_grad:
            return f"the step computes no gradient for parameter {stale[0]!r} of the trainer"
        if any(len(p.list_ctx()) > 1 for p in ours.values() if p._data is not None):
            return "gradients of several contexts are summed up first"
        if overlapping := self._overlapping((*params, *trainer._params)):
            names = " and ".join(repr(p.name) for p in overlapping)
            return f"parameters {names} have the same memory"
        if _has_kvstore(trainer):
            return "a kvstore sums up the gradients, or updates the parameters"
        if getattr(trainer, "_amp_loss_scaler", None) is not None:
            return "AMP looks for overflows in all gradients, and may leave the update out"
        return refusal_of_updater(trainer._updaters[0])

    def _overlapping(self, params: Collection[Parameter]) -> Sequence[Parameter]:
        """Two of ``params`` in one memory: they are looked for where their arrays are new."""
        arrays = [p._data[0] for p in params if p._data is not None]
        known, overlapping = self._memories
        if len(arrays) != len(known) or any(map(operator.is_not, arrays, known)):
            overlapping = _overlapping({id(p): p for p in params}.values()) or ()
            self._memories = arrays, overlapping
        return overlapping

    def updates(self) -> OptimizerUpdates:
        """What updates the parameters within the step; the trainer refuses to do so behind it."""
        assert self.trainer is not None
        for name in ("step", "update"):
            if name not in vars(self.trainer):
                setattr(self.trainer, name, _Guard(self.trainer, name))
        return _TrainerUpdates(self, self.trainer)

    def begin(self, batches: Sequence[Arrays], batch_size: int | None) -> None:
        """A step on ``batches``, one for each context, begins; :meth:`finish` ends it.

        ArgumentError where it is not known when, or by how much, to update.
        """
        if self.trainer is None:
            if batch_size is not None:
                raise ArgumentError("batch_size is for a TrainStep that was given a trainer")
            return
        for p in self.trainer._params:
            if p.grad_req == "add":
                raise ArgumentError(
                    f"the gradient of {p.name!r} is added up over steps (grad_req='add'), so "
                    f"TrainStep cannot know when to update; give it no trainer, and call "
                    f"trainer.step"
                )
        if batch_size is None:
            batch_size = sum(map(_first_dimension, batches))
        try:
            self.trainer._scale / batch_size  # what trainer.step would fail at, after the step
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise ArgumentError(
                f"batch_size must be a number other than 0, as the trainer divides the gradients "
                f"by it; got {shown(batch_size)}"
            ) from error
        self._batch_size, self._is_done = batch_size, False

    def finish(self) -> None:
        """Update the parameters, if there is a trainer and it has not done so within the step.

        Where the step is called under autograd.record(), no update is part of what is recorded.
        """
        if self.trainer is not None and not self._is_done:
            self._is_done = True
            step = self.trainer.step
            if isinstance(step, _Guard):
                step.check(_TO_ONE_OF_SEVERAL)
            with autograd.pause():
                step(self._batch_size, ignore_stale_grad=self._ignore_stale_grad)

    def prepare(self, trainer: gluon.Trainer) -> None:
        """What ``Trainer.step`` does before the updates, which follow within the step."""
        trainer._check_and_rescale_grad(trainer._scale / self._batch_size)
        if not trainer._kv_initialized:
            trainer._init_kvstore()
        if trainer._params_to_init:
            trainer._init_params()
        self._is_done = True


class _TrainerUpdates(OptimizerUpdates):
    """Updates as ``Trainer.step`` makes them on one context.

    It updates parameters beside the network, too, which have a gradient that was not used yet.
    """

    def __init__(self, owner: StepTrainer, trainer: gluon.Trainer) -> None:
        super().__init__(trainer._updaters[0], trainer._param2idx)
        self._owner, self._trainer = owner, trainer

    @contextlib.contextmanager
    def step(self, weights: Mapping[str, NDArray], *, by_operators: bool = True) -> Iterator[None]:
        self._owner.prepare(self._trainer)
        self.updater = self._trainer._updaters[0]  # as it is now
        beside = [p for p in self._trainer._params if p.name not in weights and _is_fresh(p)]
        arrays = {p.name: (p._data[0], p.list_grad()[0]) for p in beside}
        if not beside:
            with super().step(weights, by_operators=by_operators):
                yield
            return
        both = {**weights, **{name: weight for name, (weight, _) in arrays.items()}}
        with super().step(both, by_operators=False):
            yield
            for name, (weight, gradient) in arrays.items():
                weight._fresh_grad = False
                self.update(name, weight, gradient)


def _first_dimension(batch: Arrays) -> int:
    """That of the first input in ``batch``, of which nobody has looked yet whether it is one."""
    first = next(leaves(batch), None)
    if not isinstance(first, mx.nd.NDArray) or not first.shape:
        raise ArgumentError(
            f"the batch size by which the trainer updates is the first dimension of the first "
            f"input, and {type(first).__name__} {shown(first)} has none; inputs and labels must be "
            f"mx.nd (or mx.np) arrays, or tuples or lists of them"
        )
    return int(first.shape[0])


def _is_fresh(parameter: Parameter) -> bool:
    """Has autograd, or a step, written its gradient since the trainer last used it?"""
    if parameter.grad_req == "null" or parameter._data is None:
        return False
    check_fresh(parameter)
    return bool(parameter._data[0]._fresh_grad)


def _overlapping(params: Collection[Parameter]) -> tuple[Parameter, Parameter] | None:
    """Two of different ``params`` in one memory, of which an update of one changes the other."""
    places = Counter(chunk_of(p._data[0]) for p in params if p._data is not None)
    shared = [p for p in params if p._data is not None and places[chunk_of(p._data[0])] > 1]
    parts = [(part, p) for p in shared if (part := part_of(p._data[0])) is not None]
    parts.sort(key=lambda pair: (pair[0].chunk, pair[0].begin))
    for (part, one), (next_part, other) in itertools.pairwise(parts):
        if part.overlaps(next_part):
            return one, other
    return None


def _has_kvstore(trainer: gluon.Trainer) -> bool:
    if trainer._kv_initialized:
        return trainer._kvstore is not None
    # On one device, as MXNet's _create_kvstore decides when it is first needed (model.py).
    kvstore = trainer._kvstore_params["kvstore"]
    return not (kvstore is None or (isinstance(kvstore, str) and "dist" not in kvstore))


@dataclass(frozen=True)
class _Guard:
    """A method of ``trainer``, but UsageError where it would update by gradients used up.

    It is that of the class as it is when it is called: a script may put another one there.
    """

    trainer: gluon.Trainer
    name: str

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.check("Leave trainer.step out, or give TrainStep no trainer")
        getattr(type(self.trainer), self.name)(self.trainer, *arguments, **options)

    def check(self, advice: str) -> None:
        """UsageError, with ``advice`` for who calls the method, where gradients are used up."""
        for p in self.trainer._params:
            if p.grad_req != "null" and p._data is not None and p._grad is None:
                raise UsageError(
                    f"the gradient of {p.name!r} has been used up: TrainStep(trainer=...) updates "
                    f"the parameters within the step. {advice}"
                )
