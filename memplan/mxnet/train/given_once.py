"""Attributes of an object that nobody can change: plans were made for what they are."""

from __future__ import annotations

from typing import Any

from memplan.errors import UsageError


class GivenOnce:
    """An attribute that is set where the object is made; UsageError for whoever sets it later."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else vars(owner)[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        if self._name in vars(owner):
            kind = type(owner).__name__
            raise UsageError(
                f"{self._name} of a {kind} cannot be set, as its plans are for the one that it was "
                f"given; make another {kind}"
            )
        vars(owner)[self._name] = value
