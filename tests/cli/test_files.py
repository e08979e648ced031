"""Files that the command line writes and reads: none is harmed, and no work is lost."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.command_line import NET, QUICK, SHAPE, process_of
from memplan.cli import main as cli
from memplan.cli import output as cli_output
from memplan.mxnet.plan_file import load_plan


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ["-o", "net-symbol.json"]),
        (2, ["-o", "./net-symbol.json"]),
        (2, ["--report", "net-0001.params"]),
        (2, ["-o", "out.html", "--report", "out.html"]),
        (2, ["--costs", "costs.json", "-o", "costs.json"]),
        (7, ["-o", "missing/out.json"]),
        (2, ["--report", "folder"]),
        (2, ["-o", "missing/"]),
        (7, ["-o", "circle"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_inputs_are_never_overwritten_and_bad_places_said_first(
    code: int, arguments: list[str], error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbol = mx.sym.load("net-symbol.json")
    shapes, _, _ = symbol.infer_shape(data=(2, 3, 8, 8))
    params = dict(zip(symbol.list_arguments(), map(mx.nd.zeros, shapes), strict=True))
    mx.nd.save("net-0001.params", {f"arg:{name}": array for name, array in params.items()})
    Path("folder").mkdir()
    Path("circle").symlink_to("circle")
    before = {path: path.read_bytes() for path in Path().glob("*.*")}
    monkeypatch.setattr(memplan, "plan", lambda *_, **__: pytest.fail("searched before"))
    assert arguments[-1].split("/")[-1] in error(code, "plan", *NET, *arguments)
    assert {path: path.read_bytes() for path in Path().glob("*.*")} == before


@pytest.mark.parametrize("option", ["-o", "--report"])
def test_a_dash_is_no_file(option: str, error: Any) -> None:
    before = sorted(Path().iterdir())
    assert "for stdout name /dev/stdout" in error(2, "plan", *NET, option, "-")
    assert sorted(Path().iterdir()) == before


def test_a_folder_may_be_called_by_a_dash() -> None:
    assert cli.run(["plan", *NET, "--strategy", "store_all", "--cache", "-"]) == 0
    assert Path("-").is_dir()


@pytest.mark.parametrize("option", ["-o", "--report", "--cache"])
def test_an_unset_variable_is_said_before_the_work(
    option: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memplan, "plan", lambda *_, **__: pytest.fail("searched before"))
    before = sorted(Path().iterdir())
    assert "it is empty; name a path" in error(2, "plan", *NET, option, "")
    assert sorted(Path().iterdir()) == before


def test_what_cannot_be_written_where_it_belongs_is_not_lost(
    error: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli_output, "write_text", full)
    packed = ("--realisation", "packed", "-o", "out.json")
    message = error(7, "plan", *NET, *QUICK, *packed).replace("\n", "")
    [kept] = tmp_path.glob("memplan-*.json")
    assert f"left on device; what it was to hold is in {str(kept)!r}" in message
    assert load_plan(kept).schedule.recomputed
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert "hold" not in error(7, "plan", *NET, *QUICK, *packed)


def test_measurements_that_cannot_be_written_are_not_lost(
    error: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    table = memplan.CostTable("cpu(x)", {"op": 1.0})
    monkeypatch.setattr(memplan, "profile", lambda *_, **__: table)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli_output, "write_text", full)
    assert "what it was to hold is in" in error(7, "profile", *NET, "-o", "costs.json")
    [kept] = tmp_path.glob("memplan-*.json")
    assert memplan.CostTable.load(kept) == table


def test_the_module_of_the_network_is_not_overwritten(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memplan, "plan", lambda *_, **__: pytest.fail("searched before"))
    for network in ("nets:symbol", "nets:block"):
        message = error(2, "plan", network, "--shape", "data=2,6", "-o", "nets.py")
        assert "'nets.py' is read by this command" in message


def test_parameters_whose_name_is_not_utf_8(error: Any) -> None:
    """MXNet takes names as UTF-8 alone."""
    Path("net-symbol.json").rename(os.fsdecode(b"m\xe4-symbol.json"))
    mx.nd.save("x.params", {"arg:weight": mx.nd.zeros(1)})
    Path("x.params").rename(os.fsdecode(b"m\xe4-0000.params"))
    message = error(2, "plan", os.fsdecode(b"m\xe4-symbol.json"), *SHAPE)
    assert "MXNet reads only files whose name is UTF-8" in " ".join(message.split())


def test_nothing_half_written_is_left(
    error: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    Path("out.json").write_text("old", encoding="utf-8")
    before = sorted(Path().iterdir())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in error(7, "plan", *NET, *QUICK, "-o", "out.json")
    assert Path("out.json").read_text(encoding="utf-8") == "old"
    assert sorted(Path().iterdir()) == before


def test_a_folder_that_is_read_only_is_said_before_the_work(
    error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write the file needs its folder all the same: a new file takes its place."""
    Path("folder").mkdir()
    Path("folder/out.json").write_text("old", encoding="utf-8")
    read_only = Path("folder").resolve()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != read_only)
    monkeypatch.setattr(memplan, "plan", lambda *_, **__: pytest.fail("searched before"))
    assert "its folder is" in error(7, "plan", *NET, "-o", "folder/out.json")


