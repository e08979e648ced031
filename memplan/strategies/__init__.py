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


REALISATIONS = ("mirror", "explicit", "packed")


def _builtin(module: str, cls: str, **options: Any) -> Loader:
    def load(**more: Any) -> Strategy:
        made = getattr(importlib.import_module(f"memplan.strategies.{module}"), cls)
        strategy: Strategy = made(**{**options, **more})
        return strategy

    return load


# Under one name there may be one strategy per realisation: they search different schedules.
_loaders: dict[str, dict[str, Loader]] = {
    "store_all": {
        "mirror": _builtin("store_all", "StoreAll"),
        "explicit": _builtin("store_all", "StoreAll"),
    },
    "checkpoint_last": {"explicit": _builtin("explicit_checkpoint", "CheckpointLast")},
    "memonger": {"mirror": _builtin("memonger", "Memonger")},
    "chen_sqrt": {
        "mirror": _builtin("chen", "ChenSqrt"),
        "explicit": _builtin("explicit_chen", "ExplicitChenSqrt"),
    },
    "chen_sqrt_linear": {
        "mirror": _builtin("chen", "ChenSqrt", linear=True),
        "explicit": _builtin("explicit_chen", "ExplicitChenSqrt", linear=True),
    },
    "chen_greedy": {
        "mirror": _builtin("chen", "ChenGreedy"),
        "explicit": _builtin("explicit_chen", "ExplicitChenGreedy"),
    },
    "chen_greedy_linear": {
        "mirror": _builtin("chen", "ChenGreedy", linear=True),
        "explicit": _builtin("explicit_chen", "ExplicitChenGreedy", linear=True),
    },
    "griewank": {"explicit": _builtin("griewank", "Griewank")},
    "griewank_linear": {"explicit": _builtin("griewank", "Griewank", linear=True)},
    "auto": {
        "mirror": _builtin("checkmate", "Checkmate", program_share=0.1),
        "explicit": _builtin("auto", "Auto", memory="blocks"),
    },
    "search": {"explicit": _builtin("search", "Search", memory="blocks")},
    "evict": {"explicit": _builtin("evict", "Evict")},
    "anneal": {"mirror": _builtin("anneal", "Anneal")},
    "checkmate": {
        "mirror": _builtin("checkmate", "Checkmate"),
        "explicit": _builtin("checkmate_full", "CheckmateFull"),
    },
    "checkmate_lp": {"explicit": _builtin("checkmate_lp", "CheckmateLP")},
    "brute_force": {
        "mirror": _builtin("brute_force", "BruteForce"),
        "explicit": _builtin("explicit_brute_force", "ExplicitBruteForce"),
    },
}


# Packed memory takes little more than what is alive.
for _found in _loaders.values():
    if "explicit" in _found:
        _found["packed"] = _found["explicit"]
_loaders["auto"]["packed"] = _builtin("auto", "Auto", memory="packed")
_loaders["search"]["packed"] = _builtin("search", "Search")


def names(realisation: str | None = None) -> tuple[str, ...]:
    """The names of all strategies (for this realisation), those of installed packages included."""
    known = [n for n, found in _loaders.items() if realisation is None or realisation in found]
    return tuple(dict.fromkeys((*known, *(entry.name for entry in entry_points(group=GROUP)))))


def register(name: str, loader: Loader, *, replace: bool = False) -> None:
    """Make ``loader`` (a strategy class, or a function that returns one) known as ``name``.

    It serves every realisation. Raises ArgumentError if the name is taken, unless ``replace``.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"a strategy's name must be a non-empty string, got {name!r}")
    if not callable(loader):
        raise ArgumentError(f"strategy {name!r}: the loader must be callable, got {loader!r}")
    if name in names() and not replace:
        raise ArgumentError(
            f"there is a strategy {name!r} already; pass replace=True to replace it"
        )
    _loaders[name] = dict.fromkeys(REALISATIONS, loader)


def create(strategy: str | Strategy, *, realisation: str = "mirror", **options: Any) -> Strategy:
    """The strategy of this name, with ``options`` as fields; a strategy is returned as it is."""
    if not isinstance(strategy, str):
        if isinstance(strategy, type) or not callable(getattr(strategy, "solve", None)):
            raise ArgumentError(
                f"strategy must be a name or an object with a method solve, got {strategy!r}; "
                f"the names are {', '.join(names(realisation))}"
            )
        return strategy
    loader = _loaders.get(strategy, {}).get(realisation) or _from_entry_point(strategy)
    if loader is None:
        known = "no strategy" if strategy not in _loaders else "for this realisation no strategy"
        raise ArgumentError(
            f"there is {known} {strategy!r}; choose from {', '.join(names(realisation))}"
        )
    return loader(**options)


def _from_entry_point(name: str) -> Loader | None:
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    return partial(found[0].load()) if found else None
