"""Compiling ahead of time takes two processes, of which none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from helpers.paths import ROOT

# Both processes say that they compile, each by one write, and do for as long as they are let.
COMPILING = """
import os, sys, time
from memplan.search import compile as compiling

def compile_for_long():
    os.write(1, b"c")
    time.sleep(60)

compiling.compile_search = compiling.compile_others = compile_for_long
sys.exit(compiling.main())
"""


@pytest.mark.parametrize(
    ("number", "to_both", "status", "said"),
    [
        (signal.SIGINT, True, 130, "Interrupted; the first plan compiles the rest.\n"),
        (signal.SIGTERM, False, -signal.SIGTERM, ""),
    ],
)
def test_a_signal_ends_both_processes(
    number: signal.Signals, to_both: bool, status: int, said: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMPILING],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "cc"
        (os.killpg if to_both else os.kill)(process.pid, number)
        out, error = process.communicate()  # ends when nobody has the pipes any more
        assert (process.returncode, out, error) == (status, "", said)
