"""Plans kept on disk: found again, never trusted blindly, never half-written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memplan
from helpers.amounts import long_unless
from helpers.clock import TickingClock
from helpers.networks import Network, residual_net
from helpers.paths import ROOT
from memplan.errors import ArgumentError, BudgetError
from memplan.planning import alternative
from memplan.planning.cache import Cache, digest
from memplan.strategies import Outcome, Status, create
from memplan.strategies.base import Problem
from memplan.util import files

solved: list[int | None] = []


@dataclass(frozen=True)
class Counting:
    """Notes every call, so that a plan from the cache shows by its absence."""

    ntrial: int = 4

    def solve(self, problem: Problem) -> Outcome:
        solved.append(problem.budget_nbytes)
        return create("memonger", ntrial=self.ntrial).solve(problem)


@pytest.fixture(autouse=True)
def nothing_solved_yet(kept: Path) -> None:
    solved.clear()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plan of ``plan`` without options, which is made once for all tests."""
    folder = tmp_path_factory.mktemp("kept")
    plan(folder)
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    """The test's own copy of ``kept``."""
    return Path(shutil.copytree(kept, tmp_path / "plans"))


def network() -> Network:
    return residual_net(batch=16, size=32, units=2, filters=16)


def plan(folder: Path, **options: Any) -> memplan.Plan:
    net, shapes = network()
    given = {"strategy": Counting(), "budget": 0.7, "cache": folder, **options}
    return memplan.plan(net, **given, **shapes)


def entry(folder: Path) -> Path:
    [path] = folder.glob("*.json")
    return path


def test_a_plan_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What it is compared with is searched for again, which counts as planning.
    TickingClock(1.0).replaces_that_of(monkeypatch, alternative)
    first, second = plan(tmp_path), plan(tmp_path)
    assert len(solved) == 1
    for field in (
        "status",
        "schedule",
        "strategy",
        "footprint",
        "unplanned",
        "lower_bound_overhead",
        "cut_by_clock",
    ):
        assert getattr(first, field) == getattr(second, field), field
    assert second.symbol.tojson() == first.symbol.tojson()
    assert second.planning_seconds == first.planning_seconds
    plan(tmp_path, cache=None)
    assert len(solved) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0.71},
        {"budget": None},
        {"costs": "roofline:t4"},
        {"time_limit": 59},
        {"strategy": Counting(ntrial=3)},
        {"reserve": 1},
        {"grad_req": "write"},
        {"type_dict": {"data": "float64"}},
    ],
    ids=str,
)
def test_whatever_a_plan_depends_on_is_in_its_key(folder: Path, options: dict[str, Any]) -> None:
    plan(folder, **options)
    assert len(solved) == 1
    assert len(list(folder.iterdir())) == 2


def test_what_an_environment_variable_changes_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(tmp_path, budget=None)
    monkeypatch.setenv("NNVM_EXEC_MATCH_RANGE", "1")
    plan(tmp_path, budget=None)
    assert len(solved) == 2


def rule(ntrial: int) -> Any:
    """A strategy under the same name as another one, as if its code had been edited."""

    @dataclass(frozen=True)
    class Rule:
        def solve(self, problem: Problem) -> Outcome:
            return Counting(ntrial).solve(problem)

    return Rule()


def test_what_a_strategy_does_is_in_the_key(tmp_path: Path) -> None:
    for ntrial in (3, 4, 3, 4):
        plan(tmp_path, strategy=rule(ntrial))
    assert len(solved) == 2


