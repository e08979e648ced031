"""The contexts on which a Module trains, as its user names them."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.util.numbers import shown


def contexts_of(context: Any) -> list[mx.Context]:
    """The contexts that ``context`` is, or has in it; the CPU for None, as for MXNet's Module.

    ArgumentError for what is none, with which MXNet's Module fails when it is bound, or before.
    """
    if context is None:
        return [mx.cpu()]
    if isinstance(context, mx.Context):
        return [context]
    try:
        contexts = list(context)
    except TypeError:
        contexts = []
    if not contexts or not all(isinstance(each, mx.Context) for each in contexts):
        raise ArgumentError(
            f"context must be a context such as mx.gpu(0), or a list of some, got {shown(context)}"
        )
    return contexts
