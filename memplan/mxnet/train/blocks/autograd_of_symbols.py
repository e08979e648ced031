"""MXNet's autograd, called with Symbols: it takes their handles for those of arrays, and crashes.

A block that is not hybridized calls it with arrays, and with Symbols while a step is composed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mxnet as mx
from mxnet import autograd

from memplan.errors import TraceError
from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.arrays.nesting import leaves, listed

# In a thread that composes a step: "refused", the list of what it was refused.
_COMPOSING = threading.local()


@contextmanager
def refusing_autograd(refused: list[TraceError]) -> Iterator[None]:
    """Within, TraceError, one more of ``refused``, where this thread gives autograd Symbols."""
    _wrap()
    before = getattr(_COMPOSING, "refused", None)
    _COMPOSING.refused = refused
    try:
        yield
    finally:
        _COMPOSING.refused = before


@functools.cache
def _wrap() -> None:
    """Wrap MXNet's functions, the first time."""
    for module in (autograd, mx.contrib.autograd):
        for name in ("backward", "mark_variables"):
            wrap(module, name, _refusing)
    wrap(autograd, "grad", _refusing)
    wrap(mx.nd.NDArray, "backward", _refusing)
    wrap(autograd.Function, "__call__", _refusing_recorded)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refusing(*args: Any, **options: Any) -> Any:
        refused = getattr(_COMPOSING, "refused", None)
        if refused is not None and _has_symbols([*args, *options.values()]):
            what = f"{function.__module__}.{function.__qualname__}"
            refused.append(
                TraceError(
                    f"{what} is called with Symbols: MXNet calls the block, or its loss, with "
                    f"arrays, and a planned step with Symbols, as hybridize() does, of which "
                    f"autograd knows nothing. Write a Custom op (mx.operator.CustomOp) for a "
                    f"gradient of your own, and differentiate outside of the block and its loss"
                )
            )
            raise refused[-1]
        return function(*args, **options)

    return refusing


def _refusing_recorded(call: Callable[..., Any]) -> Callable[..., Any]:
    """The ``call`` of a Function, which tells autograd nothing where it does not record."""
    refusing = _refusing(call)

    @functools.wraps(call)
    def refusing_recorded(*args: Any, **options: Any) -> Any:
        return (refusing if autograd.is_recording() else call)(*args, **options)

    return refusing_recorded


def _has_symbols(values: list[Any]) -> bool:
    return any(isinstance(leaf, mx.sym.Symbol) for leaf in leaves([*map(listed, values)]))
