"""Files that are written whole or not at all, and JSON whose reader does not break."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from memplan.util import files
from memplan.util.files import DRAFT, parse_json, read_json, unwritten, write_text
from memplan.util.numbers import is_finite, is_whole, shown


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_text_is_on_the_disk_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    seen = []
    flush, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        flush(descriptor)
        seen.append(("flush", path.read_text(), os.fstat(descriptor).st_size))

    def replaced(draft: Path, target: Path) -> None:
        seen.append(("replace", path.read_text(), draft.stat().st_size))
        replace(draft, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", replaced)
    write_text(path, "été\r\n")
    assert seen[:2] == [("flush", "old", 7), ("replace", "old", 7)]
    assert path.read_bytes() == "été\r\n".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(mode)
    write_text(path, "new")
    assert (permissions(path), path.read_text()) == (mode, "new")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_new_file_gets_those_that_files_get(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "new", "new")
    finally:
        os.umask(before)
    assert permissions(tmp_path / "new") == 0o666 & ~umask


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if there:
        target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), encoding="utf-8") as reader:
        write_text(pipe, "new")
        assert reader.read(3) == "new"
    assert pipe.is_fifo()


def test_a_pipe_is_written_to_by_its_descriptor() -> None:
    reader, writer = os.pipe()
    write_text(f"/dev/fd/{writer}", "new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    os.close(writer)


def test_what_stdout_goes_to_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import sys; from memplan.util.files import write_text; print('before');"
        "write_text(sys.argv[1], 'new\\n'); print('after')"
    )
    for name in ("/dev/stdout", str(path)):
        path.write_text("old\n")
        with path.open("a") as file:
            subprocess.run([sys.executable, "-c", code, name], stdout=file, cwd=ROOT, check=True)
        assert path.read_text() == "old\nbefore\nnew\nafter\n"


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127, "🦜" * 63])
def test_as_long_a_name_as_the_file_system_takes(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / name, "new")
    assert (tmp_path / name).read_text() == "new"


def test_a_longer_one_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File name too long"):
        write_text(tmp_path / ("n" * 256), "new")
    assert not list(tmp_path.iterdir())


def test_what_can_be_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    Path("folder").mkdir()
    for path in ("missing/", "folder", "folder/", "", Path()):
        with pytest.raises(OSError, match="it names a folder"):
            write_text(path, "text")
    with pytest.raises(OSError, match="symbolic links"):
        write_text("circle", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["circle", "folder"]
    assert Path("circle").is_symlink()


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "out"
    with pytest.raises(FileNotFoundError) as caught:
        write_text(path, "new")
    assert str(caught.value) == f"[Errno 2] No such file or directory: {str(path)!r}"


def test_a_folder_is_called_missing_where_it_is(tmp_path: Path) -> None:
    """Not in /proc, which makes no files, nor for an error that names no file."""
    missing = FileNotFoundError(2, "No such file", str(tmp_path / "folder" / "name"))
    assert unwritten(missing) == "its folder is missing; make that first"
    for named in ([str(tmp_path / "name")], []):
        assert unwritten(FileNotFoundError(2, "No such file", *named)) == "No such file"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(error):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_drafts_of_killed_processes_are_swept_and_younger_ones_are_not(tmp_path: Path) -> None:
    old, young = tmp_path / f".a.0{DRAFT}", tmp_path / f".b.1{DRAFT}"
    for draft in (old, young):
        draft.write_text("half")
    age = young.stat().st_mtime - 2 * files.STALE_SECONDS
    os.utime(old, (age, age))
    mine = tmp_path / "not-a-draft"
    mine.write_text("mine")
    os.utime(mine, (age, age))
    write_text(tmp_path / "out", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [young.name, "not-a-draft", "out"]
    )


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, '{"a":' * 10**5, "9" * 5000, "\ud800"])
def test_damaged_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(text)


def test_json_of_a_file(tmp_path: Path) -> None:
    write_text(tmp_path / "some.json", '{"a": [1, "é"]}')
    assert read_json(tmp_path / "some.json") == {"a": [1, "é"]}
    (tmp_path / "binary.json").write_bytes(b"\x80\x02}q")
    with pytest.raises(ValueError, match="utf-8"):
        read_json(tmp_path / "binary.json")
    with pytest.raises(OSError, match="directory"):
        read_json(tmp_path)


def test_what_is_a_number() -> None:
    assert [is_whole(v) for v in (0, 7, -1, True, 1.0, "1", None)] == [True, True] + [False] * 5
    assert all(is_finite(v) for v in (0, 0.0, 1, 1e308, sys.float_info.max))
    assert not any(
        is_finite(v) for v in (-1, -1e-9, True, "1", None, 10**400, float("inf"), float("nan"))
    )
    assert shown(7) == "7"
    assert shown(10**5000) == "an integer of 16610 bits"
    assert len(shown("x" * 1000)) < 100
