"""The process that plans waits for the next plan, and never stands in anybody's way."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memplan
from helpers.ended import has_ended
from helpers.networks import residual_net
from helpers.odd_strategies import Odd
from helpers.script import printed_by, script
from memplan.planning import apart, process
from memplan.planning.process import PlanningProcess
from memplan.strategies import Strategy


@pytest.fixture(autouse=True)
def _in_a_child(_plans_are_made_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "IN_A_CHILD", True)


@pytest.fixture(autouse=True, scope="module")
def _ends() -> Iterator[None]:
    """What waits serves all tests: to start takes longest."""
    yield
    if (waiting := PlanningProcess.waiting()) is not None:
        waiting.end()


def planned(strategy: str | Strategy = "chen_greedy", size: int = 8) -> memplan.Plan:
    net, shapes = residual_net(batch=size, size=16, units=4, filters=8)
    return memplan.plan(
        net,
        strategy=strategy,
        realisation="explicit",
        costs="roofline:v100",
        **shapes,
    )


def number() -> int | None:
    """That of the process that waits."""
    return process._WAITING[0].popen.pid if process._WAITING else None


def until(is_so: Callable[[], bool]) -> None:
    """Wait, for at most as long as a test may take."""
    while not is_so():
        threading.Event().wait(0.01)


def is_gone(pid: int) -> bool:
    """Does not even a zombie stay?"""
    return not Path(f"/proc/{pid}").exists()


def test_the_next_plan_is_made_by_the_same_process_as_by_a_new_one() -> None:
    planned(size=4)
    first = number()
    other = planned()
    assert number() == first is not None
    os.kill(first, signal.SIGINT)  # nobody's interrupt
    assert planned(size=4).schedule.recomputed
    assert number() == first
    os.kill(first, signal.SIGKILL)  # as the kernel does where memory is short
    new = planned()
    assert is_gone(first)
    assert number() not in (None, first)
    assert (new.schedule.ops, new.footprint) == (other.schedule.ops, other.footprint)


@pytest.mark.long
def test_a_thread_keeps_none_and_takes_none() -> None:
    """The process would get a signal when the thread that started it ends."""
    planned()
    before = number()
    thread = threading.Thread(target=planned)
    thread.start()
    thread.join()
    assert number() == before


def test_a_fork_takes_none() -> None:
    planned()
    pid = os.fork()
    if pid == 0:
        process._end_what_waits()
        os._exit(0 if PlanningProcess.waiting() is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert process._WAITING[0].popen.poll() is None


def test_numbers_that_a_script_has_closed_and_uses_itself_stay_its_own(tmp_path: Path) -> None:
    planned()
    first = number()
    [waiting] = process._WAITING
    numbers = [waiting.requests.fileno(), waiting.answers.fileno()]
    with (tmp_path / "its").open("w+b") as file:
        for name in numbers:  # as a daemon closes all of them, and opens files of its own
            os.dup2(file.fileno(), name)
        assert planned(size=4).schedule.recomputed
        assert number() not in (None, first)
        assert is_gone(first or 0)
        for name in numbers:
            assert os.fstat(name).st_size == 0
            os.close(name)


@pytest.mark.long
def test_the_users_strategies_are_not_kept() -> None:
    """Their module may be another one by the next plan."""
    planned(Odd("nothing"))
    assert number() is None


@pytest.mark.long
def test_it_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    planned()
    before = number()
    monkeypatch.setattr(process, "IDLE_SECONDS", 0.0)
    planned()
    assert before is not None
    until(lambda: is_gone(before))
    until(lambda: number() is None)


def test_popen_is_not_asked_for_more_processes_than_may_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would fork, and MXNet end this process."""

    def check() -> None:
        raise OSError("as many processes run as may")

    def popen(*_: Any, **__: Any) -> None:
        raise AssertionError

    process._end_what_waits()
    monkeypatch.setattr(process, "check_can_start", check)
    monkeypatch.setattr(subprocess, "Popen", popen)
    assert planned().schedule.recomputed


AS_MANY_FILES_AS_MAY_BE = """
import os, resource
from memplan.planning.process import PlanningProcess
def is_open():
    return {end for end in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{end}")}
before = is_open()
assert before == {"0", "1", "2"}
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for more in range(7):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + more, hard))
    try:
        PlanningProcess()
    except OSError as error:
        reason = error.strerror
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(len(is_open() - before), reason)
"""


def test_where_as_many_files_are_open_as_may_be_none_stays_open() -> None:
    printed = printed_by("-c", AS_MANY_FILES_AS_MAY_BE)
    assert printed.splitlines() == ["0 Too many open files"] * 7


def test_where_no_thread_can_be_started_it_ends_and_the_plan_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned()
    before = number()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", start)
    assert planned().schedule.recomputed
    assert before is not None
    assert is_gone(before)
    assert number() is None


@pytest.mark.long
def test_it_ends_with_the_process_that_trains() -> None:
    code = """
import memplan
from helpers.ended import has_ended
from helpers.networks import residual_net
from memplan.planning import process
net, shapes = residual_net(batch=8, size=16, units=4, filters=8)
memplan.plan(net, strategy="chen_greedy", **shapes)
print(process._WAITING[0].popen.pid, flush=True)
"""
    found = int(script(code).communicate(timeout=600)[0])
    until(lambda: has_ended(found))


@pytest.mark.long
def test_stdin_may_be_closed() -> None:
    """As in a daemon: a pipe would be the stdin of the process that plans."""
    code = """
import os
os.close(0)
import memplan
from helpers.ended import has_ended
from helpers.networks import residual_net
net, shapes = residual_net(batch=8, size=16, units=4, filters=8)
print(memplan.plan(net, strategy="chen_greedy", **shapes).status.name, flush=True)
"""
    assert script(code).communicate(timeout=600)[0].split() == ["FEASIBLE"]
