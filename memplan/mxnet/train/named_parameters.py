"""The parameters of a block by their names, by which a plan tells them apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.train.asked_gradients import every_parameter

Parameter = Any


def named_parameters(block: mx.gluon.Block) -> dict[str, Parameter]:
    """Those of ``block`` and of all that is in it; ArgumentError for two of one name.

    A ``collect_params`` of the user's may leave some out that the block reads, as frozen ones.
    """
    every = [(parameter.name, parameter) for parameter in every_parameter(block)]
    try:
        found = dict(block.collect_params().items())
    except AssertionError:  # MXNet's, for two of one name
        by_name(every)
        raise
    collected = set(map(id, found.values()))
    return by_name([*found.items(), *(pair for pair in every if id(pair[1]) not in collected)])


def by_name(pairs: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Parameters that are given with their names; ArgumentError for two of one name."""
    parameters: dict[str, Parameter] = {}
    for name, parameter in pairs:
        if parameters.setdefault(name, parameter) is not parameter:
            raise ArgumentError(
                f"two different parameters are both named {name!r}, and a plan tells parameters "
                f"apart by their names; make one of their layers with another prefix, or each of "
                f"them under name_scope() of its block"
            )
    return parameters
