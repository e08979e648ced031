"""Strategies that do in a search what none should, or tell where they run."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Problem, Status
from memplan.util.progress import tell


class NotToBeSentError(Exception):
    """An error that holds what cannot be sent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Odd:
    """Does ``what`` (a method below), and notes in ``path`` the process that it does it in."""

    what: str
    path: str = os.devnull

    def solve(self, problem: Problem) -> Outcome:
        Path(self.path).write_text(str(os.getpid()))
        getattr(self, self.what)()
        return Outcome(Status.FEASIBLE, Schedule.unplanned(problem.graph))

    def nothing(self) -> None:
        pass

    def without_mxnet(self) -> None:
        assert "mxnet" not in sys.modules

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def be_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        os._exit(3)

    def raise_another(self) -> None:
        raise LookupError("not found", 7)

    def raise_what_cannot_be_sent(self) -> None:
        raise NotToBeSentError("nothing to send")

    def speak(self) -> None:
        tell("so far", incumbent_seconds=2.5)
        logging.getLogger("memplan").warning("a line of %s", "log")
        warnings.warn("a warning", UserWarning, stacklevel=1)
        print("printed")

    def be_interrupted(self) -> None:
        """With nothing in hand: the search is given up."""
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    def be_interrupted_twice(self) -> None:
        """Deaf to the first interrupt."""
        os.kill(os.getppid(), signal.SIGINT)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)

    def answer_when_interrupted(self) -> None:
        """With the best so far, as strategies do."""
        try:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            pass

    def sleep(self) -> None:
        time.sleep(600)


@dataclass
class Changing:
    """A strategy that keeps a state."""

    asked: int = 0

    def solve(self, problem: Problem) -> Any:
        self.asked += 1
        return Outcome(Status.FEASIBLE, Schedule.unplanned(problem.graph))
