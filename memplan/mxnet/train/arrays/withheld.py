"""Gradients that are not there: whoever reads one of them gets an error, not what lies in memory.

A step that begins writes over the gradients of the step before. They are there again when it is
finished, or when autograd writes others. Where ``backward`` does not reach it that is never, and
MXNet has the old ones then, which whatever goes over all gradients reads, such as
``clip_global_norm``, and a trainer that has not used them. A copy of the block that is made
meanwhile has NaN for them, or zeros if none was ever computed, as has the block itself if it is
cast meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx

from memplan.errors import UsageError
from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.arrays.array_memory import handle_of

NDArray = Any
Parameter = Any

# Methods of MXNet's arrays that ask of which kind an array is, or free it.
_HARMLESS = frozenset({"shape", "dtype", "stype", "context", "ctx", "__del__"})

#: The parameters of which a gradient that is not zero was computed, or may have been.
_COMPUTED: WeakKeyDictionary[Parameter, None] = WeakKeyDictionary()


def note_computed(parameter: Parameter) -> None:
    """From now on the gradient of ``parameter`` is not zeros for certain."""
    _COMPUTED[parameter] = None


def note_unless_zeros(parameter: Parameter, gradient: NDArray | None) -> None:
    """Look at the ``gradient`` that a ``parameter`` has had: is it still the zeros of MXNet's?"""
    if parameter not in _COMPUTED and (gradient is None or gradient.asnumpy().any()):
        note_computed(parameter)


class Kind:
    """The class of a gradient of ``parameter`` while nobody may read it.

    ``data`` is what it is the gradient of: where autograd has written that of it, it may be read.
    A class is freed by Python's collector only, so it does not hold ``data``, by which autograd has
    a gradient in the memory of a step: that is free when the steps go that hold this.
    """

    def __init__(self, base: type, parameter: Parameter, data: NDArray) -> None:
        self.data = data
        check = _check_of(parameter, weakref.ref(self))
        stand_in = functools.partial(_stand_in, parameter=parameter)
        to_be_written = functools.partial(_to_be_written, parameter=parameter)
        self.type: Any = _kind(base, check, stand_in, to_be_written)


def withhold(
    array: NDArray, kind: Kind | None, parameter: Parameter, data: NDArray, *, was_fresh: bool
) -> Kind:
    """Let nobody read ``array``, the gradient of ``parameter``, before it is :func:`shown`.

    ``kind`` is what this has returned for that gradient, which is one of ``data``, before. No
    trainer leaves it out where the one that was there ``was_fresh``.
    """
    _let_parameters_write()
    _have_trainers_check()
    if kind is None or kind.type.__base__ is not type(array):
        kind = Kind(type(array), parameter, data)
    kind.type._was_fresh = was_fresh
    array.__class__ = kind.type
    return kind


def was_fresh(array: NDArray | None) -> bool:
    """Is ``array`` withheld, and was what is no longer there still to be used by a trainer?"""
    return getattr(type(array), "_was_fresh", False)


def check_fresh(parameter: Parameter) -> None:
    """UsageError where MXNet's trainer would update ``parameter`` by what is no longer there."""
    for data, gradient in zip(parameter._data or (), parameter._grad or (), strict=False):
        if was_fresh(gradient) and not data._fresh_grad:
            gradient.wait_to_read()


def refuse(array: NDArray, reason: str) -> None:
    """Let nobody read ``array`` before it is :func:`shown`: a UsageError has the ``reason``."""

    def check(_: NDArray) -> None:
        raise UsageError(reason)

    kind = _kind(type(shown(array)), check, lambda gone: _filled(gone, math.nan), shown)
    array.__class__ = kind


def shown(array: NDArray) -> NDArray:
    """``array``, which anybody may read from now on."""
    if hasattr(type(array), "_withheld"):
        array.__class__ = type(array)._withheld
    return array


def _check_of(parameter: Parameter, kind: Callable[[], Kind | None]) -> Callable[[NDArray], None]:
    """What is done where the gradient is read."""

    def check(array: NDArray) -> None:
        held = kind()
        if held is not None and held.data._fresh_grad:
            note_computed(parameter)
        elif parameter in _COMPUTED:
            raise UsageError(_message(parameter))
        else:
            _to_be_written(array, parameter)[:] = 0  # as MXNet has made it

    return check


