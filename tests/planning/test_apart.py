"""Plans made in a child process: those made here, and nothing of it but the plan stays."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import memplan
from helpers.amounts import long_except
from helpers.ended import has_ended
from helpers.networks import Network, residual_net
from helpers.odd_strategies import Changing, Odd
from helpers.planning import quick
from helpers.script import script
from memplan.errors import BudgetError, PlanningError
from memplan.planning import apart, process
from memplan.planning.attempt import try_strategy
from memplan.planning.job import Job
from memplan.planning.shapes import ShapePlanner
from memplan.strategies import Outcome, Problem, Status


@pytest.fixture(autouse=True)
def _in_a_child(_plans_are_made_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the test's own: that of another test may still wait."""
    process._end_what_waits()
    monkeypatch.setattr(apart, "IN_A_CHILD", True)


def network() -> Network:
    return residual_net(batch=8, size=16, units=4, filters=8)


def planned(strategy: Any, **options: Any) -> memplan.Plan:
    net, shapes = network()
    return memplan.plan(net, strategy=strategy, costs="roofline:v100", **options, **shapes)


def told(plan: memplan.Plan) -> dict[str, Any]:
    """All that a plan says but for the time that it took."""
    return {
        "schedule": plan.schedule.to_json(),
        "symbol": plan.symbol.tojson(),
        "figures": (plan.footprint, plan.unplanned, plan.lower_bound_overhead, plan.bound_in_order),
        "labels": (plan.status, plan.strategy, plan.costs, plan.realisation, plan.budget_nbytes),
        "packing": plan.packing,
        "cut": plan.cut_by_clock,
    }


@pytest.mark.parametrize("realisation", long_except(["mirror", "explicit", "packed"], ["packed"]))
def test_the_child_makes_the_plan_that_is_made_here(
    realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"strategy": "auto:effort=0.02", "realisation": realisation, "budget": 0.8}
    there = quick(network(), **options)
    monkeypatch.setattr(apart, "IN_A_CHILD", False)
    assert told(there) == told(quick(network(), **options))
    assert (there.packing is not None) == (realisation == "packed")


@pytest.mark.long
def test_a_refusal_is_that_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> BudgetError:
        with pytest.raises(BudgetError) as caught:
            quick(network(), budget=0.3, realisation="explicit")
        return caught.value

    there = refused()
    monkeypatch.setattr(apart, "IN_A_CHILD", False)
    here = refused()
    assert (str(there), there.__dict__) == (str(here), here.__dict__)
    assert there.lowest_nbytes is not None


@pytest.mark.long
def test_plans_for_further_shapes_are_those_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    first = quick(network(), strategy="search:effort=0.02", realisation="packed", budget=0.8)
    net, shapes = network()
    more = {name: (12, *shape[1:]) for name, shape in shapes.items()}
    for unseen in ("plan", "nearest"):
        found = []
        for in_a_child in (True, False):
            monkeypatch.setattr(apart, "IN_A_CHILD", in_a_child)
            planner = ShapePlanner(
                budget=0.8,
                strategy="search:effort=0.02",
                realisation="packed",
                time_limit=3600,
                costs="roofline:v100",
                unseen=unseen,
            )
            planner.adopt(first)
            with warnings.catch_warnings(record=True) as said:
                found.append(told(planner.plan(net, shapes=more)))
            assert len(said) == (unseen == "nearest")
        assert found[0] == found[1]


@pytest.mark.long
def test_a_kept_plan_is_read(tmp_path: Path) -> None:
    first = planned("chen_greedy", cache=tmp_path)
    again = planned("chen_greedy", cache=tmp_path)
    assert told(first) == told(again)
    assert first.planning_seconds == again.planning_seconds


def test_the_search_runs_elsewhere_without_mxnet(tmp_path: Path) -> None:
    plan = planned(Odd("without_mxnet", str(tmp_path / "process")))
    assert plan.strategy == "Odd"
    number = int((tmp_path / "process").read_text())
    assert number != os.getpid()
    assert not Path(f"/proc/{number}").exists()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("crash", r"ended by SIGSEGV. Nothing in this process was lost.* by which Module trains\)"),
        pytest.param("be_killed", "SIGKILL, probably as the machine has", marks=pytest.mark.long),
        pytest.param("leave", "ended with status 3", marks=pytest.mark.long),
        ("raise_what_cannot_be_sent", "NotToBeSentError: nothing to send"),
    ],
)
def test_a_child_that_fails_is_an_error(what: str, words: str) -> None:
    with pytest.raises(PlanningError, match=words):
        planned(Odd(what))
    assert planned(Odd("nothing")).schedule.recomputed == ()


def test_what_a_strategy_raises_is_raised() -> None:
    with pytest.raises(LookupError) as caught:
        planned(Odd("raise_another"))
    assert caught.value.args == ("not found", 7)


def test_what_is_told_in_the_child_is_told_here(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "memplan"), pytest.warns(UserWarning, match="a warning"):
        planned(Odd("speak"))
    by_text = {record.getMessage(): record for record in caplog.records}
    assert by_text["so far"].incumbent_seconds == 2.5  # type: ignore[attr-defined]
    assert by_text["a line of log"].levelno == logging.WARNING
    assert capsys.readouterr().out == "printed\n"


