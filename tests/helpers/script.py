"""Python scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from helpers.paths import ROOT


def printed_by(*arguments: str, **environment: str) -> str:
    """What Python prints when it runs with ``arguments`` by itself; it must come to its end."""
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def script(code: str, **options: Any) -> subprocess.Popen[str]:
    """A script that plans, without a guard by ``__name__``, in a process of its own."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
