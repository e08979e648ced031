"""What the command line refuses: true codes, and messages that name the culprit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.command_line import MIRROR, NET, QUICK, SHAPE, process_of
from helpers.paths import ROOT
from memplan.cli import main as cli


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["plan", "net-symbol.json", "--shape", "data=2,x-,8"], "data=32,3,224,224"),
        (["plan", "net-symbol.json", "--shape", "data"], "data=32,3,224,224"),
        (["plan", *NET, "--shape", "budget=2"], "'budget'"),
        (["plan", "net-symbol.json", "--shape", "data=2,x,8,8"], "--shape data=2,x,8,8: 'x' is no"),
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


def test_a_proved_miss_and_one_that_is_not_have_their_codes(
    error: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of mirror plans: the least memory that a refusal of these names is found in no time."""
    command = ("plan", *NET, *QUICK, *MIRROR)
    assert "proved" in error(3, *command, "--budget", "10", "-o", "out.json")
    assert "found no plan" in error(4, *command, "--budget", "75%", "-o", "out.json")
    assert not Path("out.json").exists()
    assert cli.run([*command, "--budget", "10", "--json"]) == 3
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