def test_progress_is_not_told_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memplan"), pytest.warns(UserWarning, match="a warning"):
        planned(Odd("speak"))
    assert [record.getMessage() for record in caplog.records] == ["a line of log"]


@dataclass(frozen=True)
class HoldsAFunction:
    """A strategy that cannot be sent."""

    look: Any

    def solve(self, problem: Problem) -> Outcome:
        self.look(os.getpid())
        return Outcome(Status.NO_PLAN_FOUND)


def test_a_strategy_that_cannot_be_sent_runs_here() -> None:
    processes: list[int] = []
    with pytest.raises(BudgetError):
        planned(HoldsAFunction(lambda number: processes.append(number)), time_limit=0.1)
    assert processes == [os.getpid()]


def test_a_strategy_with_a_state_runs_here() -> None:
    strategy = Changing()
    planned(strategy)
    assert strategy.asked == 1


def test_where_no_process_can_be_started_planning_goes_on_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for executable in (str(tmp_path / "none"), "", None):
        monkeypatch.setattr(sys, "executable", executable)
        planned(Odd("nothing", str(tmp_path / "process")))
        assert (tmp_path / "process").read_text() == str(os.getpid())
        assert "can start no other" in caplog.text
        caplog.clear()


def test_where_python_takes_another_program_for_its_own_planning_goes_on_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As one that embeds Python, which does something else with the arguments, and ends."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    net, shapes = network()
    strategy = Odd("nothing", str(tmp_path / "process"))
    with apart.apart(Job.prepare(net, costs="roofline:v100", **shapes)) as do:
        attempts = [do(try_strategy, strategy, None) for _ in range(2)]
    assert all(attempt.plan is not None for attempt in attempts)
    assert (tmp_path / "process").read_text() == str(os.getpid())
    [record] = [r for r in caplog.records if "in this process" in r.getMessage()]
    assert "ended with status 1; sys.executable, which is" in record.getMessage()
    assert process.PlanningProcess.waiting() is None


def test_a_child_that_is_killed_as_it_begins_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the machine has no memory for it, this process would be the next to be killed."""
    program = tmp_path / "killed"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(PlanningError, match="ended by SIGKILL, probably as"):
        planned(Odd("nothing"))


@pytest.mark.parametrize("what", ["be_interrupted", "be_interrupted_twice"])
def test_an_interrupt_ends_the_child(what: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        planned(Odd(what, str(tmp_path / "process")))
    assert not Path("/proc", (tmp_path / "process").read_text()).exists()


def test_an_interrupt_ends_the_search_with_what_it_has(tmp_path: Path) -> None:
    plan = planned(Odd("answer_when_interrupted"), cache=tmp_path)
    assert plan.schedule.recomputed == ()
    assert plan.cut_by_clock
    assert "Ctrl-C" in str(plan)
    assert not list(tmp_path.iterdir())  # what an interrupt cut short is not kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


TRAINS = """
import os, sys
from dataclasses import dataclass
import mxnet as mx
import memplan
from helpers.networks import residual_net
from memplan.strategies import create

net, shapes = residual_net(batch=32, size=32, units=4, filters=16)
data = mx.io.NDArrayIter(mx.nd.ones(shapes["data"]), mx.nd.zeros(32), batch_size=32)
for realisation in ("explicit", "packed", "updating"):
    module = memplan.mxnet.Module(net, budget=0.8, strategy="chen_greedy", realisation=realisation)
    module.fit(data, num_epoch=1, initializer=mx.init.Xavier())
memplan.plan(net, budget=0.8, strategy="chen_greedy", **shapes)
print("numba" in sys.modules, "highspy" in sys.modules, "mip" in sys.modules)

@dataclass(frozen=True)
class Mine:
    def solve(self, problem):
        print(os.getpid() == number)
        return create("store_all").solve(problem)

number = os.getpid()
memplan.plan(net, strategy=Mine(), **shapes)
memplan.strategies.register("mine", Mine)
memplan.plan(net, strategy="mine", **shapes)
"""


@pytest.mark.long
def test_a_script_that_plans_and_trains_loads_no_search() -> None:
    process = script("import memplan.mxnet.module\n" + TRAINS)
    assert process.communicate(timeout=600)[0] == "False False False\nTrue\nTrue\n"
    assert process.returncode == 0


@pytest.mark.long
def test_the_child_ends_with_the_process_that_trains(tmp_path: Path) -> None:
    path = tmp_path / "process"
    process = script(
        f"""
import memplan
from helpers.networks import residual_net
from helpers.odd_strategies import Odd
net, shapes = residual_net(batch=32, size=32, units=4, filters=16)
memplan.plan(net, strategy=Odd("sleep", {str(path)!r}), **shapes)
"""
    )
    with process:
        while not path.exists() or not path.read_text():
            assert process.poll() is None
            time.sleep(0.1)
        number = int(path.read_text())
        process.kill()
    while not has_ended(number):  # for at most as long as a test may take
        time.sleep(0.1)
