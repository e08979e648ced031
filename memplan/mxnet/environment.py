"""Environment variables that MXNet reads when it binds, set for the time of a bind only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

MATCH_RANGE = "NNVM_EXEC_MATCH_RANGE"


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Environment variable ``name`` is ``value`` within, and what it was afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def match_range(value: int) -> contextlib.AbstractContextManager[None]:
    """MXNet's allocator works under NNVM_EXEC_MATCH_RANGE ``value`` within."""
    return variable(MATCH_RANGE, str(value))


def current_match_range() -> int:
    """NNVM_EXEC_MATCH_RANGE, under which MXNet binds in this process (16 unless set)."""
    return int(os.environ.get(MATCH_RANGE, 16))
