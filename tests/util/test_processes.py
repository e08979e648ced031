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


LIMITED = """
import os, resource
from memplan.util.processes import check_can_start
check_can_start()
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.getuid() == 0:
    os.setuid(65534)  # no limit is root's
os.register_at_fork(before=lambda: print("forked"))
try:
    check_can_start()
except OSError as error:
    print(error)
"""


def test_whether_a_process_can_be_started_is_told_without_a_fork() -> None:
    """MXNet, whose threads a fork ends, could not start all of them again."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[Errno 11] Resource temporarily unavailable\n"
