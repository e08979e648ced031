"""What a user's type checker makes of the public names, as py.typed promises it something."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

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


def test_public_names_have_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name is an error, and none is Any, although names are loaded when first used."""
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    script = tmp_path / "user.py"
    script.write_text(USER, encoding="utf-8")
    options = ["--strict", "--ignore-missing-imports", "--config-file="]
    printed, errors, _ = api.run([*options, "--cache-dir", str(tmp_path / "cache"), str(script)])
    lines = [
        line for line in printed.splitlines() if "user.py" in line and " defined in " not in line
    ]
    assert not errors
    assert len(lines) == len(SAID), printed
    for line, text in zip(lines, SAID, strict=True):
        assert text in line
