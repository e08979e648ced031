"""The user's optimizer within a step: every parameter is updated as MXNet would behind the step.

MXNet's loops update the parameters in the order of their numbers, some optimizers several at once.
Within a step they are updated in the order in which their gradients are complete.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import optimizer as optimizers

from memplan.errors import UsageError
from memplan.mxnet.train.read_by import is_mxnets, is_scripts
from memplan.mxnet.train.settings import is_same, settings

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
    inputs = {"optimizer": optimizer, "states": updater.states, "lr_scheduler": scheduler}
    inputs |= {name: v for name, v in settings(vars(optimizer)).items() if name not in _OWN}
    inputs |= {
        f"lr_scheduler.{name}": value
        for name, value in settings(getattr(scheduler, "__dict__", {})).items()
    }
    for parameter in optimizer.param_dict.values():
        inputs[f"lr_mult of {parameter.name!r}"] = parameter.lr_mult
        inputs[f"wd_mult of {parameter.name!r}"] = parameter.wd_mult
    return inputs


def changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The names of what enters an update ``now`` and is not what it was ``before``."""
    both = now.keys() & before.keys()
    return [n for n in {**before, **now} if n not in both or not is_same(now[n], before[n])]


def warn_behind(reason: str) -> None:
    """Warn that steps do not update the parameters within, for this ``reason``."""
    text = f"parameters are updated behind the step, where all gradients are held: {reason}"
    warnings.warn(text, stacklevel=3)


class OptimizerUpdates:
    """Updates parameters by ``updater``; ``indices`` are the numbers of the parameters there.

    Both may come later than the step is bound.
    """

    def __init__(
        self, updater: mx.optimizer.Updater | None = None, indices: Mapping[str, int] | None = None
    ) -> None:
        self.updater, self.indices = updater, indices or {}
        self.in_turn = False

    @contextlib.contextmanager
    def step(self, weights: Mapping[str, NDArray]) -> Iterator[None]:
        """Within it each of ``weights`` is updated once, in any order."""
        if self.updater is None:
            raise UsageError(
                "a training step updates the parameters, and there is no optimizer yet: call "
                "init_optimizer before the first step"
            )
        numbered = {self.indices[name]: weight for name, weight in weights.items()}
        numbered = dict(sorted(numbered.items()))
        optimizer = self.updater.optimizer
        _make_states(self.updater, numbered)
        counts = optimizer._index_update_count
        first = [index for index in numbered if index not in counts]
        self.in_turn = _is_one_operator(optimizer, numbered.values())
        scheduler = optimizer.lr_scheduler
        if scheduler is not None:
            optimizer.lr_scheduler = self._rates = _Rates(self.updater, numbered)
        try:
            yield
        finally:
            optimizer.lr_scheduler = scheduler
            for index in first:
                if index in counts:
                    counts[index] = counts.pop(index)

    def update(self, name: str, weight: NDArray, gradient: NDArray) -> None:
        """Update one of the weights of the step."""
        assert self.updater is not None
        index = self.indices[name]
        if isinstance(self.updater.optimizer.lr_scheduler, _Rates):
            self.updater.optimizer.lr_scheduler.index = index
        self.updater([index], [gradient], [weight])


def _make_states(updater: mx.optimizer.Updater, weights: Mapping[int, NDArray]) -> None:
    """Make the states that ``updater`` would, in its own order, so that saved ones are equal."""
    optimizer = updater.optimizer
    for index, weight in weights.items():
        optimizer._set_current_context(weight.context.device_id)
        if index not in updater.states:
            updater.states[index] = optimizer.create_state_multi_precision(index, weight)
        elif not updater.states_synced[index]:
            state = updater.states[index]
            updater.states[index] = updater.sync_state_context(state, weight.context)
        updater.states_synced[index] = True


class _Rates:
    """Stands in for the scheduler of an optimizer during a step.

    A scheduler is asked with the largest number of updates that any parameter has had, so what it
    says depends on the order of the parameters where these differ, as after frozen ones were
    freed. And one that has gone on does not go back. So it is asked before the step, as often and
    in the order in which the updater would; ``index`` is the parameter that is updated.
    """

    def __init__(self, updater: mx.optimizer.Updater, weights: Mapping[int, NDArray]) -> None:
        optimizer = updater.optimizer
        counts, begin = optimizer._index_update_count, optimizer.begin_num_update
        self.index = -1
        self._rates: dict[int, float] = {}
        number = optimizer.num_update
        for group in _together(updater, weights):
            number = max(number, *(counts.get(index, begin) + 1 for index in group))
            self._rates |= dict.fromkeys(group, optimizer.lr_scheduler(number))

    def __call__(self, num_update: int) -> float:
        """The learning rate of the parameter that is updated."""
        return self._rates[self.index]


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


def _is_one_operator(optimizer: mx.optimizer.Optimizer, weights: Iterable[NDArray]) -> bool:
    kind = type(optimizer)
    if optimizer.multi_precision and any(weight.dtype == np.float16 for weight in weights):
        return kind in _ONE_OPERATOR_IN_HALF
    return kind in _ONE_OPERATOR
