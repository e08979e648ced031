"""Attempts that do not depend on each other: here one after the other, or in an executor.

What travels to a worker is the network as JSON, its costs and the strategy; what comes back is the
attempt as JSON, which is checked, realised and measured here
(:mod:`memplan.planning.attempt_json`). So a worker may be a process or another machine, and cannot
make a plan that would not have been accepted here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from memplan.errors import ArgumentError, MemplanError, PlanningError, UsageError
from memplan.planning import attempt_json, job_json
from memplan.planning.apart import Do
from memplan.planning.attempt import try_strategy
from memplan.planning.cache import Cache, digest
from memplan.planning.job import Job
from memplan.planning.own_code import own_code
from memplan.planning.plan import Attempt
from memplan.planning.realisation import as_traced
from memplan.step.schedule import Schedule
from memplan.strategies import Status, Strategy, create, name_of
from memplan.util.interrupts import Interrupt, noticing
from memplan.util.numbers import shown

# The process that imported this: a fork of it has other threads' locks, but not the threads.
_HOME = os.getpid()

# MXNet binds in one thread at a time here: what it allocates depends on the environment.
_ONE_AT_A_TIME = threading.Lock()


def _version() -> str:
    """That of memplan, for the keys of the cache."""
    try:
        return importlib.metadata.version("memplan")
    except importlib.metadata.PackageNotFoundError:  # its sources, by PYTHONPATH
        return "not installed"


@dataclass(frozen=True)
class Task:
    """A strategy to try on a job: the arguments of :func:`memplan.planning.attempt.try_strategy`.

    ``do`` is what :func:`memplan.planning.apart.apart` yields for the job (None: it is tried here).
    """

    job: Job
    strategy: str | Strategy
    budget_nbytes: int | None
    start: Schedule | None = None
    bound_seconds: float = 0.0
    since: float | None = None
    spent: float = 0.0
    do: Do | None = None

    @property
    def name(self) -> str:
        """What tables call the strategy."""
        return name_of(self.strategy)

    @property
    def solver(self) -> Strategy:
        """The strategy itself."""
        return create(self.strategy, realisation=self.job.realisation.name)

    def run(self) -> Attempt:
        """The attempt."""
        return self._do(
            try_strategy,
            self.solver,
            self.budget_nbytes,
            start=self.start,
            bound_seconds=self.bound_seconds,
            since=self.since,
            spent=self.spent,
            name=self.name,
        )

    def read(self, text: str) -> Attempt:
        """The attempt that is recorded as ``text``; ScheduleError if it is none of this job."""
        return self._do(attempt_json.from_json, text)

    def _do(self, function: Callable[..., Attempt], *arguments: Any, **options: Any) -> Attempt:
        if self.do is None:
            return function(self.job, *arguments, **options)
        attempt: Attempt = self.do(function, *arguments, **options)
        return attempt

    @functools.cached_property
    def key(self) -> str | None:
        """Everything that its outcome depends on, as text; None if that cannot be told."""
        job, solver = self.job, self.solver
        options = _options_of(solver)
        code = None if options is None else own_code(solver)
        if options is None or code is None:
            return None
        return json.dumps(
            {
                "memplan": _version(),
                "format": attempt_json.FORMAT,
                "graph": digest(job.graph.to_json()),
                "network": digest(job.trace.symbol.tojson()),
                "realisation": job.realisation.name,
                "on_gpu": job.on_gpu,
                "beside": dataclasses.asdict(job.beside),
                "time_limit": job.time_limit,
                "max_overhead": job.max_overhead,
                "effort": job.effort,
                "bound_seconds": self.bound_seconds,
                "budget_nbytes": self.budget_nbytes,
                "name": self.name,
                "strategy": f"{type(solver).__module__}.{type(solver).__qualname__}",
                "code": code,
                "options": options,
                "start": None if self.start is None else digest(self.start.to_json()),
            }
        )


def _options_of(solver: Strategy) -> dict[str, str] | None:
    """The strategy's options as text; None if they have no faithful text."""
    if not dataclasses.is_dataclass(solver):
        return None
    options = {}
    for field in dataclasses.fields(solver):
        value = getattr(solver, field.name)
        is_schedule = isinstance(value, Schedule)
        options[field.name] = digest(value.to_json()) if is_schedule else repr(value)
    return None if any(" at 0x" in text for text in options.values()) else options


def run(
    tasks: Iterable[Task],
    *,
    interrupt: Interrupt,
    executor: Executor | None = None,
    cache: Cache | None = None,
    go_on: bool = False,
) -> list[Attempt | None]:
    """The attempt of every task, in order; all the same whether made here or in ``executor``.

    What ``cache`` has is not made again. With ``go_on`` a strategy that raises is an attempt with
    its ``error``; if all do, the first error is raised. After an ``interrupt``, which the caller
    notices (:func:`memplan.util.interrupts.noticing`), the attempts that are not yet made are None;
    if that is all of them, KeyboardInterrupt is raised. Raises ArgumentError for what is no
    executor, UsageError for one that was shut down, PlanningError for one that has broken.
    """
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ArgumentError(
            f"executor must be a concurrent.futures.Executor, got {shown(executor)}"
        )
    todo = list(tasks)
    attempts = [None if cache is None else _kept(task, cache) for task in todo]
    places = [place for place, attempt in enumerate(attempts) if attempt is None]
    missing = [todo[place] for place in places]
    answers = _here(missing) if executor is None else _there(missing, executor)
    errors: list[Exception] = []
    with contextlib.closing(answers):
        try:
            if interrupt.has_come:  # and was swallowed before this, as Python does in a __del__
                raise KeyboardInterrupt
            for place, (answer, whole) in zip(places, answers, strict=False):
                if isinstance(answer, Exception) and not go_on:
                    raise answer
                if isinstance(answer, Exception):
                    errors.append(answer)
                    attempts[place] = attempt = _failed(todo[place], answer)
                else:
                    attempts[place] = attempt = answer
                if whole and cache is not None and not _is_cut_short(attempt):
                    _keep(todo[place], attempt, cache)
                if interrupt.has_come:
                    break
        except KeyboardInterrupt:
            if not any(attempts):
                raise
    if errors and len(errors) == len(todo):
        raise errors[0]
    return attempts


