"""Python scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from helpers.paths import ROOT


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
