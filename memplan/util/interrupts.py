"""Ctrl-C: noticed by whoever asks, although a strategy answered it; put off; or passed on.

And the signals by which another process, or a terminal that goes, ends this one.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


@dataclass
class Interrupt:
    """Has there been a Ctrl-C?"""

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


def as_it_came(error: SystemError) -> BaseException:
    """The KeyboardInterrupt of which Python has made ``error``, if it is one; else ``error``.

    It does so where one is raised as a compiled function of numba returns.
    """
    cause = error.__cause__ or error.__context__
    return cause if isinstance(cause, KeyboardInterrupt) else error


@contextmanager
def passing_on(to: Callable[[], Any]) -> Iterator[None]:
    """A SIGINT that comes within calls ``to``, which stops what is waited for here.

    The handler that was there before is called as well, but the KeyboardInterrupt that it raises
    goes no further.
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
def leaving_in_order() -> Iterator[None]:
    """A SIGTERM or SIGHUP within raises SystemExit, so that files made for a while are removed.

    Only in the main thread, and where nobody has decided otherwise what the signal does (nohup
    does). What runs in C is not left before it returns: so this is for what waits for other
    processes.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        # A shell passes on the SIGHUP that the kernel sends as well: the second one is not to end
        # what the first has begun.
        for ending in endings:
            signal.signal(ending, signal.SIG_IGN)
        sys.exit(128 + number)

    endings = []
    if threading.current_thread() is threading.main_thread():
        both = (signal.SIGTERM, signal.SIGHUP)
        endings = [number for number in both if signal.getsignal(number) is signal.SIG_DFL]
    for ending in endings:
        signal.signal(ending, leave)
    try:
        yield
    finally:
        for ending in endings:
            signal.signal(ending, signal.SIG_DFL)


@contextmanager
def _handling(note: Callable[[int, FrameType | None, Handler], None]) -> Iterator[None]:
    """A SIGINT that comes within calls ``note``, with the handler that was there before."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: note(number, frame, before))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
