"""What operators with several outputs return to a script: lists, as with arrays."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mxnet as mx

from memplan.mxnet.trace.nnvm import output_of


@contextmanager
def operators_return_lists(has_arrays: Callable[[types.FrameType], bool]) -> Iterator[None]:
    """Within, an operator of several outputs returns a list of them to code that ``has_arrays``.

    That is what MXNet returns of arrays, and for Symbols of mx.np. One Symbol of all has neither
    ``[-1]``, slices nor ``append``.
    """
    create = mx.symbol.register._symbol_creator

    def create_list(*args: Any, **kwargs: Any) -> Any:
        made = create(*args, **kwargs)
        count = len(made.list_outputs()) if isinstance(made, mx.sym.Symbol) else 1
        if count == 1 or not has_arrays(_caller(sys._getframe(1))):
            return made
        return [output_of(made, place) for place in range(count)]

    mx.symbol.register._symbol_creator = create_list
    try:
        yield
    finally:
        mx.symbol.register._symbol_creator = create


def _caller(frame: types.FrameType) -> types.FrameType:
    """Who has called the function of MXNet's, for Symbols, in which ``frame`` is."""
    while frame.f_back and str(frame.f_globals.get("__name__", "")).startswith("mxnet.symbol"):
        frame = frame.f_back
    return frame
