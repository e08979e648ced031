"""memplan check: what it measures, in processes of their own, and how it tells a broken promise."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.command_line import NET, QUICK
from helpers.networks import residual_net
from helpers.paths import ROOT
from helpers.planning import NEVER_SECONDS
from memplan.cli import main as cli
from memplan.errors import ArgumentError, CostError
from memplan.mxnet import check as checks
from memplan.mxnet.check import check, largest_difference
from memplan.mxnet.profile import profile
from memplan.mxnet.train import trial
from memplan.mxnet.train.trial import Trial, run_apart
from memplan.planning.planner import plan
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.util.processes import calling_main

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "time_limit": NEVER_SECONDS}


@pytest.mark.long
@pytest.mark.usefixtures("code_counts")
@pytest.mark.parametrize("realisation", ["mirror", "packed"])
def test_a_plan_keeps_its_promise(realisation: str, result: Any) -> None:
    arguments = ("--realisation", realisation, "--steps", "1", "--optimizer", "adam")
    said = result("check", *NET, *QUICK, *arguments)
    assert said["within"]
    assert said["equal"]
    assert not any(said["unlike"].values())
    assert said["plan"]["realisation"] == realisation
    for name in ("planned", "unplanned"):
        assert said[name]["promised_nbytes"] > 0 < said[name]["seconds"]
        # A network of 100 KB: what grows is MXNet's code, as far as it is used for the first time.
        assert 1 << 20 < said[name]["grown_nbytes"] < 64 << 20


@pytest.mark.long
def test_a_trial_whose_parent_is_gone_does_nothing() -> None:
    """And one that runs is killed with it (tests/util/test_processes.py)."""
    command = calling_main(Trial.__module__)
    command[command.index(str(os.getpid()))] = "0"
    process = subprocess.run(
        command,
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (0, ""), process.stderr


@pytest.mark.long
def test_a_trial_imports_nothing_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random.py of the user's is none of Python's, and a Path in sys.path is not searched."""
    (tmp_path / "random.py").write_text("raise SystemExit('of the user')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [tmp_path, *filter(None, sys.path)])
    net, shapes = residual_net(units=1)
    traced = trace(net, shapes=shapes)
    assert run_apart(Schedule.unplanned(traced.graph), traced, ctx=mx.cpu()).seconds > 0


def numpy_net() -> mx.sym.Symbol:
    data = mx.sym.Variable("data").as_np_ndarray()
    weight = mx.sym.Variable("weight", shape=(6,)).as_np_ndarray()
    loss = mx.sym.np.mean(mx.sym.np.tanh(data * weight), axis=(0, 1), keepdims=True)
    return mx.sym.MakeLoss(loss.as_nd_ndarray())


@pytest.mark.long
def test_a_trial_has_the_numpy_semantics_of_the_plan() -> None:
    """The new process has set none itself."""
    options: dict[str, Any] = {"ctx": mx.cpu(), "realisation": "packed", "data": (4, 6)}
    with mx.util.np_shape(True):
        table = profile(numpy_net(), repeats=1, warmup=0, **options)
    assert "packed" in table.workspace_nbytes


@pytest.mark.long
def test_a_plan_with_numpy_semantics_is_checked_with_them() -> None:
    options: dict[str, Any] = {"ctx": mx.cpu(), "realisation": "packed", "data": (4, 6)}
    with mx.util.np_shape(True):
        made = plan(numpy_net(), budget="1GiB", strategy="store_all", **options)
    assert made.trace.numpy_shapes
    assert check(made, ctx=mx.cpu(), steps=1).is_equal


def test_a_trial_that_was_killed_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MXNet has printed before is no reason."""
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=-9, stderr="a line\n")
    )
    net, shapes = residual_net(units=1)
    traced = trace(net, shapes=shapes)
    with pytest.raises(CostError, match=r"failed: it was ended by SIGKILL, probably as the mach"):
        run_apart(Schedule.unplanned(traced.graph), traced, ctx=mx.cpu())


def test_a_trial_that_cannot_be_started_is_an_error_of_memplan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check() -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(trial, "check_can_start", check)
    net, shapes = residual_net(units=1)
    traced = trace(net, shapes=shapes)
    with pytest.raises(CostError, match=r"no process can be started .*: Resource temporarily"):
        run_apart(Schedule.unplanned(traced.graph), traced, ctx=mx.cpu())
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", None)  # as where Python is embedded
    with pytest.raises(CostError, match=r"sys\.executable is None; set sys\.executable to"):
        run_apart(Schedule.unplanned(traced.graph), traced, ctx=mx.cpu())


def test_a_broken_promise_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(schedule: Schedule, *_: Any, results: Path, **__: Any) -> Trial:
        recomputes = bool(schedule.recomputed)
        mean = np.array([4.0, 3.0 if recomputes else 2.0])
        np.savez(results, **{"output 0": np.zeros(2), "state moving_mean": mean})
        return Trial(grown_nbytes=1 << 30 if recomputes else 0, seconds=2.0 if recomputes else 1.0)

    monkeypatch.setattr(checks, "run_apart", run)
    assert cli.run(["check", *NET, *QUICK, "--json"]) == 8
    said = json.loads(capsys.readouterr().out)
    assert not said["within"]
    assert not said["equal"]
    assert said["unlike"]["states"] == ["state moving_mean"]
    assert not said["unlike"]["outputs"]
    assert said["repeatable"]
    assert said["largest_difference"] == 0.25
    assert said["overhead"]["measured"] == 1.0
    assert cli.run(["check", *NET, *QUICK]) == 8
    printed = capsys.readouterr().out
    assert "Memory: ABOVE the promise" in printed
    assert "States: DIFFER: state moving_mean." in printed
    assert "+100.0% measured" in printed
    assert "The largest difference is 2e-01 of the largest number of its array." in printed
    assert 'The part "Bits" of memplan\'s docs/limits.md lists' in printed
    assert "Two runs of MXNet's own" not in printed


def test_a_step_that_fits_by_its_plan_alone_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what memplan is for: there is nothing to compare it with."""
    grown_nbytes = 0

    def run(schedule: Schedule, *_: Any, **__: Any) -> Trial:
        if not schedule.recomputed:
            raise CostError("a process that trains this network on cpu(0) failed: no memory")
        return Trial(grown_nbytes, seconds=2.0)

    monkeypatch.setattr(checks, "run_apart", run)
    assert cli.run(["check", *NET, *QUICK, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["within"]
    assert (said["equal"], said["unlike"], said["overhead"]["measured"]) == (None, {}, None)
    assert said["unplanned_error"].endswith("on cpu(0) failed: no memory")
    assert (said["planned"]["seconds"], said["unplanned"]["seconds"]) == (2.0, None)
    grown_nbytes = 1 << 30
    assert cli.run(["check", *NET, *QUICK]) == 8
    printed = capsys.readouterr().out
    assert "Memory: ABOVE the promise" in printed
    assert "step without a plan did not run, so that nothing is said of results" in printed
    assert "equal, bit for bit" not in printed


def test_for_which_context_it_plans_is_said_where_none_is_named(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: Any, **options: Any) -> None:
        raise CostError(f"planned for {options['ctx']}")

    monkeypatch.setattr(memplan, "plan", plan)
    told = error(6, "check", *NET)
    assert "This plans for --ctx cpu, by its costs, and counts the workspace of operators" in told
    assert "planned for cpu(0)" in told
    assert "This plans" not in error(6, "check", *NET, "--ctx", "cpu")


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_no_steps_are_refused_before_the_search(
    steps: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memplan, "plan", None)
    assert "--steps" in error(2, "check", *NET, *QUICK, "--steps", steps)


@pytest.mark.parametrize(
    ("numbers", "difference"),
    [
        ([1.0, -2.0], 0.0),
        ([1.0, -1.5], 0.25),
        ([1.0, np.nan], math.inf),
        ([0.0, 0.0], 1.0),
    ],
)
def test_how_much_arrays_differ(numbers: list[float], difference: float, tmp_path: Path) -> None:
    one, other = tmp_path / "one.npz", tmp_path / "other.npz"
    np.savez(one, **{"gradient w": np.float32(numbers), "gradient v": np.float32([9.0])})
    np.savez(other, **{"gradient w": np.float32([1.0, -2.0])})
    assert largest_difference(one, other, ["gradient w"]) == difference
    assert math.isinf(largest_difference(one, other, ["gradient w", "gradient v"]))
    zeros = tmp_path / "zeros.npz"
    np.savez(zeros, **{"gradient w": np.float32([0.0, 0.0])})
    assert math.isinf(largest_difference(other, zeros, ["gradient w"]))


def test_what_mxnet_does_not_repeat_is_not_held_against_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """cuDNN adds up gradients in another order in every run, unless it is told not to."""
    runs = itertools.count()

    def run(*_: Any, results: Path, **__: Any) -> Trial:
        np.savez(results, **{"gradient weight": np.full(2, next(runs))})
        return Trial(grown_nbytes=0, seconds=1.0)

    monkeypatch.setattr(checks, "run_apart", run)
    assert cli.run(["check", *NET, *QUICK, "--json"]) == 8
    said = json.loads(capsys.readouterr().out)
    assert not said["equal"]
    assert not said["repeatable"]
    assert cli.run(["check", *NET, *QUICK]) == 8
    assert "with MXNET_ENFORCE_DETERMINISM=1" in capsys.readouterr().out


@pytest.mark.long
def test_a_plan_is_checked_where_its_tensors_lie() -> None:
    """A new packing of its schedule may take more memory, and promises nothing."""
    net, shapes = residual_net(units=1)
    options = OPTIONS | {"strategy": "evict", "realisation": "packed"}
    packed = plan(net, budget="90%", **options, **shapes)
    assert packed.packing is not None
    at_once = dataclasses.replace(packed.packing, offsets=dict.fromkeys(packed.packing.offsets, 0))
    with pytest.raises(CostError, match="the packing has two tensors at 0"):
        check(dataclasses.replace(packed, packing=at_once), ctx=mx.cpu(), steps=1)


@pytest.mark.long
def test_what_a_process_holds_is_seen() -> None:
    """64 MiB of activations more are 64 MiB of growth more."""
    x = mx.sym.Variable("data")
    for _ in range(4):
        x = mx.sym.sin(x)
    symbol, grown, promised = mx.sym.LinearRegressionOutput(x, name="loss"), [], []
    requests = {"data": "write", "loss_label": "null"}
    for size in (1 << 10, 1 << 22):
        traced = trace(symbol, shapes={"data": (size, 1)}, realisation="packed", grad_req=requests)
        schedule = Schedule.unplanned(traced.graph)
        grown.append(run_apart(schedule, traced, ctx=mx.cpu(0)).grown_nbytes)
        promised.append(traced.form.memory(traced).nbytes(schedule))
    assert promised[1] - promised[0] >= 4 * 4 << 22
    assert 0.95 < (grown[1] - grown[0]) / (promised[1] - promised[0]) < 1.05


@pytest.mark.long
def test_what_cannot_be_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol, shapes = residual_net(units=1)
    made = plan(symbol, **OPTIONS, **shapes)
    with pytest.raises(ArgumentError, match=r"MXNet has no optimizer 'sdg'; it has .*adam"):
        check(made, ctx=mx.cpu(0), optimizer="sdg")
    with pytest.raises(ArgumentError, match="steps must be an integer >= 1, got 0"):
        check(made, ctx=mx.cpu(0), steps=0)
    monkeypatch.setenv("MXNET_ENGINE_TYPE", "NoSuchEngine")
    with pytest.raises(CostError, match=r"a process that trains this network on cpu.* failed"):
        check(made, ctx=mx.cpu(0), steps=1)


@pytest.mark.long
def test_what_is_ended_from_outside_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch system ends what takes too long, and the arrays of a network may be large."""
    made = tmp_path / "made"
    made.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "memplan", "check", *NET, *QUICK, "--steps", "100000"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(made)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None and not any(made.glob("tmp*")):
            time.sleep(0.05)
        process.terminate()
        assert process.wait(600) == 143
    finally:
        process.kill()
        process.wait()
    assert not list(made.glob("tmp*"))
