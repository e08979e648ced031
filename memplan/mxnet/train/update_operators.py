"""The operators by which MXNet's optimizers update parameters, each by one call.

MXNet's own code (python/mxnet/optimizer/optimizer.py) makes their attributes anew for every
parameter, and calls them by functions of Python, which takes more time than all else of a small
step. Here the attributes are made by what that code says, once for all parameters that have the
same, and the numbers of updates, learning rates and decays by that code itself.
"""

from __future__ import annotations

import marshal
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import optimizer as optimizers
from mxnet.lr_scheduler import LRScheduler
from mxnet.optimizer import optimizer as written

from memplan.mxnet.realise.update_calls import Operators, UpdateOperator
from memplan.mxnet.train.blocks.read_by import is_mxnets

NDArray = Any
Options = dict[str, Any]

# How many states a parameter has, and whether MXNet has a copy of it in single precision.
_Kind = tuple[int, bool]


def _with_clip(options: Options, optimizer: Any, name: str = "clip_gradient") -> Options:
    clip = {name: optimizer.clip_gradient} if optimizer.clip_gradient else {}
    return {"rescale_grad": optimizer.rescale_grad, **options, **clip}


def _with_momentum(options: Options, optimizer: Any) -> Options:
    momentum = {"momentum": optimizer.momentum} if optimizer.momentum > 0 else {}
    return _with_clip({**options, **momentum}, optimizer)


def _sgd(optimizer: Any, nstates: int, in_half: bool) -> tuple[str, Options]:
    momentum = "mom_" if optimizer.momentum > 0 else ""
    op = f"multi_{'mp_' if in_half else ''}sgd_{momentum}update"
    return op, _with_momentum({"num_weights": 1}, optimizer)


def _nag(optimizer: Any, nstates: int, in_half: bool) -> tuple[str, Options]:
    op = "nag_mom_update" if nstates > in_half else "sgd_update"
    return f"{'mp_' if in_half else ''}{op}", _with_momentum({}, optimizer)


def _signum(optimizer: Any, nstates: int, in_half: bool) -> tuple[str, Options]:
    wd_lh = {"wd_lh": optimizer.wd_lh} if optimizer.wd_lh else {}
    return "signum_update" if nstates else "signsgd_update", _with_momentum(wd_lh, optimizer)


def _ftml(optimizer: Any, nstates: int, in_half: bool) -> tuple[str, Options]:
    options = {name: getattr(optimizer, name) for name in ("beta1", "beta2", "epsilon")}
    return "ftml_update", _with_clip(options, optimizer, "clip_grad")


def _adam(optimizer: Any, nstates: int, in_half: bool) -> tuple[str, Options]:
    names = "beta1", "beta2", "epsilon", "lazy_update"
    return "adam_update", _with_clip({n: getattr(optimizer, n) for n in names}, optimizer)


def _rmsprop(optimizer: Any, nstates: int, in_half: bool) -> tuple[str, Options]:
    names = ("gamma1", "gamma2", "epsilon") if optimizer.centered else ("gamma1", "epsilon")
    options = {name: getattr(optimizer, name) for name in names}
    if optimizer.clip_weights:
        options["clip_weights"] = optimizer.clip_weights
    op = "rmspropalex_update" if optimizer.centered else "rmsprop_update"
    return op, _with_clip(options, optimizer)


def _ftrl(optimizer: Any, nstates: int, in_half: bool) -> tuple[str, Options]:
    options = {"lamda1": optimizer.lamda1, "beta": optimizer.beta}
    return "ftrl_update", _with_clip(options, optimizer)


# By the class of an optimizer the operator and what all parameters have in common, for those with
# this many states, and whose weight in half precision has a copy in single precision or not.
_OPTIONS: dict[type, Callable[[Any, int, bool], tuple[str, Options]]] = {
    optimizers.SGD: _sgd,
    optimizers.ccSGD: _sgd,
    optimizers.NAG: _nag,
    optimizers.Signum: _signum,
    optimizers.FTML: _ftml,
    optimizers.Adam: _adam,
    optimizers.RMSProp: _rmsprop,
    optimizers.Ftrl: _ftrl,
}

# How many states they have.
_NSTATES = {
    "multi_sgd_update": 0,
    "multi_sgd_mom_update": 1,
    "multi_mp_sgd_update": 1,
    "multi_mp_sgd_mom_update": 2,
    "sgd_update": 0,
    "nag_mom_update": 1,
    "mp_sgd_update": 1,
    "mp_nag_mom_update": 2,
    "signsgd_update": 0,
    "signum_update": 1,
    "ftml_update": 3,
    "adam_update": 2,
    "rmsprop_update": 1,
    "rmspropalex_update": 3,
    "ftrl_update": 2,
}

