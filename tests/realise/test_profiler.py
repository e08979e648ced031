"""MXNet's profiler around packed steps: its file and how long it runs are the caller's affair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

from helpers.around import profiler
from helpers.cases import CASES
from helpers.script import script
from helpers.training_runs import bound, random_values
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise import engine
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.step.schedule import Schedule


def packed() -> TrainExecutor:
    traced = CASES["residual"].trace("packed")
    return bound(traced, Schedule.unplanned(traced.graph), random_values(traced))


def step(executor: TrainExecutor) -> None:
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


@pytest.fixture
def made_alone(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that are waited for one by one."""
    alone, made = PackedMemory.alone, []

    def noted(memory: PackedMemory, call: Any) -> None:
        made.append(call)
        alone(memory, call)

    monkeypatch.setattr(PackedMemory, "alone", noted)
    return made


@pytest.mark.parametrize("is_hidden", [False, True])
def test_calls_are_bundled_again_when_the_profiler_has_stopped(
    is_hidden: bool, made_alone: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library tells, also while the times that it has added up are still there."""
    if is_hidden:
        monkeypatch.setattr(engine, "_BULK_SIZE", None)
    executor = packed()
    step(executor)
    assert not made_alone
    with profiler(tmp_path):
        step(executor)
        made = len(made_alone)
        assert made > 10
        mx.profiler.set_state("stop")
        if not is_hidden:
            step(executor)
            assert len(made_alone) == made
            mx.profiler.set_state("run")
            step(executor)
            assert len(made_alone) == 2 * made
    step(executor)
    assert len(made_alone) == (made if is_hidden else 2 * made)


# MXNet cannot go back to continuous_dump=True in the process.
SCRIPT = """
from pathlib import Path

import mxnet as mx

from helpers.cases import CASES
from helpers.script import script
from helpers.training_runs import bound, random_values
from memplan.mxnet.realise.packed_step import _bundles as bundles
from memplan.step.schedule import Schedule

traced = CASES["residual"].trace("packed")
executor = bound(traced, Schedule.unplanned(traced.graph), random_values(traced))
path = Path(PLACE)
mx.profiler.set_config(profile_all=True, continuous_dump=False, filename=str(path))
mx.profiler.set_state("run")
for _ in range(3):
    executor.forward(is_train=True)
    mx.nd.waitall()
    assert not path.exists()
mx.profiler.set_state("stop")
mx.profiler.dump()
print(len(bundles(executor._training._calls, are_changing=False)))
"""


@pytest.mark.long
def test_the_file_of_a_profiler_is_written_when_the_caller_says_so(tmp_path: Path) -> None:
    """It holds all the steps, in bundles, as MXNet's own imperative calls are."""
    path = tmp_path / "profile.json"
    process = script(SCRIPT.replace("PLACE", repr(str(path)), 1))
    nbundles, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    events = json.loads(path.read_text())["traceEvents"]
    begun = [event["name"] for event in events if event.get("ph") == "B"]
    assert begun.count("ImperativeBulk") >= 3 * int(nbundles)
