"""Ctrl-C after a given call of MXNet's library."""

from __future__ import annotations

from typing import Any


class Interrupted:
    """MXNet's library, of which the ``ncalls``-th call is interrupted by Ctrl-C."""

    def __init__(self, library: Any, ncalls: int) -> None:
        self.library, self.ncalls = library, ncalls

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> Any:
            result = getattr(self.library, name)(*arguments)
            self.ncalls -= 1
            if not self.ncalls:
                raise KeyboardInterrupt
            return result

        return function