# Their rates depend on the number of updates that a parameter has had.
_BY_NUMBER = frozenset({"adam_update", "ftml_update"})

# What an optimizer of these classes calls in an update.
_METHODS = (
    *("update", "update_multi_precision", "_update_impl", "_set_current_context"),
    *("_update_count", "_get_lr", "_get_lrs", "_get_wd", "_get_wds"),
)


# The functions that they may call in MXNet's module, which a script may put others in the place of.
_FUNCTIONS = tuple(_NSTATES)

# What those of a class call, as it was when all of it was found to be MXNet's.
_WRITTEN: dict[type, list[Any]] = {}


def _is_as_written(optimizer: mx.optimizer.Optimizer) -> bool:
    """Is it of a class that is known here, and is all that it calls MXNet's?

    A scheduler of the script's may set what the optimizer reads after it has asked for the rate, as
    a momentum.
    """
    kind = type(optimizer)
    if kind not in _OPTIONS or not vars(optimizer).keys().isdisjoint(_METHODS):
        return False
    if not _is_mxnets_scheduler(optimizer.lr_scheduler):
        return False
    called = [getattr(kind, name, None) for name in _METHODS]
    called += [getattr(written, name, None) for name in _FUNCTIONS]
    if called == _WRITTEN.get(kind):
        return True
    if all(map(is_mxnets, filter(None, called))):
        _WRITTEN[kind] = called
        return True
    return False


def _is_mxnets_scheduler(scheduler: Any) -> bool:
    """Is there none, or one of MXNet's as it was written, which changes nothing but itself?"""
    if scheduler is None:
        return True
    kind = type(scheduler)
    if kind.__module__ != LRScheduler.__module__ or "get_warmup_lr" in vars(scheduler):
        return False
    return is_mxnets(kind.__call__) and is_mxnets(kind.get_warmup_lr)


class Numbered:
    """The ``weights`` of a step, by name, in the order of their ``indices``."""

    def __init__(self, weights: Mapping[str, NDArray], indices: Mapping[str, int]) -> None:
        self._weights, self._indices = weights, dict(indices)
        self.names = sorted(weights, key=indices.__getitem__)
        self.weights = {indices[name]: weights[name] for name in self.names}
        self.are_in_half = [weight.dtype == np.float16 for weight in self.weights.values()]
        kinds = {(type(w), w.stype, w.context) for w in self.weights.values()}
        #: Are they arrays on the CPU, not sparse, and of none but MXNet's own kind?
        self.are_plain = kinds == {(mx.nd.NDArray, "default", mx.cpu(0))}

    def is_of(self, weights: Mapping[str, NDArray], indices: Mapping[str, int]) -> bool:
        """Is it that of these? Steps of several shapes update the same arrays."""
        if indices != self._indices:
            return False
        if weights is self._weights:
            return True
        own = map(self._weights.get, weights)
        return len(weights) == len(self._weights) and all(map(operator.is_, weights.values(), own))


