"""What a Module was bound to before it is bound anew, in case that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class BoundBefore:
    """Some attributes of an object, as they are now, until something takes their place.

    ``more`` brings back what is not among them.
    """

    def __init__(
        self, owner: Any, names: Iterable[str], more: Callable[[], None] = lambda: None
    ) -> None:
        self._attributes, self._names, self._more = vars(owner), names, more
        self._values: dict[str, Any] | None = {
            name: self._attributes[name] for name in names if name in self._attributes
        }

    def let_go(self) -> None:
        """The new ones are to have the memory: there is no way back any more."""
        self._values = None

    def bring_back(self) -> bool:
        """Make the attributes what they were; is there a way back?"""
        if self._values is None:
            return False
        for name in self._names:
            self._attributes.pop(name, None)
        self._attributes.update(self._values)
        self._more()
        return True
