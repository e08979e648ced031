"""The registry of strategies: one row a name, which means the same for every realisation.

A strategy is a frozen dataclass with a method ``solve``: :class:`Strategy`.
Packages add theirs with :func:`register` or by an entry point in the group "memplan.strategies".
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from memplan.errors import ArgumentError
from memplan.strategies.base import Outcome, Problem, Status, Strategy, check_option
from memplan.strategies.spaces.flags import Flags
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Space
from memplan.util.numbers import plain, shown

__all__ = ["Outcome", "Problem", "Status", "Strategy", "create", "names", "register"]

GROUP = "memplan.strategies"

# What people write for Python's constants, and for its infinity.
_PYTHON = {"true": "True", "false": "False", "none": "None", "inf": "1e999"}

# What Python raises for text that is no value of its own.
_NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)

Loader = Callable[..., Strategy]


@dataclass(frozen=True)
class RealisationRow:
    """Which schedules a realisation can run, and where its class is: "module:class"."""

    space: Space
    where: str


REALISATIONS = {
    "mirror": RealisationRow(Flags(), "memplan.mxnet.realise.mirror:Mirror"),
    "explicit": RealisationRow(Sequences(), "memplan.mxnet.realise.explicit:Explicit"),
    "packed": RealisationRow(Sequences(), "memplan.mxnet.realise.packed:Packed"),
    "updating": RealisationRow(Sequences(), "memplan.mxnet.realise.updating:Updating"),
}
"""How MXNet is made to run a plan: a row for each way (:mod:`memplan.planning.realisation`)."""


@dataclass(frozen=True)
class _Row:
    """A strategy: its loader, and the kinds of spaces in which it finds schedules."""

    loader: Loader
    spaces: tuple[type[Space], ...] = (Flags, Sequences)

    def serves(self, realisation: str) -> bool:
        return isinstance(REALISATIONS[realisation].space, self.spaces)


def _builtin(module: str, cls: str) -> Loader:
    def load(**options: Any) -> Strategy:
        strategy: Strategy = getattr(importlib.import_module(f"memplan.strategies.{module}"), cls)(
            **options
        )
        return strategy

    return load


_rows = {
    "store_all": _Row(_builtin("store_all", "StoreAll")),
    "checkpoint_last": _Row(_builtin("checkpoint_last", "CheckpointLast"), (Sequences,)),
    "memonger": _Row(_builtin("memonger", "Memonger")),
    "chen_sqrt": _Row(_builtin("chen", "ChenSqrt")),
    "chen_greedy": _Row(_builtin("chen", "ChenGreedy")),
    "griewank": _Row(_builtin("griewank", "Griewank"), (Sequences,)),
    "auto": _Row(_builtin("auto", "Auto")),
    "search": _Row(_builtin("search", "Search")),
    "evict": _Row(_builtin("evict", "Evict"), (Sequences,)),
    "checkmate": _Row(_builtin("checkmate", "Checkmate")),
    "checkmate_lp": _Row(_builtin("checkmate_lp", "CheckmateLP"), (Sequences,)),
}


def names(realisation: str | None = None) -> tuple[str, ...]:
    """The names that :func:`create` knows, those of installed packages included.

    With ``realisation``, those of strategies that find schedules for it.
    """
    check_realisation(realisation)
    builtins = [n for n, row in _rows.items() if realisation is None or row.serves(realisation)]
    return tuple(dict.fromkeys((*builtins, *(entry.name for entry in entry_points(group=GROUP)))))


def name_of(strategy: str | Strategy) -> str:
    """What a plan and tables call ``strategy``."""
    return strategy if isinstance(strategy, str) else type(strategy).__name__


def register(name: str, loader: Loader, *, replace: bool = False) -> None:
    """Make ``loader`` (a strategy class, or a function that returns one) known as ``name``.

    It serves every realisation. Raises ArgumentError if the name is taken, unless ``replace``.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"a strategy's name must be a non-empty string, got {name!r}")
    if ":" in name:
        raise ArgumentError(
            f"a strategy's name cannot have a ':', behind which its options stand, got {name!r}"
        )
    if not callable(loader):
        raise ArgumentError(f"strategy {name!r}: the loader must be callable, got {loader!r}")
    if name in names() and not replace:
        raise ArgumentError(
            f"there is a strategy {name!r} already; pass replace=True to replace it"
        )
    _rows[name] = _Row(loader)


