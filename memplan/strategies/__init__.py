"""The registry of strategies: one dict of name to loader.

A strategy is a frozen dataclass with a method ``solve``: :class:`Strategy`.
Packages add theirs with :func:`register` or by an entry point in the group "memplan.strategies".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from memplan.errors import ArgumentError
from memplan.strategies.base import Outcome, Status, Strategy

__all__ = ["GROUP", "Outcome", "Status", "Strategy", "create", "names", "register"]

GROUP = "memplan.strategies"

Loader = Callable[..., Strategy]


def _builtin(module: str, cls: str, **options: Any) -> Loader:
    def load(**more: Any) -> Strategy:
        made = getattr(importlib.import_module(f"memplan.strategies.{module}"), cls)
        strategy: Strategy = made(**{**options, **more})
        return strategy

    return load


_loaders: dict[str, Loader] = {
    "store_all": _builtin("store_all", "StoreAll"),
    "memonger": _builtin("memonger", "Memonger"),
    "chen_sqrt": _builtin("chen", "ChenSqrt"),
    "chen_sqrt_linear": _builtin("chen", "ChenSqrt", linear=True),
    "chen_greedy": _builtin("chen", "ChenGreedy"),
    "chen_greedy_linear": _builtin("chen", "ChenGreedy", linear=True),
    "anneal": _builtin("anneal", "Anneal"),
    "checkmate": _builtin("checkmate", "Checkmate"),
    "brute_force": _builtin("brute_force", "BruteForce"),
}


def names() -> tuple[str, ...]:
    """The names of all strategies, those of installed packages included."""
    return tuple(dict.fromkeys((*_loaders, *(entry.name for entry in entry_points(group=GROUP)))))


def register(name: str, loader: Loader, *, replace: bool = False) -> None:
    """Make ``loader`` (a strategy class, or a function that returns one) known as ``name``.

    Raises ArgumentError if the name is taken, unless ``replace``.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"a strategy's name must be a non-empty string, got {name!r}")
    if not callable(loader):
        raise ArgumentError(f"strategy {name!r}: the loader must be callable, got {loader!r}")
    if name in names() and not replace:
        raise ArgumentError(
            f"there is a strategy {name!r} already; pass replace=True to replace it"
        )
    _loaders[name] = loader


def create(strategy: str | Strategy, **options: Any) -> Strategy:
    """The strategy of this name, with ``options`` as fields; a strategy is returned as it is."""
    if not isinstance(strategy, str):
        if isinstance(strategy, type) or not callable(getattr(strategy, "solve", None)):
            raise ArgumentError(
                f"strategy must be a name or an object with a method solve, got {strategy!r}; "
                f"the names are {', '.join(names())}"
            )
        return strategy
    loader = _loaders.get(strategy) or _from_entry_point(strategy)
    if loader is None:
        raise ArgumentError(f"there is no strategy {strategy!r}; choose from {', '.join(names())}")
    return loader(**options)


def _from_entry_point(name: str) -> Loader | None:
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    return partial(found[0].load()) if found else None
