"""What another thread may do at any time, at the worst one."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def amid_weak_dictionaries(act: Callable[[], Any]) -> Iterator[None]:
    """``act`` whenever code of Python's weak dictionaries begins or goes on, as after each key."""

    def traced(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename == weakref.__file__:
            act()

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(before)
