"""What a person at a terminal sees of a command that takes its time, and how Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from memplan.cli import INTERRUPTED
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.progress import LOGGER

# What the first Ctrl-C does.
SEARCH_ENDS = "Ending the search with the best plan so far; press Ctrl-C again to give up."
WORK_ENDS = "Stopping; press Ctrl-C again to end at once."

# Seconds that Python gets to leave by itself after the second Ctrl-C.
GRACE = 1.0


@contextlib.contextmanager
def working(title: str, *, keeps_best: bool = True) -> Iterator[Interrupt]:
    """Shows that the block runs, and what the logger "memplan" says meanwhile.

    On a terminal only, and on stderr; what the block prints goes there too, so that stdout has
    nothing but results. Tells whether Ctrl-C was pressed although the block went on to its end, as
    it does where it searches, and ``keeps_best`` of what it has found.
    """
    with (
        noticing() as interrupt,
        _interruptible(keeps_best),
        contextlib.redirect_stdout(sys.stderr),
    ):
        if not sys.stderr.isatty():
            yield interrupt
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        console = Console(stderr=True)
        progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        try:
            with contextlib.suppress(RuntimeError):  # no thread may be started: it stands still
                progress.start()
            task = progress.add_task(title, total=None)
            with _records(lambda text: progress.update(task, description=f"{title}: {text}")):
                yield interrupt
        finally:
            progress.stop()


@contextlib.contextmanager
def _records(show: Callable[[str], None]) -> Iterator[None]:
    """Calls ``show`` with what is known after every record of the logger "memplan"."""
    handler, level = News(show), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.setLevel(level)
        LOGGER.removeHandler(handler)


class News(logging.Handler):
    """Sums up records of a search: its name, its best so far and its bound.

    The two are the attributes ``incumbent_seconds`` and ``bound_seconds`` of a record, shown as
    overhead if it has ``unplanned_seconds``. One with neither begins another search
    (:func:`memplan.util.progress.tell`).
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show
        self._search = ""
        self._figures: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        unplanned = getattr(record, "unplanned_seconds", None)
        figures = {}
        for label, name in (("best", "incumbent_seconds"), ("bound", "bound_seconds")):
            seconds = getattr(record, name, None)
            if seconds is not None:
                overhead = f"{seconds / unplanned - 1:+.1%}" if unplanned else ""
                figures[label] = f"{label} {overhead or f'{1e3 * seconds:.4g} ms'}"
        if figures:
            self._figures |= figures
        else:
            self._search, self._figures = record.getMessage(), {}
        self._show(", ".join(filter(None, (self._search, *sorted(self._figures.values())))))


@contextlib.contextmanager
def _interruptible(keeps_best: bool) -> Iterator[None]:
    """The second Ctrl-C ends the process even in a solver written in C, for which Python waits.

    The first one ends a search with the best plan so far, as soon as the strategy notices, and all
    other work. Where no thread can be started Ctrl-C does what Python makes of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    has_left = threading.Event()

    def watch() -> None:
        is_second = False
        while signals := reader.recv(1):
            if signals[0] != signal.SIGINT:
                continue
            if is_second and not has_left.wait(GRACE):
                _end_now()
            if not has_left.wait(GRACE):
                print(SEARCH_ENDS if keeps_best else WORK_ENDS, file=sys.stderr)
            is_second = True

    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    with contextlib.suppress(RuntimeError):
        watcher.start()
    try:
        yield
    finally:
        has_left.set()
        signal.set_wakeup_fd(before)
        writer.close()
        if watcher.is_alive():
            watcher.join()
        reader.close()


def _end_now() -> None:
    console = Console(stderr=True)
    console.show_cursor(True)
    console.print("\nInterrupted.")
    os._exit(INTERRUPTED)
