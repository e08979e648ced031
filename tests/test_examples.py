"""The examples run, and what they assert holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

SMALL = "--stages 1 2 --filters 8 --batch 8 --size 64 --seconds 3 --steps 3 --repeats 2"


def test_resnet() -> None:
    done = subprocess.run(
        [sys.executable, "examples/resnet.py", *SMALL.split(), "--budget", "65%"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(\S.*?)  +(\S.*)$", done.stdout, re.MULTILINE))
    unplanned, planned = map(float, re.findall(r"([\d.]+) MB", rows["whole step"]))
    assert 0 < planned <= 0.65 * unplanned + 0.1
    assert re.fullmatch(r"\+\d+\.\d%", rows["overhead, predicted"])
    assert re.fullmatch(r"[+-]\d+\.\d%", rows["overhead, measured"])
    for step in (1, 2, 3):
        first, second = rows[f"loss of step {step}"].split()
        assert first == second
    assert rows["loss of step 1"] != rows["loss of step 3"]
