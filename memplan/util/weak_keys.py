"""The keys of a dictionary that holds them weakly, whatever other threads do."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Key = TypeVar("Key")


def keys_of(weak: WeakKeyDictionary[Key, Any]) -> list[Key]:
    """Those that are still there.

    To iterate ``weak`` is code of Python's, amid which another thread may add a key: it raises
    RuntimeError then. The list of its references is made without that.
    """
    return [key for reference in weak.keyrefs() if (key := reference()) is not None]
