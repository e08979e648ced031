"""Attempts in other processes are those made here."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import memplan
from helpers.amounts import long_except
from helpers.attempts import answer
from helpers.networks import Network, dropout_net, residual_net
from helpers.paths import ROOT
from helpers.planning import NEVER_SECONDS
from memplan.errors import ArgumentError, PlanningError, UsageError
from memplan.planning.comparison import Comparison
from memplan.strategies import Outcome, Status
from memplan.strategies.base import Problem

BUDGETS = (0.9, 0.6, None)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """Of one process: to start each takes three seconds."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as executor:
        yield executor


def network() -> Network:
    return residual_net(batch=16, size=32, units=4, filters=16)


def compared(realisation: str, executor: Executor | None, **options: Any) -> Comparison:
    net, shapes = network()
    given = {
        "strategies": ("store_all", "chen_greedy", "chen_sqrt:linear"),
        "budgets": BUDGETS,
        "realisation": realisation,
        "costs": "roofline:t4",
        "reserve": 1 << 20,
        "time_limit": NEVER_SECONDS,  # else a busy machine would cut a bound, there or here
        **options,
    }
    return memplan.compare(net, executor=executor, **given, **shapes)


@pytest.mark.parametrize("realisation", long_except(["mirror", "explicit"], ["mirror"]))
def test_processes_give_what_is_found_here(pool: Executor, realisation: str) -> None:
    here, there = compared(realisation, None), compared(realisation, pool)
    assert len(here.rows) == len(there.rows) == 9
    assert any(row.plan is None for row in here.rows)
    assert sum(row.plan is not None and row.plan.overhead > 0 for row in here.rows) >= 4
    assert [answer(row) for row in there.rows] == [answer(row) for row in here.rows]


def test_shared_shapes_dtypes_and_requests_travel(pool: Executor) -> None:
    net, shapes = dropout_net()
    options: dict[str, Any] = {
        "type_dict": {"data": "float16"},
        "grad_req": {"data": "add", "fc0_weight": "write"},
        "strategies": ("chen_greedy",),
        "budgets": None,
        "time_limit": NEVER_SECONDS,
    }
    here = memplan.compare(net, **options, **shapes)
    there = memplan.compare(net, executor=pool, **options, **shapes)
    assert [answer(row) for row in there.rows] == [answer(row) for row in here.rows]


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_match_range_travels(
    pool: Executor, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """A worker on another machine has another environment."""
    monkeypatch.setenv("NNVM_EXEC_MATCH_RANGE", value)
    options: dict[str, Any] = {"strategies": "chen_greedy", "budgets": None}
    [here] = compared("mirror", None, **options).rows
    [there] = compared("mirror", pool, **options).rows
    assert answer(here) == answer(there)


@pytest.mark.parametrize(
    "kind", [ThreadPoolExecutor, pytest.param(ProcessPoolExecutor, marks=pytest.mark.long)]
)
def test_threads_and_forks_will_do(kind: Any) -> None:
    options: dict[str, Any] = {"strategies": "chen_greedy", "budgets": None}
    [here] = compared("mirror", None, **options).rows
    with kind(2) as executor:
        [there] = compared("mirror", executor, **options).rows
    assert answer(here) == answer(there)


FORKS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import memplan
from helpers.networks import residual_net

print("runs")
net, shapes = residual_net(units=2)
with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
    table = memplan.compare(net, strategies="chen_sqrt", budgets=None, executor=executor, **shapes)
print(len(table.rows))
"""


@pytest.mark.long
def test_a_script_that_forks_runs_once_and_may_come_from_stdin(tmp_path: Path) -> None:
    """It has no guard by ``__name__``, which forks do not need."""
    path = tmp_path / "script.py"
    path.write_text(FORKS, encoding="utf-8")
    for name in (str(path), "-"):
        process = subprocess.run(
            [sys.executable, name],
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            input=FORKS,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert process.stdout == "runs\n1\n", process.stderr


@pytest.mark.long
def test_a_cluster_of_dask_will_do() -> None:
    distributed = pytest.importorskip("distributed", reason="needs memplan[dask]")
    options: dict[str, Any] = {"strategies": ("chen_greedy", "store_all"), "budgets": (0.6, None)}
    here = compared("mirror", None, **options)
    with (
        distributed.LocalCluster(1, threads_per_worker=2, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        there = compared("mirror", client.get_executor(), **options)
    assert [answer(row) for row in there.rows] == [answer(row) for row in here.rows]


@dataclass(frozen=True)
class Liar:
    """Finds a plan only where it is not checked."""

    home: int

    def solve(self, problem: Problem) -> Outcome:
        if os.getpid() != self.home:
            raise ArithmeticError("so it is told at home")
        return Outcome(Status.NO_PLAN_FOUND)


def test_what_a_strategy_raises_there_is_raised_here(pool: Executor) -> None:
    with pytest.raises(ArithmeticError, match="told at home"):
        compared("mirror", pool, strategies=[Liar(os.getpid())], budgets=0.6)


class NotToBeUnpickledError(Exception):
    """Its constructor takes other arguments than it hands on, which pickle calls it with."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


@dataclass(frozen=True)
class Failing:
    """Raises what no process can send to another."""

    def solve(self, problem: Problem) -> Outcome:
        raise NotToBeUnpickledError(7, "the solver failed")


@pytest.mark.parametrize(
    "kind", [None, pytest.param(ProcessPoolExecutor, marks=pytest.mark.long)], ids=["spawn", "fork"]
)
def test_what_cannot_be_sent_breaks_no_pool_and_no_other_row(pool: Executor, kind: Any) -> None:
    options: dict[str, Any] = {"strategies": [Failing(), "store_all"], "budgets": None}
    with contextlib.nullcontext(pool) if kind is None else kind(1) as executor:
        failed, other = compared("mirror", executor, **options).rows
        assert failed.error == "PlanningError: NotToBeUnpickledError: the solver failed (7)"
        assert other.plan is not None
        with pytest.raises(PlanningError, match=r"the solver failed \(7\)"):
            compared("mirror", executor, strategies=Failing(), budgets=None)


class Refusing(Executor):
    """Must not be asked."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        raise AssertionError("submitted")


class Broken(Executor):
    """One of its processes ends, as that of a script without a guard by ``__name__``."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool("A process was terminated abruptly."))
        return future


def test_a_process_that_ends_is_told_with_what_may_have_ended_it() -> None:
    told = r"executor has ended: A process was .* guard if __name__ == .__main__.*no memory"
    with pytest.raises(PlanningError, match=told):
        compared("mirror", Broken())


def test_what_is_in_the_cache_does_not_travel(pool: Executor, tmp_path: Path) -> None:
    first = compared("mirror", pool, cache=tmp_path)
    second = compared("mirror", Refusing(), cache=tmp_path)
    assert [answer(row) for row in second.rows] == [answer(row) for row in first.rows]


@pytest.mark.long
def test_what_is_no_executor_is_said() -> None:
    with pytest.raises(ArgumentError, match=r"executor must be a concurrent\.futures\.Executor"):
        compared("mirror", 4)  # type: ignore[arg-type]


def test_an_executor_that_was_shut_down_is_said() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(UsageError, match=r"executor takes no more tasks: .*after shutdown; make a"):
        compared("mirror", executor)


class Breaking(Executor):
    """Breaks between two tasks, as where a worker ends at once."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise BrokenProcessPool("a child process terminated abruptly")


def test_an_executor_that_breaks_before_all_is_submitted_is_said() -> None:
    with pytest.raises(PlanningError, match=r"a process of the executor has ended.*__main__"):
        compared("mirror", Breaking())