def rewritten(path: Path, text: str) -> str:
    """The entry with another text, and a checksum that says it is right."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return json.dumps({**data, "text": text, "checksum": digest(text)})


def other_schedule(path: Path) -> str:
    """A right entry but for the schedule, which runs the ops in an order that is none."""
    attempt = json.loads(json.loads(path.read_text(encoding="utf-8"))["text"])
    schedule = json.loads(attempt["schedule"])
    schedule["ops"] = schedule["ops"][::-1]
    return rewritten(path, json.dumps({**attempt, "schedule": json.dumps(schedule)}))


def changed(field: str, value: Any) -> Callable[[Path], str]:
    """A right entry but for one field."""

    def change(path: Path) -> str:
        attempt = json.loads(json.loads(path.read_text(encoding="utf-8"))["text"])
        assert field in attempt
        return rewritten(path, json.dumps({**attempt, field: value}))

    return change


def schedule_of(path: Path) -> str:
    """The text of the schedule in a right entry."""
    schedule: str = json.loads(json.loads(path.read_text(encoding="utf-8"))["text"])["schedule"]
    return schedule


def too_large_a_schedule(path: Path) -> str:
    """The unplanned step, which does not fit."""
    net, shapes = network()
    unplanned = memplan.plan(net, strategy="store_all", **shapes).schedule
    attempt = json.loads(json.loads(path.read_text(encoding="utf-8"))["text"])
    return rewritten(path, json.dumps({**attempt, "schedule": unplanned.to_json()}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    long_unless(
        [
            (lambda path: "", "Expecting value"),
            (lambda path: path.read_text(encoding="utf-8")[:-20], "Unterminated|Expecting"),
            (
                lambda path: path.read_text(encoding="utf-8").replace("feasible", "optimal"),
                "checksum",
            ),
            (lambda path: '{"format": "memplan.planning.cache/0"}', "memplan.planning.cache/0"),
            (lambda path: "[3]", "indices"),
            (lambda path: rewritten(path, "{}"), "no|not a memplan attempt"),
            (lambda path: '{"a":' * 100_000, "nests too deep"),
            (lambda path: rewritten(path, '{"a":' * 100_000), "nests too deep"),
            (changed("seconds", 10**400), "its seconds are"),
            (changed("seconds", None), "its seconds are"),
            (changed("budget_nbytes", "1"), "its budget is"),
            (changed("strategy", 7), "its strategy is 7"),
            (changed("status", "infeasible"), "do not fit together"),
            (changed("schedule", None), "do not fit together"),
            (changed("schedule", 3), "not a memplan attempt"),
            (changed("lower_bound_overhead", "x"), "its lower bound is"),
            (changed("lower_bound_overhead", 5.0), "its lower bound is 5.0, its overhead 0"),
            (changed("in_order", 1), "its in_order 1"),
            (changed("cut_by_clock", 0), "its cut_by_clock is 0"),
            (other_schedule, "step 0"),
            (too_large_a_schedule, "does not fit the budget"),
        ],
        lambda case: not case[1].startswith("its "),
    ),
)
def test_a_damaged_entry_is_ignored_and_made_anew(folder: Path, damage: Any, reason: str) -> None:
    path = entry(folder)
    whole = schedule_of(path)
    path.write_text(damage(path), encoding="utf-8")
    with pytest.warns(UserWarning, match=f"made anew: .*({reason})"):
        second = plan(folder)
    assert len(solved) == 1
    assert second.schedule.to_json() == schedule_of(path) == whole
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(folder)
    assert len(solved) == 1


def test_a_pipe_is_no_entry_and_is_replaced_by_one(tmp_path: Path) -> None:
    """Whoever reads it waits, as does whoever writes to it."""
    cache = Cache.open(tmp_path)
    os.mkfifo(cache.path("key"))
    with pytest.warns(UserWarning, match="it is no regular file"):
        assert cache.find("key") is None
    cache.keep("key", "text")
    assert cache.find("key") == "text"


@dataclass(frozen=True)
class Interrupted:
    """Is interrupted, and answers with its best so far, as strategies do."""

    def solve(self, problem: Problem) -> Outcome:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            pass
        return Counting().solve(problem)


def test_what_an_interrupt_cut_short_is_not_kept(tmp_path: Path) -> None:
    made = plan(tmp_path, strategy=Interrupted())
    assert made.schedule.recomputed
    assert made.cut_by_clock
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@dataclass(frozen=True)
class Late:
    """Finds nothing in the time that it has, or proves that there is nothing."""

    status: Status

    def solve(self, problem: Problem) -> Outcome:
        return Outcome(self.status, None, cut_by_clock=True)


@pytest.mark.parametrize("status", [Status.NO_PLAN_FOUND, Status.INFEASIBLE])
def test_what_the_clock_cut_short_is_not_kept_without_a_plan(
    tmp_path: Path, status: Status
) -> None:
    """A proof is one, whatever the clock has cut beside it."""
    with pytest.raises(BudgetError):
        plan(tmp_path, strategy=Late(status), time_limit=0.1)  # for what would be enough, too
    assert len(list(tmp_path.iterdir())) == (status is Status.INFEASIBLE)


class NoDataclass:
    """Has options that nobody can read."""

    solve = Counting().solve


@dataclass(frozen=True)
class Opaque(Counting):
    """Has an option whose text is an address."""

    option: object = object()


@pytest.mark.parametrize("strategy", [NoDataclass(), Opaque()])
def test_a_strategy_whose_options_have_no_text_is_said(tmp_path: Path, strategy: Any) -> None:
    with pytest.warns(UserWarning, match="the plan is not kept: strategy"):
        plan(tmp_path, strategy=strategy)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder, why in ((file, "File exists"), (3, "give a name")):
        with pytest.raises(ArgumentError, match=f"cache must be a folder .*: {why}"):
            plan(folder)  # type: ignore[arg-type]
    assert not solved


def test_a_plan_that_cannot_be_written_is_still_a_plan(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.warns(UserWarning, match="could not be kept"):
        cache.keep("key", "text")


def test_memplan_need_not_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources may be found by PYTHONPATH alone."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert plan(tmp_path) == plan(tmp_path)
    assert entry(tmp_path).is_file()


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache.open("~/plans/memplan").folder == tmp_path / "plans" / "memplan"


WRITER = """
import sys
from memplan.planning.cache import Cache
kept = Cache.open(sys.argv[1])
print("ready", flush=True)
for round in range(int(sys.argv[2])):
    kept.keep("key", sys.argv[3] * 300_000)
"""


def writer(folder: Path, rounds: int, letter: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(rounds), letter]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.filterwarnings("error::UserWarning")
def test_writers_at_the_same_time_leave_whole_entries(tmp_path: Path) -> None:
    cache, whole = Cache.open(tmp_path), ["a" * 300_000, "b" * 300_000]
    writers = [writer(tmp_path, 15, letter) for letter in "ab"]
    while any(process.poll() is None for process in writers):
        text = cache.find("key")
        assert text is None or text in whole
    assert cache.find("key") in whole
    assert [process.returncode for process in writers] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_writer_that_is_killed_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.open(tmp_path)
    for letter in "abc":
        process = writer(tmp_path, 10**6, letter)
        time.sleep(0.05)
        process.kill()
        process.wait()
        assert cache.find("key") in (None, *(other * 300_000 for other in "abc"))
    monkeypatch.setattr(files, "STALE_SECONDS", -1.0)
    (tmp_path / f".left{files.DRAFT}").write_text("half")
    cache.keep("key", "text")
    assert cache.find("key") == "text"
    assert len(list(tmp_path.iterdir())) == 1


def test_an_array_names_no_folder() -> None:
    """Nor does NumPy warn of a comparison with text."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ArgumentError, match="cache must be a folder"):
            Cache.open(np.zeros(3))  # type: ignore[arg-type]