def _to_be_written(array: NDArray, parameter: Parameter) -> NDArray:
    """The gradient, :func:`shown`; a trainer uses what is written where it would what was there."""
    for data, gradient in zip(parameter._data or (), parameter._grad or (), strict=False):
        if gradient is array and was_fresh(array):
            data._fresh_grad = True
    return shown(array)


def _kind(
    base: type,
    check: Callable[[NDArray], None],
    stand_in: Callable[[NDArray], NDArray],
    to_be_written: Callable[[NDArray], NDArray],
) -> type:
    """A class of withheld arrays: ``base`` with a handle that nobody gets without a ``check``."""

    def handle(array: NDArray) -> Any:
        if sys._getframe(1).f_code.co_name not in _HARMLESS:
            check(array)
        return handle_of(array)

    def set_item(array: NDArray, key: Any, value: Any) -> None:
        if key is Ellipsis or (isinstance(key, slice) and key == slice(None)):
            to_be_written(array)[key] = value
            return
        with contextlib.suppress(UsageError):  # the rest is not there, so nobody may read the part
            check(array)
            shown(array)[key] = value

    def get_state(array: NDArray) -> Any:
        return stand_in(array).__getstate__()

    own = {"__slots__": (), "_withheld": base, "__module__": __name__}
    own |= {"handle": property(handle), "__setitem__": set_item, "__getstate__": get_state}
    # The one of an mx.np array asks a legacy view of it, by which anybody might read it.
    own |= {"context": mx.nd.NDArray.context}
    return type(base)(base.__name__, (base,), own)


def _stand_in(array: NDArray, parameter: Parameter) -> NDArray:
    """For a copy of the block, say. A copy of what lies in memory would look like a gradient."""
    return _filled(array, math.nan if parameter in _COMPUTED else 0)


def _filled(array: NDArray, value: float) -> NDArray:
    if isinstance(array, mx.np.ndarray):
        return mx.np.full(array.shape, value, ctx=array.ctx, dtype=array.dtype)
    return mx.nd.full(array.shape, value, array.ctx, array.dtype).tostype(array.stype)


def _message(parameter: Parameter) -> str:
    return (
        f"the gradient of {parameter.name!r} is not there: a planned block was called under "
        f"autograd.record(), which overwrites the gradients of the step before, and no backward "
        f"has gone through that call; read gradients, and call trainer.step, behind backward and "
        f"before the next call, leave the gradients of this block out, or call the block under "
        f"autograd.pause(train_mode=True) where nobody wants its gradients"
    )


@functools.cache
def _let_parameters_write() -> None:
    """Let MXNet's zero_grad() write zeros into gradients that are withheld, cast() replace them."""
    for kind in (mx.gluon.Parameter, mx.gluon.ParameterDict):
        kind.zero_grad = _with_shown(kind.zero_grad)
    mx.gluon.Parameter.cast = _with_stand_ins(mx.gluon.Parameter.cast)


@functools.cache
def _have_trainers_check() -> None:
    """Have MXNet's trainers update by no gradient that is withheld, and leave none out for that.

    With ``ignore_stale_grad=True`` they leave a parameter out, without a word, where autograd has
    written no gradient since it was marked; else they say that no backward has.
    """
    wrap(mx.gluon.Trainer, "_update", _checking)


def _checking(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def checking(trainer: Any, *args: Any, **options: Any) -> None:
        for parameter in trainer._params:
            check_fresh(parameter)
        update(trainer, *args, **options)

    return checking


def _with_shown(zero_grad: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(zero_grad)
    def wrapped(owner: Any) -> None:
        for p in owner.values() if isinstance(owner, mx.gluon.ParameterDict) else [owner]:
            for array in p._grad or []:
                _to_be_written(array, p)
        zero_grad(owner)

    return wrapped


def _with_stand_ins(cast: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(cast)
    def wrapped(parameter: Parameter, dtype: Any) -> None:
        parameter._grad = parameter._grad and [
            _stand_in(array, parameter) if hasattr(type(array), "_withheld") else array
            for array in parameter._grad
        ]
        cast(parameter, dtype)

    return wrapped