def test_links_and_devices_stay_what_they_are(result: Any) -> None:
    Path("target.json").write_text("old", encoding="utf-8")
    Path("link.json").symlink_to("target.json")
    result("plan", *NET, *QUICK, "-o", "link.json")
    assert Path("link.json").is_symlink()
    assert "nodes" in Path("target.json").read_text(encoding="utf-8")
    os.mkfifo("pipe")
    with open(os.open("pipe", os.O_RDWR | os.O_NONBLOCK), encoding="utf-8") as reader:
        result("plan", "nets:symbol", "--shape", "data=2,6", *QUICK, "-o", "pipe")
        assert Path("pipe").is_fifo()
        assert reader.read(1) == "{"


@pytest.mark.long
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_a_pipe_that_a_shell_makes_is_written_to(name: str) -> None:
    done = process_of("plan", *NET, *QUICK, "-o", name)
    assert done.returncode == 0, done.stderr
    assert "nodes" in done.stdout


def test_a_pipe_cannot_be_explained(error: Any) -> None:
    """It would be waited for once a first look had read it."""
    os.mkfifo("pipe.json")
    with open(os.open("pipe.json", os.O_RDWR | os.O_NONBLOCK), "w", encoding="utf-8") as pipe:
        pipe.write("{}")
        pipe.flush()
        assert "write it to a file first" in error(2, "explain", "pipe.json")


@pytest.mark.parametrize("form", [{"indent": 1}, {"sort_keys": True}, {"separators": (",", ":")}])
def test_a_plan_file_that_was_formatted_is_a_plan_file(
    form: dict[str, Any], result: Any, error: Any
) -> None:
    result("plan", *NET, *QUICK, "-o", "plan.json")
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    Path("plan.json").write_text(json.dumps(data, **form), encoding="utf-8")
    assert result("explain", "plan.json")["plan"]["realisation"] == "packed"
    assert "so --budget says nothing of it" in error(2, "explain", "plan.json", "--budget", "50%")
    assert "so --shape says nothing of it" in error(2, "explain", "plan.json", *SHAPE)
    assert "is a plan; name the network that it is for" in error(2, "plan", "plan.json", *SHAPE)


@pytest.mark.parametrize("damage", ["format", "ops", "shapes", "schedule", "strategy"])
def test_a_damaged_plan_file_is_bad_usage(damage: str, result: Any, error: Any) -> None:
    result("plan", *NET, *QUICK, "--realisation", "explicit", "-o", "plan.json")
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    if damage == "format":
        data["format"] = "memplan.plan/0"
    elif damage == "ops":
        data["ops"].pop()
    elif damage == "shapes":
        data["shapes"]["data"] = [2, 3, 8, "x"]
    elif damage == "schedule":
        data["schedule"]["ops"][0] = 5
    else:
        del data["strategy"]
    Path("plan.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(memplan.errors.ArgumentError, match=r"plan\.json"):
        load_plan("plan.json")
    assert "holds no plan" in error(2, "explain", "plan.json")


def test_the_folder_that_is_missing_is_said(error: Any) -> None:
    assert "its folder is missing; make that first" in error(7, "plan", *NET, "-o", "no/x.json")


def test_a_deleted_current_folder_is_said(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def realpath(path: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(cli_output.os.path, "realpath", realpath)
    assert "the folder in which this runs is gone" in error(7, "plan", *NET, "-o", "x.json")
