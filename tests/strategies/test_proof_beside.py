"""A proof in a thread or a process says what it says without, and ends with what it is beside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from helpers.graphs import UNIT, unit_chain
from helpers.planning import NEVER_SECONDS
from memplan.programs.proof import Fact, ProofOptions
from memplan.strategies import proof_beside
from memplan.strategies.base import Problem
from memplan.strategies.proof_apart import ProofApart
from memplan.strategies.proof_beside import ProofBeside
from memplan.strategies.spaces.sequences import Sequences
from memplan.strategies.spaces.space import Proving
from memplan.util.stop import Stop

OPTIONS = ProofOptions(enough_seconds=1e9, effort=0.05)


@pytest.fixture(params=[1, 2])
def ncores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(request.param)))
    return int(request.param)


def proof(stop: Stop | None = None) -> ProofBeside:
    problem = Problem(unit_chain(12), 5 * UNIT)
    return ProofBeside(problem, stop or Stop.after(NEVER_SECONDS), OPTIONS)


def proving(monkeypatch: pytest.MonkeyPatch, prove: Callable[[Stop, list[Fact]], None]) -> None:
    def called(_: Sequences, proving: Proving) -> None:
        prove(proving.stop, proving.facts)

    monkeypatch.setattr(Sequences, "prove", called)


@pytest.mark.parametrize("most_beside", [0, 500])
def test_it_proves_the_same_on_another_core(
    most_beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_beside, "MOST_BESIDE", most_beside)
    bounds = []
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        with proof() as beside:
            beside.begin()
            bounds.append(beside.facts()[-1].bound_seconds)
    alone, beside_search = bounds
    assert alone == beside_search > unit_chain(12).seconds


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that prove something, once they are started."""
    started: list[subprocess.Popen[bytes]] = []

    class Started(ProofApart):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self._popen)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(proof_beside, "MOST_BESIDE", 0)
    monkeypatch.setattr(proof_beside, "ProofApart", Started)
    return started


def test_a_process_ends_with_the_block(processes: list[subprocess.Popen[bytes]]) -> None:
    with proof() as beside:
        beside.begin()
        [process] = processes
        assert process.poll() is None
    assert process.poll() == -signal.SIGKILL


def test_what_a_process_did_not_prove_is_proved_here(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    with proof() as beside:
        beside.begin()
        processes[0].kill()
        assert beside.facts()[-1].bound_seconds > unit_chain(12).seconds


def test_no_process_is_needed(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*_: Any, **__: Any) -> None:
        raise OSError("as many processes run as may")

    monkeypatch.setattr(subprocess, "Popen", popen)
    with proof() as beside:
        beside.begin()
        assert beside.facts()[-1].bound_seconds > unit_chain(12).seconds
    assert not processes


def test_the_clock_may_cut_a_process(processes: list[subprocess.Popen[bytes]]) -> None:
    stop = Stop.after(0.0)
    with proof(stop) as beside:
        beside.begin()
        beside.facts()
    assert processes
    assert stop.cut_by_clock


def test_a_thread_proves_it_where_there_is_another_core(
    monkeypatch: pytest.MonkeyPatch, ncores: int
) -> None:
    threads = []
    proving(monkeypatch, lambda *_: threads.append(threading.current_thread()))
    with proof() as beside:
        beside.begin()
        beside.facts()
    assert (threads == [threading.current_thread()]) is (ncores == 1)


def test_no_thread_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(threading.Thread, "start", start)
    turn_seconds = sys.getswitchinterval()
    with proof() as beside:
        beside.begin()
        assert sys.getswitchinterval() == turn_seconds
        assert beside.facts()[-1].bound_seconds > unit_chain(12).seconds
    assert not proof_beside._RUNNING


def test_what_nobody_asks_for_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def prove(stop: Stop, facts: list[Fact]) -> None:
        begun.set()
        while not stop.is_over():
            pass
        ended.set()

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    proving(monkeypatch, prove)
    stop, turn_seconds = Stop.after(NEVER_SECONDS), sys.getswitchinterval()
    with proof(stop) as beside:
        beside.begin()
        begun.wait()
    assert ended.is_set()
    assert sys.getswitchinterval() == turn_seconds
    assert not stop.cut_by_clock


def test_two_at_once_leave_the_turns_of_threads_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    proving(monkeypatch, lambda *_: None)
    turn_seconds = sys.getswitchinterval()
    first, second = proof(), proof()
    first.begin()
    second.begin()
    for beside in (first, second):
        beside.__exit__(None, None, None)
    assert sys.getswitchinterval() == turn_seconds


def test_its_errors_are_raised(monkeypatch: pytest.MonkeyPatch, ncores: int) -> None:
    def prove(stop: Stop, facts: list[Fact]) -> None:
        raise ZeroDivisionError

    proving(monkeypatch, prove)
    with proof() as beside:
        beside.begin()
        with pytest.raises(ZeroDivisionError):
            beside.facts()


def test_the_clock_may_cut_it(monkeypatch: pytest.MonkeyPatch, ncores: int) -> None:
    proving(monkeypatch, lambda stop, facts: stop.cut())
    stop = Stop.after(NEVER_SECONDS)
    with proof(stop) as beside:
        beside.begin()
        beside.facts()
    assert stop.cut_by_clock


def test_no_program_is_built_where_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of HRNet, 2,283 ops, took a third of a second beyond a limit of three."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    proving(monkeypatch, lambda *_: pytest.fail("it is proved"))
    stop = Stop.after(0.0)
    with proof(stop) as beside:
        beside.begin()
        assert not beside.facts()
    assert stop.cut_by_clock


def test_an_interrupt_of_the_search_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has proved by then counts: a script that was interrupted is not to wait."""

    def prove(until: Stop, facts: list[Fact]) -> None:
        facts.append(Fact(None, 1.0))
        while not until.is_over():
            time.sleep(0.001)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    proving(monkeypatch, prove)
    stop = Stop.after(NEVER_SECONDS)
    with proof(stop) as beside:
        beside.begin()
        stop.end()
        assert beside.facts() == [Fact(None, 1.0)]


def test_an_interrupt_of_the_search_ends_the_process(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop.after(NEVER_SECONDS)
    with proof(stop) as beside:
        beside.begin()
        monkeypatch.setattr(ProofApart, "proved", lambda _: pytest.fail("it is waited for"))
        stop.end()
        assert not beside.facts()
