"""What is derived from an object that never changes, derived once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


def remembered(owner: Any, what: Hashable, derive: Callable[[], T]) -> T:
    """What ``derive`` makes of ``owner``, kept with ``owner`` under the name ``what``.

    It does what a cached property does, for modules that the class of ``owner`` knows nothing of.
    ``owner`` is an instance of a frozen dataclass; a copy with other fields begins anew.
    """
    cache: dict[Hashable, Any] = owner.__dict__.setdefault("_remembered", {})
    if what not in cache:
        cache[what] = derive()
    value: T = cache[what]
    return value


def forget(owner: Any) -> None:
    """Drop what is remembered of ``owner``.

    Where that refers to ``owner`` in turn, as schedules do to their graph, both would stay until
    Python next looks for garbage.
    """
    owner.__dict__.pop("_remembered", None)
