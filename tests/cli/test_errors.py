"""What the command line refuses: true codes, messages that name the culprit, no file harmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.command_line import NET, QUICK, SHAPE, process_of
from helpers.paths import ROOT
from memplan.cli import main as cli
from memplan.cli import output as cli_output
from memplan.mxnet.plan_file import load_plan


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["plan", "net-symbol.json", "--shape", "data=2,x-,8"], "data=32,3,224,224"),
        (["plan", "net-symbol.json", "--shape", "data"], "data=32,3,224,224"),
        (["plan", *NET, "--shape", "budget=2"], "'budget'"),
        (["plan", "net-symbol.json", "--dtype", "float16"], "data=float16"),
        (["plan", *NET, "--shape", "data=2,3,8,8"], "--shape is given twice for 'data'"),
        (["plan", *NET, "--dtype", "data=float1"], "'float1'"),
        (["plan", *NET, "--grad-req", "data=always"], "write"),
        (["plan", *NET, "--grad-req", "nothing*=null"], "nothing*"),
        (["plan", *NET, "--ctx", "tpu"], "'tpu'"),
        (["plan", *NET, "--budget", "4GG"], "4GG"),
        (["plan", *NET, "--strategy", "magic"], "'magic'"),
        (["plan", *NET, "--costs", "roofline:abacus"], "'abacus'"),
        (["plan", *NET, "--time-limit", "-1"], "--time-limit"),
        (["plan", *NET, "--cache", "net-symbol.json"], "net-symbol.json"),
        (["plan", "net-symbol.json"], "Variable('data', shape=(32, 10))"),
        (["plan", "net-symbol.json", "--shape", "dat=2,3,8,8"], "'dat'"),
        (["plan", "missing-symbol.json", *SHAPE], "missing-symbol.json"),
        (["plan", "net", *SHAPE], "module:function"),
        (["plan", "nets:broken"], "no such layer"),
        (["plan", "nets:missing"], "missing"),
        (["plan", "nowhere:net"], "No module named 'nowhere'\n"),
        (["plan", "nets:number"], "int"),
        (["plan", "nets:unchecked", "--shape", "data=2,4"], "Sequential, which is no HybridBlock"),
        (["plan", "nets:block"], "inputs"),
        (["plan", "nets:frozen", "--shape", "data=2,6"], "its shape, too: --shape label=32"),
        (["plan", "nets:twins", "--shape", "data=2,4"], "are both named 'twin_weight'"),
        (["compare", *NET, "--strategies", "store_all,magic"], "'magic'"),
        (["compare", *NET, "--shape", "strategies=2"], "cannot be called 'strategies'"),
        (["profile", *NET, "--shape", "warmup=2"], "cannot be called 'warmup'"),
        (["max-batch", *NET, "--shape", "executor=2", "--budget", "1MiB"], "'executor'"),
        (["frontier", *NET, "--budgets", "1"], "budgets"),
        (["frontier", *NET, "--budgets", ","], "--budgets names none"),
        (["compare", *NET, "--budgets", ""], "--budgets names none"),
        (["compare", *NET, "--strategies", ""], "--strategies names none"),
        (["explain", *NET, *QUICK, "unit0_conv3"], "unit0_conv1"),
        (["max-batch", *NET, "--budget", "1MiB"], "N"),
        (["max-batch", *NET, "--budget", "0.5"], "'4GiB', as a share of the unplanned"),
        (["fly"], "fly"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_usage_names_the_culprit(arguments: list[str], culprit: str, error: Any) -> None:
    assert culprit in error(2, *arguments)


@pytest.mark.parametrize(
    ("arguments", "code", "advice"),
    [
        (["--costs", "none"], 2, "--costs must be a name like 'roofline:v100' or the path"),
        (["--costs", "none.json"], 2, "memplan profile NETWORK --shape data=32,3,224,224 -o"),
        (["--strategy", "auto:"], 2, "there is no option ''; its options are effort, gap,"),
        (["--strategy", "auto:seed={[]"], 2, "seed must be an integer >= 0, got '{[]'"),
        (["--strategy", "auto:seed={[]}"], 2, "seed must be an integer >= 0, got '{[]}'"),
        (["--strategy", "search:time_limit=-1"], 2, "Error: time_limit must be a number"),
        (["--time-limit", "0"], 2, "Error: --time-limit must be a positive number"),
        pytest.param(
            ["--strategy", "griewank:max_slots=1"],
            4,
            "Name a budget, or take --strategy auto",
            marks=pytest.mark.long,
        ),
        (["--grad-req", "*=add", "--realisation", "updating"], 6, "use --realisation packed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_advice_names_options_of_the_command_line(
    arguments: list[str], code: int, advice: str, error: Any
) -> None:
    message = error(code, "plan", *NET, *arguments)
    assert advice in message
    assert "start" not in message


def test_shapes_in_advice_are_those_of_the_command_line(error: Any) -> None:
    assert "--shape data=32,3,224,224" in error(2, "plan", "net-symbol.json")
    batch = ("--shape", "data=2,3,8,8", "--budget", "1MiB")
    assert "--shape data=N,3,224,224" in error(2, "max-batch", "net-symbol.json", *batch)


# On which MXNet itself crashes.
READS_ITSELF = json.dumps(
    {
        "nodes": [{"op": "relu", "name": "a", "inputs": [[0, 0, 0]]}],
        "arg_nodes": [],
        "node_row_ptr": [0, 1],
        "heads": [[0, 0, 0]],
    }
)

# As MXNet 0.8 wrote it.
OLD_READS_ITSELF = READS_ITSELF.replace('"node_row_ptr": [0, 1], ', "")


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[" * 10**5, '{"nodes": 1}', "\0\1", READS_ITSELF, OLD_READS_ITSELF],
)
def test_a_file_that_is_no_symbol_is_bad_usage(text: str, error: Any) -> None:
    Path("bad.json").write_text(text, encoding="utf-8")
    assert "is no Symbol" in error(2, "plan", "bad.json", *SHAPE)


def test_an_op_that_mxnet_does_not_know_is_named(error: Any) -> None:
    nodes = [
        {"op": "null", "name": "data", "inputs": []},
        {"op": "WarpCTC", "name": "loss", "inputs": [[0, 0, 0]]},
    ]
    text = json.dumps({"nodes": nodes, "arg_nodes": [0], "heads": [[1, 0, 0]]})
    Path("plugin.json").write_text(text, encoding="utf-8")
    assert "the operator 'WarpCTC', which this MXNet does not have" in error(
        2, "plan", "plugin.json", *SHAPE
    )


@pytest.mark.long
def test_a_proved_miss_and_one_that_is_not_have_their_codes(
    error: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "proved" in error(3, "plan", *NET, *QUICK, "--budget", "10", "-o", "out.json")
    assert "found no plan" in error(4, "plan", *NET, *QUICK, "--budget", "75%", "-o", "out.json")
    assert not Path("out.json").exists()
    assert cli.run(["plan", *NET, *QUICK, "--budget", "10", "--json"]) == 3
    said = json.loads(capsys.readouterr().out)["error"]
    assert said["kind"] == "BudgetError"
    assert said["exit_code"] == 3
    assert said["proved"] is True
    assert said["lowest_nbytes"] > 10


def test_a_network_that_cannot_be_planned_has_its_code(error: Any) -> None:
    shapes = ("--shape", "data=4,2", "--shape", "mask=4")
    assert "boolean_mask" in error(6, "plan", "nets:unplannable", *shapes)


def test_costs_of_another_network_have_their_code(error: Any) -> None:
    memplan.CostTable("cpu(x)", {"other": 1.0}).save("costs.json")
    message = error(6, "plan", *NET, "--costs", "costs.json", "--realisation", "explicit")
    assert "lack" in message
    assert "memplan profile NETWORK --realisation explicit --shape data=32,3," in message


@pytest.mark.parametrize("text", [None, "{}", '{"format": "memplan.costs/1"}'])
def test_a_file_that_holds_no_costs_is_bad_usage(text: str | None, error: Any) -> None:
    """As any input file that cannot be used: the network is none of its faults."""
    if text is not None:
        Path("costs.json").write_text(text, encoding="utf-8")
    assert "costs.json" in error(2, "plan", *NET, "--costs", "costs.json")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["-OO"], "run Python without -OO"),
        (["-W", "error"], "let warnings be warnings"),
        (["-bb"], "run Python without -bb"),
    ],
)
def test_how_python_runs_may_be_why_mxnet_is_not_imported(options: list[str], advice: str) -> None:
    done = subprocess.run(
        [sys.executable, *options, "-m", "memplan", "plan", *NET],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert advice in done.stderr.replace("\n", " ")
    assert "pip install" not in done.stderr


def test_an_unusable_mxnet_has_its_code() -> None:
    Path("mxnet").mkdir()
    Path("mxnet/__init__.py").write_text("raise OSError('libcuda.so.1')", encoding="utf-8")
    done = process_of("plan", *NET, PYTHONPATH=f"{Path.cwd()}{os.pathsep}{ROOT}")
    assert done.returncode == 5
    assert "libcuda.so.1" in done.stderr
    assert "Traceback" not in done.stderr
    assert process_of("strategies", PYTHONPATH=f"{Path.cwd()}{os.pathsep}{ROOT}").returncode == 0


def test_an_error_of_mxnet_has_its_code(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise mx.base.MXNetError("Traceback (most recent call last):\nout of memory")

    monkeypatch.setattr(memplan, "plan", fail)
    assert "MXNet failed: out of memory" in error(5, "plan", *NET).replace("\n", " ")


def test_an_error_of_memplans_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memplan, "plan", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["plan", *NET])


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