def _failed(task: Task, error: Exception) -> Attempt:
    """The row of a strategy that raised."""
    text = f"{type(error).__name__}: {error}"
    return Attempt(
        task.name, task.budget_nbytes, Status.NO_PLAN_FOUND, None, seconds=0.0, error=text
    )


def _is_cut_short(attempt: Attempt) -> bool:
    """Has the clock ended a search that found nothing and proved nothing?

    The same search may find a plan on a machine that is less busy.
    """
    return attempt.cut_by_clock and attempt.status is Status.NO_PLAN_FOUND


def _kept(task: Task, cache: Cache) -> Attempt | None:
    """The attempt that ``cache`` has; None if it has none that holds."""
    text = None if task.key is None else cache.find(task.key)
    if task.key is None or text is None:
        return None
    try:
        return task.read(text)
    except MemplanError as error:
        cache.distrust(task.key, str(error))
        return None


def _keep(task: Task, attempt: Attempt, cache: Cache) -> None:
    if task.key is not None:
        cache.keep(task.key, attempt_json.to_json(attempt))
    else:
        warnings.warn(
            f"the plan is not kept: strategy {task.name} is no dataclass, has options whose text "
            "does not tell their value, or code that cannot be read",
            stacklevel=2,
        )


# An attempt or what the strategy raised, and whether it is whole: not cut short by an interrupt.
Answers = Generator[tuple[Attempt | Exception, bool], None, None]


def _here(tasks: Sequence[Task]) -> Answers:
    for task in tasks:
        try:
            with noticing() as interrupt:
                attempt = task.run()
        except Exception as error:  # a strategy raises whatever it likes
            yield error, False
        else:
            yield attempt, not interrupt.has_come


# What it takes that processes of an executor stay.
_ADVICE = (
    ' Where they are spawned, a script needs the guard if __name__ == "__main__": around what it '
    "runs; else the machine may have had no memory for them: make an executor of fewer"
)


def _there(tasks: Sequence[Task], executor: Executor) -> Answers:
    futures: list[Future[str]] = []
    try:
        texts = {id(task.job): job_json.to_json(task.job) for task in tasks}
        for task in tasks:
            start = None if task.start is None else task.start.to_json()
            arguments = (texts[id(task.job)], task.name, task.solver, task.budget_nbytes, start)
            futures.append(_submitted(executor, *arguments, task.bound_seconds))
        for task, future in zip(tasks, futures, strict=True):
            try:
                data = json.loads(future.result())
                attempt = attempt_json.from_json(task.job, data["attempt"])
            except BrokenExecutor as error:
                told = PlanningError(f"a process of the executor has ended: {error}{_ADVICE}")
                told.__cause__ = error
                yield told, False
            except Exception as error:  # a strategy raises whatever it likes
                yield error, False
            else:
                yield attempt, data["whole"]
    finally:
        for future in futures:
            future.cancel()


def _submitted(executor: Executor, *arguments: Any) -> Future[str]:
    """What ``executor`` will answer; UsageError where it was shut down, or has broken before."""
    try:
        return executor.submit(_answer, *arguments)
    except BrokenExecutor as error:
        raise PlanningError(f"a process of the executor has ended: {error}{_ADVICE}") from error
    except RuntimeError as error:
        raise UsageError(f"executor takes no more tasks: {error}; make a new one") from error


def _answer(
    job_text: str,
    name: str,
    solver: Strategy,
    budget_nbytes: int | None,
    start: str | None,
    bound_seconds: float,
) -> str:
    """A worker's answer to a task, as JSON."""
    if os.getpid() != _HOME:
        # MXNet's engine and OpenMP do not outlive a fork: a fresh process does the work.
        spawn = multiprocessing.get_context("spawn")
        with _without_script(solver), ProcessPoolExecutor(1, mp_context=spawn) as fresh:
            arguments = (job_text, name, solver, budget_nbytes, start, bound_seconds)
            return fresh.submit(_answer, *arguments).result()
    with _raising_what_travels(), _ONE_AT_A_TIME, noticing() as interrupt:
        job = job_json.from_json(job_text)
        schedule = None if start is None else Schedule.from_json(job.graph, start)
        with as_traced(job.trace):
            attempt = try_strategy(
                job, solver, budget_nbytes, start=schedule, bound_seconds=bound_seconds
            )
    text = attempt_json.to_json(dataclasses.replace(attempt, strategy=name))
    return json.dumps({"attempt": text, "whole": not interrupt.has_come})


@contextlib.contextmanager
def _raising_what_travels() -> Iterator[None]:
    """What is raised within is a PlanningError that names it where pickle cannot bring it home.

    An exception that cannot be unpickled, as its constructor takes other arguments, would end the
    executor of the user, and all that others wait for there.
    """
    try:
        yield
    except Exception as error:  # a strategy raises whatever it likes
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever the class of the exception raises
            raise PlanningError(f"{type(error).__name__}: {error}") from error
        raise


@contextlib.contextmanager
def _without_script(solver: Strategy) -> Iterator[None]:
    """What is spawned within does not run the script again, unless that defines ``solver``.

    A script whose processes are forked needs no guard by ``__name__``, and may come from stdin.
    """
    script = sys.modules["__main__"]
    if b"__main__" not in pickle.dumps(solver):
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
