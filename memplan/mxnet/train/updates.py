"""The user's optimizer within a step: every parameter is updated as MXNet would behind the step.

MXNet's loops update the parameters in the order of their numbers, some optimizers several at once.
Within a step they are updated in the order in which their gradients are complete.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import mxnet as mx
from mxnet import optimizer as optimizers

from memplan.errors import UsageError
from memplan.mxnet.realise.update_calls import Holder, Operators
from memplan.mxnet.train.arrays.writes import note_writes
from memplan.mxnet.train.blocks.read_by import is_mxnets, is_scripts
from memplan.mxnet.train.blocks.settings import is_same, settings
from memplan.mxnet.train.update_operators import Numbered, OperatorsOfStep

NDArray = Any


def _classes(names: str) -> set[type]:
    return {getattr(optimizers, name) for name in names.split()}


# Their update is one operator, which reads the gradient and writes the weight and its states.
_ONE_OPERATOR = _classes("SGD ccSGD NAG Signum FTML Adam RMSProp Ftrl")

# Of these, in half precision with a copy of the weight in single precision, too.
_ONE_OPERATOR_IN_HALF = _classes("SGD ccSGD NAG")

# Theirs are several, some of which write into the gradient.
_SEVERAL_OPERATORS = _classes("AdaGrad AdaDelta Adamax DCASGD LAMB Test")
_SEVERAL_OPERATORS |= {optimizers.contrib.GroupAdaGrad}

# Where the numbers depend on more than one parameter, its gradient and its states.
_REFUSED = {
    optimizers.SGLD: "it draws random numbers for one parameter after the other",
    optimizers.Nadam: "its momentum schedule goes on with every parameter",
    optimizers.LARS: "it corrects the momentum by the learning rate of the parameters before",
    optimizers.LBSGD: "it adds up gradients over steps",
}

# Attributes of optimizers that no script sets: counts, and what they know of the network.
_OWN = ("num_update", "_index_update_count", "_all_index_update_counts", "sym_info")

# After so many steps in a row in which the attributes of updates have changed, it is taken that
# they change in every step.
CHANGING = 3

ANY_ORDER = "updates_in_any_order"
"""A class of the user's with this attribute true may update within a step."""


def refusal(optimizer: mx.optimizer.Optimizer) -> str | None:
    """Why ``optimizer`` cannot update within a step; None if it can."""
    kind = type(optimizer)
    is_known = kind in _ONE_OPERATOR or kind in _SEVERAL_OPERATORS
    any_order = getattr(kind, ANY_ORDER, False)
    for name in ("update", "update_multi_precision"):
        if name in vars(optimizer):
            return f"{name} of the optimizer was replaced, and may do more than that of its class"
        if is_known and not any_order and not is_mxnets(getattr(kind, name)):
            return f"{name} of the class {kind.__name__} was replaced, and may do more than MXNet's"
    if kind in _REFUSED:
        return f"the optimizer {kind.__name__} needs all gradients at once: {_REFUSED[kind]}"
    if is_known or any_order:
        return None
    return (
        f"the optimizer {kind.__name__} is none of MXNet's; if it updates every parameter by its "
        f"own gradient and states alone, set {ANY_ORDER} = True in its class"
    )


def refusal_of_updater(updater: Any) -> str | None:
    """Why ``updater``, by its optimizer, cannot update within a step; None if it can."""
    if type(updater) is not optimizers.Updater:
        return f"the updater is a {type(updater).__name__}, which may do more than MXNet's"
    if not is_mxnets(type(updater).__call__):
        return "__call__ of the class Updater was replaced, and may do more than MXNet's"
    return refusal(updater.optimizer)


def refusal_of_module(module: mx.mod.BaseModule) -> str | None:
    """Why ``module`` may look at gradients behind the step; None if it is as it was written."""
    for name in ("backward", "update"):
        if is_scripts(getattr(module, name)) or is_scripts(getattr(mx.mod.Module, name)):
            kind = type(module).__name__
            return f"{name} of the class {kind} was replaced, and may do more than MXNet's"
    return None


