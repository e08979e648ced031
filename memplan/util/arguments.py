"""What an argument is: true or false, one value or several."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from memplan.errors import ArgumentError
from memplan.util.numbers import shown

P = ParamSpec("P")
R = TypeVar("R")

# So many options are named where one was given without its name.
EXAMPLES = 3


def flag(name: str, value: Any) -> bool:
    """Is ``value``, of the argument ``name``, true? ArgumentError where it is neither."""
    try:
        return bool(value)
    except Exception as error:  # of several elements, or none
        raise ArgumentError(f"{name} must be True or False, got {shown(value)}") from error


def several_of(values: Any) -> list[Any] | None:
    """``values`` as a list; None for text, and for whatever else is one value.

    Such as an array of NumPy's without axes, which is an Iterable by its class.
    """
    if isinstance(values, str | bytes | bytearray):
        return None
    try:
        iterator = iter(values)
    except TypeError:
        return None
    return list(iterator)


def with_named_options(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, but ArgumentError for an option without its name, and one that there is not.

    Python's own errors name no option, and not what was given without a name.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.name != "self"]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = [f"{p.name}=..." for p in parameters if p.kind is p.KEYWORD_ONLY][:EXAMPLES]
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def wrapped(*args: P.args, **named: P.kwargs) -> R:
        if len(args) > len(by_place):
            places = ", ".join(place for place in by_place if place != "self")
            raise ArgumentError(
                f"{name}() takes only {places} without a name, and got "
                f"{shown(args[len(by_place)])} besides: write which option that is"
                f"{', as ' if options else ''}{', '.join(options)} (help({name}) has all)"
            )
        for given in named:
            if given not in known and not takes_any:
                raise ArgumentError(f"{name} has no option {given!r}; it has {', '.join(known)}")
        return function(*args, **named)

    return wrapped
