"""Lists in messages."""

from __future__ import annotations

from collections.abc import Iterable


def first_of(words: Iterable[str], most: int) -> str:
    """The first of ``words``, at ``most`` this many, and how many more there are."""
    listed = list(words)
    text = ", ".join(listed[:most])
    return text if len(listed) <= most else f"{text} and {len(listed) - most} more"
