"""Planning in a child process: what it leaves behind, and what kills it, ends with the child.

numba, LLVM and a solver take some 150 MB, which a process that goes on to train would keep, and a
solver may abort. The child gets a traced job, and searches without MXNet
(:mod:`memplan.planning.child`); networks are made, bound and measured here. For a while it waits
for the next job (:mod:`memplan.planning.process`).
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from memplan.errors import MemplanError, PlanningError
from memplan.memory.packing import Packing
from memplan.planning import child
from memplan.planning.job import Job
from memplan.planning.messages import CANNOT_PICKLE, GRAPH, TRACE, pickled, receive, send, unpickled
from memplan.planning.process import PlanningProcess
from memplan.planning.realised import realise
from memplan.step.schedule import Schedule
from memplan.util.heap import give_back_what_is_free
from memplan.util.interrupts import deferring, passing_on
from memplan.util.processes import ending
from memplan.util.progress import LOGGER

IN_A_CHILD = True
"""The tests of other things plan in their own process, as a child takes a second to start."""

# Calls a function with the job and what else is given, in the child or here.
Do = Callable[..., Any]

# What the child may have loaded for one job and keep for another: code that does not change.
_KEEPS = {"memplan", *sys.stdlib_module_names}


@contextmanager
def apart(job: Job) -> Iterator[Do]:
    """Yields ``do``: ``do(function, ...)`` is ``function(job, ...)``, computed in a child process.

    The child starts with the first call, unless one waits since the last block; after this one it
    waits for the next. What the function raises is raised here; PlanningError if the child ends
    before it has answered. Functions and arguments that cannot be sent, such as a strategy that the
    script itself defines, are called here, and so are all where no process can be started, or what
    starts is no Python with memplan: a program that embeds Python may be what it takes for its own.
    An interrupt is the function's; the second one ends the child.
    """
    helper = _Child(job)
    try:
        yield helper.do
    finally:
        helper.end()
        give_back_what_is_free()  # by tracing, up to 20 MB


class _Child:
    """The process, once it has begun, and what stays here by the names that it knows."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._objects: dict[str, Any] = {GRAPH: job.graph, TRACE: job.trace}
        self._modules: set[str] = set()
        self._process: PlanningProcess | None = None
        self._can_begin = True
        self._is_settled = False
        self._ninterrupts = 0

    def do(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """See :func:`apart`."""
        try:
            request = pickled((function, arguments, options), self._objects, self._modules)
            with_child = IN_A_CHILD and self._can_begin and self._has_begun()
        except CANNOT_PICKLE:
            with_child = False
        if not with_child:
            return function(self._job, *arguments, **options)
        assert self._process is not None
        with passing_on(self._interrupt):
            self._is_settled = False
            try:
                send(self._process.requests, request)
                kind, *rest = self._answer(self._process)
            except (EOFError, BrokenPipeError):
                raise self._death() from None
            self._is_settled = self._ninterrupts == 0
        if kind == "unknown":
            return function(self._job, *arguments, **options)
        if kind == "error":
            error, text = rest  # without the error where that cannot be sent
            raise error or PlanningError(f"planning has failed:\n{text}")
        return rest[0]

    def _has_begun(self) -> bool:
        """Does the process know the job? It is started if none waits; False if that fails."""
        if self._process is not None:
            return True
        about = pickled((_fields(self._job), LOGGER.getEffectiveLevel()), {})
        process = PlanningProcess.waiting()
        if process is not None:
            with suppress(EOFError, BrokenPipeError):
                self._process = process
                process.begin(about)
                return True
            self._process = None
            process.end()  # it was gone already
        try:
            self._process = PlanningProcess()
        except OSError as error:
            return self._begins_not(f"it can start no other: {error}")
        try:
            self._process.begin(about)
        except (EOFError, BrokenPipeError):
            status = self._process.popen.wait()
            if status < 0:  # what ends one process by a signal may end this one
                raise self._death() from None
            self._process.end()
            self._process = None
            return self._begins_not(
                f"the other that it has started {ending(status)}; sys.executable, which is "
                f"{sys.executable!r}, should be the Python that has memplan"
            )
        return True

    def _begins_not(self, reason: str) -> bool:
        """False, as :meth:`_has_begun` is to say; the log has the ``reason``, once."""
        LOGGER.warning("memplan plans in this process, as %s", reason)
        self._can_begin = False
        return False

    def _answer(self, process: PlanningProcess) -> tuple[Any, ...]:
        """What the child says in the end; before that, it may tell and ask."""
        while True:
            kind, *rest = unpickled(receive(process.answers), self._objects)
            if kind == "log":
                level, text, figures = rest
                LOGGER.log(level, "%s", text, extra=figures)
            elif kind == "print":
                print(rest[0], end="", flush=True)
            elif kind == "warning":
                warnings.warn_explicit(*rest)
            elif kind == "realise":
                send(process.requests, self._realised(*rest))
            else:
                return (kind, *rest)

    def _realised(self, schedule: Schedule, packing: Packing | None) -> bytes:
        """What MXNet makes of a schedule of the child's."""
        try:
            footprint = realise(self._job, schedule, packing).footprint
        except MemplanError as error:
            return pickled(("error", error), self._objects)
        return pickled(("made", footprint), self._objects)

    def _interrupt(self) -> None:
        assert self._process is not None
        self._ninterrupts += 1
        self._process.popen.send_signal(signal.SIGINT if self._ninterrupts == 1 else signal.SIGKILL)

    def _death(self) -> BaseException:
        """What is to be raised as the child is gone."""
        assert self._process is not None
        status = self._process.popen.wait()
        if self._ninterrupts > 1:
            return KeyboardInterrupt()
        return PlanningError(
            f"the process that plans {ending(status)}. Nothing in this process was lost: plan "
            f"again with another strategy or budget, or where there is more memory (memplan plan "
            f"writes a file, by which Module trains)"
        )

    def end(self) -> None:
        """Leave the process, if there is one, to the next job, or end it.

        It is ended if it is not known to wait for a request, or may have loaded a strategy of the
        user's, which could be another one by then.
        """
        if self._process is None:
            return
        can_serve = all(name.partition(".")[0] in _KEEPS for name in self._modules)
        with deferring():
            if self._is_settled and can_serve:
                self._process.wait_for_another()
            else:
                self._process.end()


def _fields(job: Job) -> dict[str, Any]:
    """What :class:`memplan.planning.child.ChildJob` is made of."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    del fields["trace"]
    realisation = job.realisation
    names = (field.name for field in dataclasses.fields(child.Way))
    way = child.Way(**{name: getattr(realisation, name) for name in names})
    return fields | {"realisation": way, "counted": job.memory}