def inputs_of(updater: mx.optimizer.Updater) -> dict[str, Any]:
    """What enters an update beside weights and gradients, and a script may set, as it is now."""
    optimizer = updater.optimizer
    scheduler = optimizer.lr_scheduler
    # MXNet replaces the state of a parameter in its dictionary, and a script may.
    states = {index: _ids(state) for index, state in updater.states.items()}
    inputs = {"optimizer": optimizer, "states": states, "lr_scheduler": scheduler}
    inputs |= settings({name: v for name, v in vars(optimizer).items() if name not in _OWN})
    inputs |= {
        f"lr_scheduler.{name}": value
        for name, value in settings(getattr(scheduler, "__dict__", {})).items()
    }
    for parameter in optimizer.param_dict.values():
        inputs[f"lr_mult of {parameter.name!r}"] = parameter.lr_mult
        inputs[f"wd_mult of {parameter.name!r}"] = parameter.wd_mult
    return inputs


def _ids(state: Any) -> Any:
    return tuple(map(_ids, state)) if isinstance(state, tuple | list) else id(state)


def changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The names of what enters an update ``now`` and is not what it was ``before``."""
    if now.keys() == before.keys():
        return [n for n, v in now.items() if v is not before[n] and not is_same(v, before[n])]
    both = now.keys() & before.keys()
    return [n for n in {**before, **now} if n not in both or not is_same(now[n], before[n])]


#: What optimizers, which several modules may have, had counted at the end of their last step.
_COUNTED: WeakKeyDictionary[mx.optimizer.Optimizer, dict[str, Any]] = WeakKeyDictionary()

#: All that update by an updater: the first to find states replaced tells the others.
_SHARING: WeakKeyDictionary[mx.optimizer.Updater, WeakSet[OptimizerUpdates]] = WeakKeyDictionary()


def counts_of(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """The updates that ``optimizer`` has counted, on which its further ones depend."""
    counts = optimizer._all_index_update_counts
    return {
        "num_update": optimizer.num_update,
        "_index_update_count": {device: dict(own) for device, own in counts.items() if own},
    }


def counts_of_steps(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """The same at the end of the last step within which it has updated, if it has in one."""
    return _COUNTED.get(optimizer) or counts_of(optimizer)


def warn_behind(reason: str) -> None:
    """Warn that steps do not update the parameters within, for this ``reason``."""
    text = f"parameters are updated behind the step, where all gradients are held: {reason}"
    warnings.warn(text, stacklevel=3)


class OptimizerUpdates:
    """Updates parameters by ``updater``; ``indices`` are the numbers of the parameters there.

    Both may come later than the step is bound. ``turned`` says whether the last step has changed
    the schedule of the optimizer.
    """

    def __init__(
        self, updater: mx.optimizer.Updater | None = None, indices: Mapping[str, int] | None = None
    ) -> None:
        self.updater, self.indices = updater, indices or {}
        self.in_turn = False
        self.by_operators = False
        self.turned = False
        self._numbered = Numbered({}, {})
        self._of_step = OperatorsOfStep()
        #: What updates the parameters in this step; None until the first update is due.
        self._operators: Operators | None = None
        self._steps: WeakSet[Holder] = WeakSet()

    def serve(self, step: Holder) -> None:
        """As of :class:`Updates`."""
        self._steps.add(step)

    def _forget(self) -> None:
        """Hold no states, and nor do the steps."""
        self._operators = None
        for step in list(self._steps):
            step.forget_updates()
        self._of_step.forget()

    @contextlib.contextmanager
    def step(self, weights: Mapping[str, NDArray], *, by_operators: bool = True) -> Iterator[None]:
        """Within it each of ``weights`` is updated once, in any order.

        UsageError where there is no optimizer yet.
        """
        if self.updater is None:
            raise UsageError(
                "a training step updates the parameters, and there is no optimizer yet: call "
                "init_optimizer before the first step"
            )
        if not self._numbered.is_of(weights, self.indices):
            self._numbered = Numbered(weights, self.indices)
        numbered = self._numbered.weights
        optimizer = self.updater.optimizer
        for weight in weights.values():  # all are on one device
            optimizer._set_current_context(weight.context.device_id)
            break
        _make_states(self.updater, numbered)
        sharing = _SHARING.setdefault(self.updater, WeakSet())
        sharing.add(self)
        if self._of_step.are_replaced(self.updater):
            for each in list(sharing):
                each._forget()
        self.in_turn = _is_one_operator(optimizer, self._numbered)
        self.by_operators = (
            by_operators and self.in_turn and self._of_step.begin(self.updater, self._numbered)
        )
        self.turned, self._operators = False, None
        if not self.by_operators:
            self._of_step.forget()
        try:
            with contextlib.nullcontext() if self.by_operators else self._one_by_one(numbered):
                yield
        finally:
            _COUNTED[optimizer] = counts_of(optimizer)
            if self._operators is not None:
                note_writes(list(weights.values()))

    @property
    def are_changing(self) -> bool:
        """Has what updates the parameters changed in all of the last steps?"""
        return self._of_step.nchanges >= CHANGING

    @property
    def operators(self) -> Operators:
        """What updates the parameters in this step."""
        if self._operators is None:
            assert self.updater is not None
            scheduler, numbered = self.updater.optimizer.lr_scheduler, self._numbered.weights
            if scheduler is None:
                self._operators = self._of_step.operators([list(numbered)])
            else:
                before = settings(getattr(scheduler, "__dict__", {}))
                self._operators = self._of_step.operators(_together(self.updater, numbered))
                now = settings(getattr(scheduler, "__dict__", {}))
                self.turned = bool(changed(now, before))
        return self._operators

    @contextlib.contextmanager
    def _one_by_one(self, weights: Mapping[int, NDArray]) -> Iterator[None]:
        """Within it the updater makes the updates, in any order."""
        assert self.updater is not None
        optimizer = self.updater.optimizer
        counts = optimizer._index_update_count
        first = [index for index in weights if index not in counts]
        rates = None if optimizer.lr_scheduler is None else _Rates(self.updater, weights)
        try:
            with rates or contextlib.nullcontext():
                yield
        finally:
            for index in first:
                if index in counts:
                    counts[index] = counts.pop(index)
            self.turned = rates is not None and bool(rates.changed)

    def update(self, name: str, weight: NDArray, gradient: NDArray) -> None:
        """Update one of the weights of the step."""
        assert self.updater is not None
        index = self.indices[name]
        if isinstance(self.updater.optimizer.lr_scheduler, _Rates):
            self.updater.optimizer.lr_scheduler.turn_to(index)
        self.updater([index], [gradient], [weight])


def _make_states(updater: mx.optimizer.Updater, weights: Mapping[int, NDArray]) -> None:
    """Make the states that ``updater`` would, in its own order, so that saved ones are equal."""
    optimizer, states, synced = updater.optimizer, updater.states, updater.states_synced
    if all(index in states and synced[index] for index in weights):
        return
    for index, weight in weights.items():
        if index not in updater.states:
            updater.states[index] = optimizer.create_state_multi_precision(index, weight)
        elif not updater.states_synced[index]:
            state = updater.states[index]
            updater.states[index] = updater.sync_state_context(state, weight.context)
        updater.states_synced[index] = True


class _Rates:
    """Within it stands in for the scheduler of an optimizer, for a step.

    A scheduler is asked with the largest number of updates that any parameter has had, so what it
    says depends on the order of the parameters where these differ, as after frozen ones were
    freed. And one that has gone on does not go back. So the optimizer finds the number of its own
    order, and when it first asks, the scheduler is asked for all parameters, as often and in the
    order in which the updater would. That is right for optimizers that count an update before they
    ask, as MXNet's do; of others it is a UsageError.
    """

    def __init__(self, updater: mx.optimizer.Updater, weights: Mapping[int, NDArray]) -> None:
        self._optimizer = optimizer = updater.optimizer
        self._scheduler, self._number = optimizer.lr_scheduler, optimizer.num_update
        counts, begin = optimizer._index_update_count, optimizer.begin_num_update
        self._index = -1
        # The number of updates before that of each parameter, and after it.
        self._numbers: dict[int, tuple[int, int]] = {}
        self._groups: list[tuple[Sequence[int], int]] = []
        number = self._number
        for group in _together(updater, weights):
            own = {index: max(number, counts.get(index, begin) + 1) for index in group}
            self._numbers |= {index: (number, after) for index, after in own.items()}
            number = max(own.values())
            self._groups.append((group, number))
        self._rates: dict[int, float] = {}
        self._is_one_rate = len({number for _, number in self._groups}) == 1
        self._asked: set[int] = set()
        self._read: set[str] = set()
        self.changed: set[str] = set()

    def __enter__(self) -> None:
        self._optimizer.lr_scheduler = self

    def __exit__(self, *_: object) -> None:
        self._optimizer.lr_scheduler = self._scheduler
        counts = self._optimizer._index_update_count
        numbers = [counts[index] for index in self._numbers if index in counts]
        self._optimizer.num_update = max([self._number, *numbers])

    def turn_to(self, index: int) -> None:
        """The next to be updated is the parameter of this ``index``."""
        self._index = index
        self._optimizer.num_update = self._numbers[index][0]

    def __call__(self, num_update: int) -> float:
        """The learning rate of the parameter that is updated."""
        _, due = self._numbers[self._index]
        if num_update != due:
            self._refuse(
                f"asks its lr_scheduler for the rate of update {num_update} in update {due}, and "
                f"may get others in another order; let it call self._update_count(index) before"
            )
        if not self._rates:
            before = settings(getattr(self._scheduler, "__dict__", {}))
            for group, number in self._groups:
                self._rates |= dict.fromkeys(group, self._scheduler(number))
            now = settings(getattr(self._scheduler, "__dict__", {}))
            self.changed = set(changed(now, before))
            self._check_read()
        self._asked.add(self._index)
        return self._rates[self._index]

    def __getattr__(self, name: str) -> Any:
        """What the scheduler has, where it does not depend on the order of the parameters."""
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._is_one_rate or self._index not in self._asked:
            self._read.add(name)
            self._check_read()
        return getattr(self._scheduler, name)

    def _check_read(self) -> None:
        for name in sorted(self._read & self.changed):
            self._refuse(
                f"reads lr_scheduler.{name}, which changes within this step, and may get others in "
                f"another order; let it ask for the rate before"
            )

    def _refuse(self, reason: str) -> NoReturn:
        raise UsageError(
            f"the optimizer {type(self._optimizer).__name__} {reason}. Or leave {ANY_ORDER} out of "
            f"its class: then the parameters are updated behind the step"
        )


def _together(
    updater: mx.optimizer.Updater, weights: Mapping[int, NDArray]
) -> Iterator[Sequence[int]]:
    """The numbers of those weights that ``updater`` has updated, and their rates asked, at once."""
    size = updater.optimizer.aggregate_num
    if not updater.aggregate_updates or isinstance(updater.optimizer, optimizers.LAMB):
        yield from ([index] for index in weights)
        return
    of_dtype: dict[Any, list[int]] = {}
    for index, weight in weights.items():
        of_dtype.setdefault(weight.dtype, []).append(index)
    for indices in of_dtype.values():
        yield from (indices[place : place + size] for place in range(0, len(indices), size))


def _is_one_operator(optimizer: mx.optimizer.Optimizer, numbered: Numbered) -> bool:
    kind = type(optimizer)
    if optimizer.multi_precision and any(numbered.are_in_half):
        return kind in _ONE_OPERATOR_IN_HALF
    return kind in _ONE_OPERATOR
