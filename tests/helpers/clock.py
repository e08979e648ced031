"""A clock for tests of time limits, which no busy machine makes go faster."""

from __future__ import annotations

from types import ModuleType

import pytest


class TickingClock:
    """Stands in for the module ``time``: it goes on by ``tick`` seconds when it is looked at."""

    def __init__(self, tick: float) -> None:
        self.tick, self.looks = tick, 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.looks * self.tick

    def replaces_that_of(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        for module in modules:
            monkeypatch.setattr(module, "time", self)
