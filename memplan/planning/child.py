"""The process that plans for one that trains: it searches, and leaves MXNet to the other.

``memplan.planning.apart`` starts it. It imports no MXNet. What only MXNet knows, the network of a
schedule and what it allocates, is asked of the training process.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

from memplan.memory.memory import Memory
from memplan.memory.packing import Packing
from memplan.planning.job import Job
from memplan.planning.messages import (
    CANNOT_PICKLE,
    GRAPH,
    TRACE,
    StandIn,
    pickled,
    receive,
    send,
    unpickled,
)
from memplan.planning.realised import Realised
from memplan.step.schedule import Schedule
from memplan.strategies.base import LIVE
from memplan.util.heap import give_back_what_is_free
from memplan.util.interrupts import deferring
from memplan.util.processes import end_with
from memplan.util.progress import LOGGER

# Of a log record, what progress is told by (memplan/util/progress.py).
FIGURES = ("incumbent_seconds", "bound_seconds", "unplanned_seconds")


@dataclass(frozen=True)
class Way:
    """What a search asks of a :class:`memplan.planning.realisation.Realisation`."""

    name: str
    spells_out_backward: bool
    in_one_array: bool
    binds: float


@dataclass(frozen=True)
class ChildJob(Job):
    """A job whose memory is ``counted``, and whose networks are made by ``ask``."""

    counted: Memory = LIVE
    ask: Callable[..., Any] = lambda *_: None

    @cached_property
    def memory(self) -> Memory:
        return self.counted

    def realised(self, schedule: Schedule, packing: Packing | None = None) -> Realised:
        packing = packing or self.memory.packing(schedule)
        return Realised(self.ask(schedule, packing), packing)


class _Forwarding(logging.Handler):
    """Hands log records to the training process."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        extra = {name: getattr(record, name) for name in FIGURES if hasattr(record, name)}
        self._tell("log", record.levelno, record.getMessage(), extra)


class _Printing(io.TextIOBase):
    """Hands what is printed to the training process, whose stdout may be a notebook's."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self._tell = tell

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._tell("print", text)
        return len(text)


class _Conversation:
    """Does what it is asked for, one job after the other, until nobody asks any more."""

    job: Job

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests, self._answers = requests, answers
        self._objects: dict[str, Any] = {}
        LOGGER.propagate = False
        LOGGER.addHandler(_Forwarding(self._tell))
        sys.stdout = _Printing(self._tell)
        warnings.simplefilter("always")
        warnings.showwarning = self._show  # type: ignore[assignment]

    def run(self) -> None:
        """Answer what is asked about one job, and forget it."""
        fields, level = self._read({})
        fields["trace"] = StandIn(TRACE)
        self.job = ChildJob(**fields, ask=self._ask)
        self._objects = {GRAPH: self.job.graph}
        LOGGER.setLevel(level)
        self._tell("ready")
        while data := receive(self._requests):
            try:
                function, arguments, options = unpickled(data, self._objects)
            except Exception as error:  # what the training process has and nobody else can import
                self._tell("unknown", f"{type(error).__name__}: {error}")
                continue
            send(self._answers, self._answer(function, arguments, options))
            del function, arguments, options
        del self.job, fields
        self._objects.clear()
        gc.collect()
        give_back_what_is_free()

    def _answer(self, function: Any, arguments: Any, options: Any) -> bytes:
        """What the function says of the job; an interrupt is one of the function alone."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            answer = function(self.job, *arguments, **options)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return pickled(("answer", answer), self._objects)
        except BaseException as error:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return self._failure(error)

    def _failure(self, error: BaseException) -> bytes:
        text = "".join(traceback.format_exception(error))
        try:
            return pickled(("error", error, text), self._objects)
        except CANNOT_PICKLE:
            return pickled(("error", None, text), self._objects)

    def _ask(self, schedule: Schedule, packing: Any) -> Any:
        with deferring():
            self._tell("realise", schedule, packing)
            kind, value = self._read(self._objects)
        if kind == "error":
            raise value
        return value

    def _show(self, message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        self._tell("warning", str(message), category, filename, lineno)

    def _read(self, objects: dict[str, Any]) -> Any:
        return unpickled(receive(self._requests), objects)

    def _tell(self, *message: Any) -> None:
        data = pickled(message, self._objects)
        with deferring():
            send(self._answers, data)


def main() -> None:
    """Answer on the descriptors that the arguments name, for as long as the parent lives."""
    parent, requests, answers = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not end_with(parent):
        return
    try:
        conversation = _Conversation(os.fdopen(requests, "rb"), os.fdopen(answers, "wb"))
        while True:
            conversation.run()
    except (EOFError, BrokenPipeError):
        os._exit(0)
