"""Functions that take shapes of inputs and options of their own by name must tell the two apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from memplan.errors import ArgumentError
from memplan.planning.job import OPTIONS
from memplan.util.numbers import shown

P = ParamSpec("P")
R = TypeVar("R")


def no_shapes_for_options(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of a network, but ArgumentError where an option is given the shape of an input.

    No option takes whole numbers in a row, and an input may be called as an option is.
    """
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} | OPTIONS

    @functools.wraps(function)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        given = [name for name, value in options.items() if name in named and _is_shape(value)]
        inputs = (
            args[0].list_arguments()
            if given and args and hasattr(args[0], "list_arguments")
            else []
        )
        for name in given:
            if name in inputs:
                raise ArgumentError(
                    f"{name}={shown(options[name])} is an option of memplan.{function.__name__}, "
                    f"and an input of the network is called so, too, to which no shape can be "
                    f"given by this name; rename the input"
                )
        return function(*args, **options)

    return wrapped


def _is_shape(value: object) -> bool:
    """Of whole numbers, and of the "N" of :func:`memplan.max_batch_size`."""
    return isinstance(value, tuple | list) and all(
        isinstance(n, int) or (isinstance(n, str) and n == "N") for n in value
    )