class OperatorsOfStep:
    """Which operators make the updates of a step, with which attributes, and on which states."""

    def __init__(self) -> None:
        self._optimizer: Any = None
        #: In how many steps in a row, up to now, they have changed.
        self.nchanges = 0
        self.forget()

    def forget(self) -> None:
        """Hold no states: they may be others in the next step, or need not be held at all.

        What is known goes first: Ctrl-C may come here.
        """
        self._layout: tuple[Any, ...] = ()
        self._last: tuple[bytes | None, Operators] = (None, {})
        self._given: Sequence[Any] = ()
        self._states: list[tuple[NDArray, ...]] = []
        self._kinds: list[_Kind] = []
        self._called: dict[_Kind, tuple[str, Options]] = {}

    def are_replaced(self, updater: mx.optimizer.Updater) -> bool:
        """Has ``updater`` others in place of the states of the step before?"""
        if not self._layout:
            return False
        now = [updater.states.get(index) for index in self._layout[0].weights]
        if self._are_given(now):
            return False
        arrays = [[*map(id, _arrays_of(state))] for state in now]
        return arrays != [[*map(id, state)] for state in self._states]

    def begin(self, updater: mx.optimizer.Updater, numbered: Numbered) -> bool:
        """Are those known by which ``updater``, which has all states, updates in a step?"""
        optimizer = self._optimizer = updater.optimizer
        if not (numbered.are_plain and _is_as_written(optimizer)):
            return False
        given = [updater.states[index] for index in numbered.weights]
        layout = numbered, type(optimizer), optimizer.multi_precision
        if layout != self._layout or not self._are_given(given):
            states = [_arrays_of(state) for state in given]
            kinds = _kinds(updater, numbered, states)
            self.forget()
            self._given, self._states, self._kinds = given, states, kinds
            self._layout = layout  # at the end, for Ctrl-C may come before
        options = _OPTIONS[type(optimizer)]
        self._called = {kind: options(optimizer, *kind) for kind in set(self._kinds)}
        called = self._called.items()
        return bool(called) and all(_NSTATES[op] == nstates for (nstates, _), (op, _) in called)

    def _are_given(self, states: Sequence[Any]) -> bool:
        """Are ``states`` those of the step before? In a list there may be others now."""
        are_same = all(map(operator.is_, states, self._given))
        return are_same and not any(type(state) is list for state in states)

    def operators(self, groups: Iterable[Sequence[int]]) -> Operators:
        """Count an update of each parameter, in these ``groups``, and say what makes them.

        The same object as in the step before where nothing has changed.
        """
        optimizer, numbered = self._optimizer, self._layout[0]
        order: list[int] = []
        lrs: list[float] = []
        wds: list[float] = []
        for group in groups:
            optimizer._update_count(group)
            order += group
            lrs += optimizer._get_lrs(group)
            wds += optimizer._get_wds(group)
        numbers = [0] * len(order)
        if not _BY_NUMBER.isdisjoint(op for op, _ in self._called.values()):
            numbers = [optimizer._index_update_count[index] for index in order]
        options = [(op, *given.items()) for op, given in self._called.values()]
        exactly = _exactly((order, lrs, wds, numbers, options))
        known, operators = self._last
        if exactly is not None and exactly == known:
            self.nchanges = 0
            return operators
        self.nchanges += 1
        rates = dict(zip(order, zip(lrs, wds, numbers, strict=True), strict=True))
        operators = self._made([rates[index] for index in numbered.weights])
        self._last = exactly, operators  # both at once, for Ctrl-C may come before
        return operators

    def _made(self, rates: Sequence[tuple[float, float, int]]) -> Operators:
        """What updates each parameter by its learning rate, decay and number of updates."""
        operators: dict[Any, UpdateOperator] = {}
        result = {}
        parts = zip(self._layout[0].names, self._kinds, rates, self._states, strict=True)
        for name, kind, rate, states in parts:
            key = kind, _exactly(rate) or name
            if key not in operators:
                op, options = self._called[kind]
                attrs = {**options, **_rates(op, options, *rate)}
                operators[key] = UpdateOperator(op, tuple((n, str(v)) for n, v in attrs.items()))
            result[name] = operators[key], states
        return result


def _arrays_of(state: Any) -> tuple[Any, ...]:
    parts = state if isinstance(state, tuple | list) else (state,)
    return tuple(part for part in parts if part is not None)


def _kinds(
    updater: mx.optimizer.Updater, numbered: Numbered, states: Sequence[tuple[Any, ...]]
) -> list[_Kind]:
    """The kind of each parameter; none where something is not as MXNet's optimizers make it."""
    if not all(type(a) is mx.nd.NDArray and a.stype == "default" for s in states for a in s):
        return []
    result = []
    halves = zip(numbered.weights, numbered.are_in_half, states, strict=True)
    for index, is_half, arrays in halves:
        in_half = is_half and updater.optimizer.multi_precision
        if in_half and not isinstance(updater.states[index], tuple | list):
            return []
        result.append((len(arrays), in_half))
    return result


def _rates(op: str, options: Options, lr: float, wd: float, number: int) -> Options:
    """The attributes of an operator that a parameter may have for itself."""
    if op.startswith("multi_"):
        return {"lrs": [lr], "wds": [wd]}
    if op == "adam_update":
        first, second = (1.0 - options[name] ** number for name in ("beta1", "beta2"))
        return {"lr": lr * (math.sqrt(second) / first), "wd": wd}
    return {"lr": lr, "wd": wd, **({"t": number} if op in _BY_NUMBER else {})}


def _exactly(values: Any) -> bytes | None:
    """Numbers and words as bytes, which differ where these do in the least, as 0.0 and -0.0.

    None for others.
    """
    try:
        return marshal.dumps(values, 2)  # later versions tell, too, which of them are one object
    except ValueError:
        return None
