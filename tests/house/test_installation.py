"""What an installed memplan brings besides its sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from memplan.util.dispatcher import SUFFIX

# In place of memplan.search.compile, which takes half a minute.
COMPILE = """
import numpy as np
from memplan.memory.offsets.quick import lowest_first
rows = np.array([[1, 1], [0, 1], [2, 3], [0, 1]])
offsets = lowest_first(*rows, 1 << 60)
print(offsets, "from", "disk" if lowest_first.dispatcher.stats.cache_hits else "source")
"""


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", *code.split(" ")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", **environment},
        check=True,
        capture_output=True,
        text=True,
    )


def build(folder: Path, compile_source: str) -> subprocess.CompletedProcess[str]:
    """Build memplan in ``folder``/build."""
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "memplan", folder / "memplan", ignore=ignore)
    (folder / "memplan/search/compile.py").write_text(compile_source)
    return run("setup.py -q build --build-lib build", folder, NUMBA_CACHE_DIR=str(folder / "other"))


@pytest.mark.long
def test_an_installation_brings_what_it_compiled(tmp_path: Path) -> None:
    build(tmp_path, COMPILE)
    installed = tmp_path / "elsewhere" / "site-packages"
    installed.parent.mkdir()
    (tmp_path / "build").rename(installed)
    shutil.rmtree(tmp_path / "memplan")
    assert run("-m memplan.search.compile", installed).stdout == "[0 1] from disk\n"
    foreign = run("-m memplan.search.compile", installed, NUMBA_CPU_NAME="x86-64")
    assert foreign.stdout == "[0 1] from source\n"
    assert "memplan compiles its search" in foreign.stderr
    assert run("-m memplan.search.compile", installed).stdout == "[0 1] from disk\n"


@pytest.mark.long
def test_an_installation_goes_on_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    built = build(tmp_path, "raise ImportError('numba')\n")
    assert "built without its search compiled" in built.stderr
    assert (tmp_path / "build/memplan/__init__.py").is_file()
    assert not list(tmp_path.rglob(f"*{SUFFIX}"))
