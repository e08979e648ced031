"""The process that plans: started, told about a job, kept for the next one, ended.

To start it takes a second, and to load numba and what it has compiled takes another: longer than
most plans that follow the first one of their network. So it waits for a while for the next plan,
which it makes as a new process would: nothing but what it has loaded stays from one job to another.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from contextlib import suppress

from memplan.planning import child
from memplan.planning.messages import NO_MORE, receive, send
from memplan.util.processes import calling_main, check_can_start, pipe

# How long a process waits for the next plan. It holds up to 200 MB meanwhile.
IDLE_SECONDS = 60.0

#: The name of the thread that waits for that.
IDLE_TIMER = "memplan-idle-process"

# The process that waits, if one does. Taking from a list and adding to it cannot be interrupted by
# another thread, so that there is no lock which a fork could take along.
_WAITING: list[PlanningProcess] = []


class PlanningProcess:
    """A process that answers what is asked about one job after the other."""

    def __init__(self) -> None:
        """Start it; OSError where that is not possible."""
        check_can_start()
        request_reader, requests = pipe()
        try:
            answers, answer_writer = pipe()
        except OSError:
            os.close(request_reader)
            os.close(requests)
            raise
        self.requests = os.fdopen(requests, "wb", closefd=False)
        self.answers = os.fdopen(answers, "rb", closefd=False)
        self._pipes = {number: _file_at(number) for number in (requests, answers)}
        self._owner = os.getpid()
        self._timer: threading.Timer | None = None
        try:
            self.popen = subprocess.Popen(
                calling_main(child.__name__, request_reader, answer_writer),
                pass_fds=(request_reader, answer_writer),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal comes from here alone
            )
        except OSError:
            self._close()
            raise
        finally:
            os.close(request_reader)
            os.close(answer_writer)

    def begin(self, about: bytes) -> None:
        """Tell it about a job; EOFError or BrokenPipeError if it is gone."""
        send(self.requests, about)
        receive(self.answers)

    def wait_for_another(self) -> None:
        """Keep it for the next job, or end it if another one waits.

        A process gets a signal when the thread ends that started it, so one of the main thread
        alone is kept.
        """
        if _WAITING or not _in_main_thread():
            self.end()
            return
        try:
            send(self.requests, NO_MORE)
        except BrokenPipeError:
            self.end()
            return
        self._timer = threading.Timer(IDLE_SECONDS, self._end_if_waiting)
        self._timer.daemon, self._timer.name = True, IDLE_TIMER
        _WAITING.append(self)  # before the timer looks for it
        try:
            self._timer.start()
        except RuntimeError:  # as many threads run as may, and nobody else would end it
            self._end_if_waiting()

    def _end_if_waiting(self) -> None:
        with suppress(ValueError):  # it was taken just now
            _WAITING.remove(self)
            self.end()

    @staticmethod
    def waiting() -> PlanningProcess | None:
        """The process that waits, which waits no longer, for the thread that may use it."""
        for process in list(_WAITING):
            # In a fork, which cannot use it, it is its owner's.
            if process._owner == os.getpid() and _in_main_thread():
                with suppress(ValueError):  # its time is over just now
                    _WAITING.remove(process)
                    assert process._timer is not None
                    process._timer.cancel()
                    if process._has_its_pipes():
                        return process
                    process.end()
        return None

    def end(self) -> None:
        """End it, and leave nothing of it."""
        self.popen.kill()
        self.popen.wait()
        if self._has_its_pipes():
            self._close()

    def _has_its_pipes(self) -> bool:
        """Do they still have their numbers?

        A script may close all numbers, as daemons do, and have other files there by now.
        """
        return all(_file_at(number) == file for number, file in self._pipes.items())

    def _close(self) -> None:
        for stream in (self.requests, self.answers):
            with suppress(BrokenPipeError):
                stream.close()
        for number in self._pipes:
            os.close(number)


def _file_at(number: int) -> tuple[int, int] | None:
    """What tells the file that is open under this number from others; None if none is."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@atexit.register
def _end_what_waits() -> None:
    if (process := PlanningProcess.waiting()) is not None:
        process.end()
