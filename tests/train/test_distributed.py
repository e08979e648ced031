"""Planned training by MXNet's dist_sync: the example, as processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.paths import ROOT

SIZES = "--layers 3 --filters 8 --batch 8 --size 48 --batches 3 --epochs 2"
Weights = dict[str, np.ndarray]


def launch(arguments: list[str], seconds: float = 600) -> tuple[int, str]:
    """Exit code and output of the launcher; whatever happens, no process of it is left."""
    launcher = subprocess.Popen(
        [sys.executable, "examples/distributed/launch.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = launcher.communicate(timeout=seconds + 20)
        assert is_gone(launcher.pid), f"processes are left behind: {output}"
    finally:
        if alive(launcher.pid):
            os.killpg(launcher.pid, signal.SIGKILL)
    return launcher.returncode, output


def alive(group: int) -> bool:
    """Is there a process of this group?"""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def is_gone(group: int) -> bool:
    """Have all processes of this group ended? The child of one that is killed ends after it."""
    for _ in range(600):
        if not alive(group):
            return True
        time.sleep(0.1)
    return False


def train(api: str, folder: Path, *more: str) -> list[Weights]:
    """The weights of both workers."""
    folder.mkdir()
    arguments = ["--api", api, "--save", str(folder), "--seconds", "2", *SIZES.split(), *more]
    code, output = launch(["--workers", "2", "--timeout", "600", "--", *arguments])
    assert code == 0, output
    assert output.count(": loss ") == 2, output
    return [dict(np.load(folder / f"worker{rank}.npz")) for rank in range(2)]


def assert_equal(one: Weights, other: Weights) -> None:
    assert one
    assert one.keys() == other.keys()
    assert not [name for name in one if not np.array_equal(one[name], other[name])]


@pytest.mark.long
@pytest.mark.parametrize("api", ["module", "gluon"])
def test_weights_are_those_of_the_unplanned_run(api: str, tmp_path: Path) -> None:
    planned = train(api, tmp_path / "planned", "--budget", "85%")
    unplanned = train(api, tmp_path / "unplanned", "--unplanned")
    for ours, stock in zip(planned, unplanned, strict=True):
        assert_equal(ours, stock)
    assert_equal(*planned)


@pytest.mark.long
def test_a_worker_that_fails_ends_all() -> None:
    code, output = launch(["--timeout", "600", "--", "--api", "neither"])
    assert code == 1
    assert "invalid choice: 'neither'" in output
    assert "ended with 2" in output
    assert "not done after" not in output


def test_what_does_not_end_is_ended() -> None:
    code, output = launch(["--timeout", "1", "--", *SIZES.split()])
    assert code == 1
    assert "not done after 1 s" in output
