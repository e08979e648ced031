"""Ctrl-C at a moment that is counted: a timer would be too early or late on a busy machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memplan.programs import solver
from memplan.util.interrupts import Interrupt, deferring


class Pressing:
    """Presses Ctrl-C as something happens for the ``count``-th time."""

    def __init__(self, count: int) -> None:
        self.left = count

    @property
    def pressed(self) -> bool:
        return self.left <= 0

    def happened(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def at_calls(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        """What is counted are calls of a method."""
        method = getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.happened()
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    def in_highs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is counted is how often HiGHS, while it solves, asks whether it is to stop."""
        pressing = self

        class Asked(Interrupt):
            def __init__(self, interrupt: Interrupt) -> None:
                self.interrupt = interrupt

            @property
            def has_come(self) -> bool:  # type: ignore[override]
                pressing.happened()
                return self.interrupt.has_come

        @contextmanager
        def asked() -> Iterator[Interrupt]:
            with deferring() as interrupt:
                yield Asked(interrupt)

        monkeypatch.setattr(solver, "deferring", asked)
