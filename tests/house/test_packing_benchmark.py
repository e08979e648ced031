"""benchmarks/packing.py reads what MiniMalloc reads, and checks what it prints."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from helpers.paths import ROOT
from oracles.offsets import Buffer, flaw

# The example of MiniMalloc's paper is of this kind: 12 bytes are needed.
ROWS = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("packing")


def printed(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    """What the script says to files of these names and texts."""
    paths = []
    for name, text in files.items():
        paths.append(folder / f"{name.replace('_', '.')}.csv")
        paths[-1].write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "benchmarks/packing.py", *map(str, paths)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.long
def test_a_capacity_is_in_the_name(tmp_path: Path) -> None:
    done = printed(tmp_path, few=ROWS, few_12=ROWS, few_11=ROWS, few_16=ROWS)
    assert done.returncode == 0, done.stderr
    heads, rule, *rows = (line.strip("| ").split(" | ") for line in done.stdout.splitlines())
    assert len(heads) == len(rule) == 7
    assert [row[:-1] for row in rows] == [
        ["few", "5", "12", "12", "1.0000", "yes: least"],
        ["few.12", "5", "12", "12", "1.0000", "yes: fits"],
        ["few.11", "5", "12", "12", "1.0909", "yes: too small"],
        ["few.16", "5", "12", "12", "0.7500", "yes: fits"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,lower,upper\nb1,0,3\n", "no column size"),
        (ROWS + "b6,0,three,4\n", "line 7"),
        (ROWS + "b6,0\n", "line 7: 2 cells, but line 1 names 4 columns"),
        (ROWS + "b6,0,3,4,5\n", "line 7: 5 cells, but line 1 names 4 columns"),
        (ROWS + "# b6,0,3,4\n", "line 7: comments are no rows"),
        ("# of a model\n" + ROWS, "line 1: comments name no columns"),
        ("id,lower,upper,size,size\nb1,0,3,4,5\n", "line 1: two columns are named 'size'"),
        ("lower,upper,size, alignment\n0,3,4,1\n0,3,4,8\n", "line 3: no placement .* alignment"),
        (
            "lower,upper,size,gaps\n0,3,4,\n0,9,4,2-5\n",
            "line 3: no placement .* gaps, which is '2-5'",
        ),
        (ROWS + "b6,3,3,4\n", "lower less than its upper"),
        (ROWS + "b6,0,3,0\n", "size must be positive"),
        (ROWS + f"b6,0,{2**61},4\n", r"line 7.*within 2\^61"),
        # What would be counted in more than 64 bits: alone, as a sum, or beside a buffer's number.
        (ROWS + f"b6,0,3,{10**20}\n", r"less than 2\^61"),
        (ROWS + f"b6,0,3,{2**62}\nb7,0,3,{2**62}\n", r"less than 2\^61"),
        (ROWS + f"b6,0,3,{2**61 // 6}\n", r"less than 2\^61"),
    ],
)
def test_what_is_no_instance_is_refused(
    tmp_path: Path, script: ModuleType, text: str, message: str
) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=rf"wrong\.csv.*{message}"):
        script.read(path)


def test_columns_that_ask_for_nothing_are_read_over(tmp_path: Path, script: ModuleType) -> None:
    path = tmp_path / "all.csv"
    rows = "b1,0,3,4,1,,-1\nb2,3,9,4,0,,8\n\nb3,0,9,5,,,\n"
    path.write_text("id,lower,upper,size,alignment,gaps,hint\n" + rows, encoding="utf-8")
    assert [array.tolist() for array in script.read(path)] == [[4, 4, 5], [0, 3, 0], [3, 9, 9]]


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, script: ModuleType) -> None:
    (tmp_path / "latin.csv").write_bytes(ROWS.encode() + b"\xff,0,3,4\n")
    for name, message in (
        ("latin.csv", "can't decode byte 0xff"),
        ("missing.csv", "No such file"),
        ("", "Is a directory"),
    ):
        with pytest.raises(SystemExit, match=f"{name}: .*{message}"):
            script.read(tmp_path / name)


def test_the_mark_that_some_editors_put_first_is_no_part_of_a_name(
    tmp_path: Path, script: ModuleType
) -> None:
    path = tmp_path / "marked.csv"
    path.write_text("\ufefflower,upper,size\n0,3,4\n", encoding="utf-8")
    assert [array.tolist() for array in script.read(path)] == [[4], [0], [3]]


def test_the_largest_sizes_are_counted(tmp_path: Path, script: ModuleType) -> None:
    """As much as is taken, with buffers of which two always live together."""
    script.compile_all()
    path, count = tmp_path / "large.csv", 48
    size = (2**61 - 1) // count**2
    rows = "".join(f"{i},{i + 2},{size}\n" for i in range(count))
    path.write_text("lower,upper,size\n" + rows, encoding="utf-8")
    cells = script.row(path, script.read(path), 1000)
    assert cells[1:-1] == [str(count), str(2 * size), str(2 * size), "1.0000", "yes: least"]


def test_overlaps_are_noticed(script: ModuleType) -> None:
    """As the plain check of pairs notices them."""
    random = np.random.default_rng(0)
    verdicts = []
    for _ in range(300):
        sizes, lower, lives = random.integers(1, 5, (3, 6))
        offsets = random.integers(0, 20, 6)
        arrays = sizes, lower, lower + lives
        buffers = [Buffer(*map(int, row)) for row in zip(*arrays, strict=True)]
        expected = flaw(buffers, offsets.tolist(), 100)
        assert (script.overlapping(*arrays, offsets) is None) == (expected is None)
        verdicts.append(expected is None)
    assert 30 < verdicts.count(True) < 270, "one answer is right nearly always"
