"""Functions that take shapes of inputs and options of their own by name must tell the two apart."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from memplan.errors import ArgumentError
from memplan.planning.job import OPTIONS
from memplan.util.arguments import several_of
from memplan.util.numbers import shown

P = ParamSpec("P")
R = TypeVar("R")


def no_shapes_for_options(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` of a network, but ArgumentError where an option is given the shape of an input.

    No option takes whole numbers in a row, and an input may be called as an option is. Nor is there
    an option where what is no shape has a name that neither an option has nor an input.
    """
    parameters = inspect.signature(function).parameters.values()
    of_function = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    choices = tuple(dict.fromkeys((*of_function[1:], *sorted(OPTIONS))))
    named = {*of_function, *choices}

    @functools.wraps(function)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        given = [name for name, value in options.items() if name in named and _is_shape(value)]
        others = [name for name, value in options.items() if not (name in named or _may_be(value))]
        net = args[0] if args else options.get("net")
        inputs = _inputs_of(net) if given or others else []
        for name in others:
            if name not in inputs:
                raise ArgumentError(
                    f"{function.__name__} has no option {name!r}; it has {', '.join(choices)}, and "
                    f"the shapes of inputs, as data=(32, 3, 224, 224)"
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


def _may_be(value: object) -> bool:
    """May ``value`` be meant for a shape? A right one is looked for elsewhere."""
    if isinstance(value, Iterator):  # which can be read once
        return True
    several = several_of(value)
    return several is not None and all(n == "N" or not isinstance(n, str) for n in several)


def _inputs_of(net: object) -> list[str]:
    """The names of the variables of ``net``, if it is a network."""
    return list(net.list_inputs()) if hasattr(net, "list_inputs") else []
