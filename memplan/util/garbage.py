"""Python's collector of garbage: none while large structures are built, and whether it works."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: That of Python's collector: "start" while it works.
_phase = "stop"


@contextmanager
def no_collections() -> Iterator[None]:
    """Within this, Python looks for no garbage that refers to itself.

    It looks whenever the number of objects has grown by a certain share, and then visits all of
    them. That took a third of the time in which a graph of 100,000 nodes is made, none of which is
    garbage.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_collecting() -> bool:
    """Has the collector found what goes now, or what held that? Then it goes at any place."""
    return _phase == "start"


@functools.cache
def hear_of_collections() -> None:
    """From now on :func:`is_collecting` is known."""
    gc.callbacks.append(_note)


def _note(phase: str, _: Any) -> None:
    global _phase
    _phase = phase