def create(strategy: str | Strategy, *, realisation: str | None = None, **options: Any) -> Strategy:
    """The strategy of this name, with ``options`` as fields; a strategy is returned as it is.

    Options may stand behind the name as well: "chen_greedy:linear:ntrial=12". ArgumentError for a
    name or an option that there is not, for options beside what is a strategy already, for what is
    none, and, with ``realisation``, for a name of one that finds no schedules for it.
    """
    check_realisation(realisation)
    if not isinstance(strategy, str):
        if isinstance(strategy, type) or not callable(getattr(strategy, "solve", None)):
            raise ArgumentError(
                f"strategy must be a name or an object with a method solve, got "
                f"{shown(strategy)}; the names are {', '.join(names(realisation))}"
            )
        if options:
            raise ArgumentError(
                f"{shown(strategy)} has its options, and takes no {', '.join(options)}; give the "
                f"name of a strategy, or make another of this by dataclasses.replace"
            )
        return strategy
    strategy, text_options = _parsed(strategy)
    options = text_options | options
    row = _rows.get(strategy) or _from_entry_point(strategy)
    if row is None or (realisation is not None and not row.serves(realisation)):
        purpose = "" if row is None else f" for realisation {realisation!r}"
        raise ArgumentError(
            f"there is no strategy {shown(strategy)}{purpose}; choose from "
            f"{', '.join(names(realisation))}"
        )
    try:
        result = row.loader(**options)
    except TypeError as error:
        if not options:
            raise
        reason = _wrong_option(row, options, text_options) or error
        raise ArgumentError(f"strategy {strategy!r}: {reason}") from error
    _check_switches(strategy, result)
    return result


def _wrong_option(row: _Row, options: Iterable[str], in_text: Collection[str]) -> str:
    """Which option there is not, and those that there are; empty as far as that is not known."""
    try:
        known = options_of(row.loader())
    except TypeError:  # it does without no option
        return ""
    unknown = [option for option in options if option not in known]
    if not unknown:
        return ""
    choices = sorted(in_words(known) if unknown[0] in in_text else known)
    return f"there is no option {unknown[0]!r}; " + (
        f"its options are {', '.join(choices)}" if choices else "it has none"
    )


def _check_switches(name: str, strategy: Strategy) -> None:
    """ArgumentError where an option that is true or false has another value, such as "no"."""
    if dataclasses.is_dataclass(strategy):
        for field in dataclasses.fields(strategy):
            value = getattr(strategy, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ArgumentError(
                    f"strategy {name!r}: {field.name} is true or false, got {value!r}"
                )


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """The name in ``text``, and the options behind it; one without a value is True.

    ArgumentError for an option that stands there twice.
    """
    name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option in options:
            raise ArgumentError(f"strategy {text!r}: the option {option!r} stands there twice")
        try:
            options[option] = ast.literal_eval(_PYTHON.get(value, value)) if equals else True
        except _NO_LITERAL:
            options[option] = value  # a word, such as HIGHS
    return name, options


def check_realisation(realisation: str | None, *, besides: tuple[str, ...] = ()) -> None:
    """ArgumentError unless ``realisation`` is None or one of :data:`REALISATIONS`.

    The error names what is allowed ``besides``; where that is something, None is not.
    """
    if realisation is None and not besides:
        return
    if not isinstance(realisation, str) or realisation not in (*REALISATIONS, *besides):
        choices = ", ".join(map(repr, (*REALISATIONS, *besides)))
        raise ArgumentError(f"there is no realisation {shown(realisation)}; choose from {choices}")


def options_of(strategy: Strategy) -> frozenset[str]:
    """The names of a strategy's options."""
    if not dataclasses.is_dataclass(strategy):
        return frozenset()
    return frozenset(field.name for field in dataclasses.fields(strategy))


def in_words(options: Iterable[str]) -> list[str]:
    """Those of ``options`` that can stand behind a strategy's name: no schedule can."""
    return [option for option in options if option != "start"]


def configured(
    strategy: str | Strategy, *, realisation: str | None = None, **options: Any
) -> str | Strategy:
    """``strategy`` with those of ``options`` that it has and that are not None.

    They replace those that stand behind its name. ArgumentError for a value that an option cannot
    have, also where ``strategy`` lacks it, and for what :func:`create` refuses.
    """
    solver = create(strategy, realisation=realisation)
    for option, value in options.items():
        if value is not None:
            check_option(option, value)
    fields = options_of(solver)
    values = {k: plain(v) for k, v in options.items() if k in fields and v is not None}
    if isinstance(strategy, str):
        name, *parts = strategy.split(":")
        kept = [part for part in parts if part.partition("=")[0] not in values]
        return ":".join((name, *kept, *(f"{option}={value!r}" for option, value in values.items())))
    return dataclasses.replace(solver, **values) if values else strategy  # type: ignore[type-var]


def _from_entry_point(name: str) -> _Row | None:
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    return _Row(partial(entries[0].load())) if entries else None
