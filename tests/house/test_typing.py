"""What a user's type checker makes of the public names, as py.typed promises it something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.paths import ROOT

USER = """
import memplan
from memplan.mxnet import BucketingModule, Module

reveal_type(Module(None))
reveal_type(BucketingModule(lambda key: (None, (), ())))
comparison: memplan.Comparison
frontier: memplan.Frontier
size: memplan.BatchSize
reveal_type(comparison)
reveal_type(frontier)
reveal_type(size)
Module(None, bugdet="4GiB")
memplan.serach_plan(None)
memplan.mxnet.Modul
"""

# What is said of each of its lines, in their order.
SAID = (
    'type is "memplan.mxnet.module.Module"',
    'type is "memplan.mxnet.bucketing.BucketingModule"',
    'type is "memplan.planning.comparison.Comparison"',
    'type is "memplan.planning.frontier.Frontier"',
    'type is "memplan.planning.sizes_tried.BatchSize"',
    'Unexpected keyword argument "bugdet" for "Module"',
    'Module has no attribute "serach_plan"',
    'Module has no attribute "Modul"',
)


def test_public_names_have_types(tmp_path: Path) -> None:
    """A misspelt name is an error, and none is Any, although names are loaded when first used.

    mypy runs in a process of its own: it would leave a million objects here.
    """
    script = tmp_path / "user.py"
    script.write_text(USER, encoding="utf-8")
    options = ["--strict", "--ignore-missing-imports", "--config-file="]
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", tmp_path / "cache", script],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [
        line
        for line in process.stdout.splitlines()
        if "user.py" in line and " defined in " not in line
    ]
    assert not process.stderr
    assert len(lines) == len(SAID), process.stdout
    for line, text in zip(lines, SAID, strict=True):
        assert text in line
