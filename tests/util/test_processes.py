"""A process ends with the one that started it, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys

from helpers.paths import ROOT

CHILD = """
import os, time
from memplan.util.processes import end_with
print(end_with(0), end_with(os.getppid()), flush=True)
time.sleep(600)
"""

PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_killed_parent_takes_its_child_along() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "False True\n"
        parent.kill()
        assert parent.stdout.read() == ""  # comes to its end when nobody has the pipe any more
