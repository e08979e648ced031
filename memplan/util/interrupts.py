"""Ctrl-C during a search: was it pressed, although a strategy answered with its best so far?"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@dataclass
class Interrupt:
    """Whether there was one."""

    has_come: bool = False


@contextmanager
def noticing() -> Iterator[Interrupt]:
    """Notes a SIGINT that comes within, and hands it on: KeyboardInterrupt is raised as without it.

    Only in the main thread, where Python delivers signals; elsewhere nothing is ever noticed.
    """
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None, before: Handler) -> None:
        interrupt.has_come = True
        before(number, frame)

    with _handling(note):
        yield interrupt


@contextmanager
def deferring() -> Iterator[Interrupt]:
    """Notes a SIGINT that comes within, and hands it on only at the end, whatever is raised."""
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None, before: Handler) -> None:
        interrupt.has_come = True

    try:
        with _handling(note):
            yield interrupt
    finally:
        if interrupt.has_come:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def passing_on(to: Callable[[], Any]) -> Iterator[None]:
    """A SIGINT that comes within calls ``to``, which stops what is waited for here.

    Who was there before is told, too; the KeyboardInterrupt that it raises is not raised here.
    """

    def note(number: int, frame: FrameType | None, before: Handler) -> None:
        try:
            before(number, frame)
        except KeyboardInterrupt:
            pass
        finally:
            to()

    with _handling(note):
        yield


@contextmanager
def _handling(note: Callable[[int, FrameType | None, Handler], None]) -> Iterator[None]:
    """A SIGINT within calls ``note``, with the handler that was there before."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: note(number, frame, before))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
