"""memplan plan says how to train by the plan: in words that can be followed."""

from __future__ import annotations

import re

import mxnet as mx
import pytest

from helpers.command_line import NET, QUICK
from memplan.cli import main as cli
from memplan.mxnet import Module
from memplan.mxnet.plan_file import load_plan

BLOCK = ("nets:block", "--shape", "data=2,6")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["plan", *arguments, *QUICK]) == 0
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reserve"),
    [
        ((), 0),
        (("--realisation", "explicit"), 0),
        (("--reserve", "1KiB"), 1024),
        (("--optimizer", "adam"), None),
        (("--time-limit", "9", "--costs", "roofline:cpu"), 0),
    ],
)
def test_a_block_is_trained_by_the_same_plan(
    options: tuple[str, ...], reserve: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, *BLOCK, "--ctx", "cpu", *options)
    names = dict(item.split("=") for item in re.findall(r"(\w+=[^,)]+)", text.splitlines()[-1]))
    if reserve is None:  # the trainer has its states beside the step
        assert int(names["reserve"]) > 0
    else:
        assert int(names.get("reserve", 0)) == reserve
    assert names.get("time_limit") == ("9.0" if "--time-limit" in options else None)
    assert names.get("costs") == ("'roofline:cpu'" if "--costs" in options else None)
    explicit = "explicit" in options
    assert names["realisation"] == ("'explicit'" if explicit else "'packed'")


def test_a_loss_is_named_where_the_function_returns_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "step = TrainStep(block, strategy=" in said(capsys, *BLOCK)
    with_loss = ("nets:frozen", *BLOCK[1:], "--shape", "label=2")
    assert "step = TrainStep(block, loss, strategy=" in said(capsys, *with_loss)


def test_a_block_without_a_device_and_one_that_mirrors(capsys: pytest.CaptureFixture[str]) -> None:
    assert "workspace of operators, as the plan does with --ctx" in said(capsys, *BLOCK)
    mirrored = said(capsys, *BLOCK, "--realisation", "mirror")
    assert "Gluon ignores what mirroring marks" in mirrored
    assert "TrainStep" not in mirrored


@pytest.mark.long
def test_a_table_of_costs_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["profile", *BLOCK, "--repeats", "1", "-o", "costs.json"]) == 0
    text = said(capsys, *BLOCK, "--ctx", "cpu", "--costs", "costs.json")
    assert "from memplan import CostTable" in text
    assert "costs=CostTable.load('costs.json')" in text


@pytest.mark.parametrize("realisation", ["packed", "mirror"])
def test_modules_are_told_the_names_of_inputs(
    realisation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    net = mx.sym.FullyConnected(mx.sym.Variable("pictures"), num_hidden=3, name="scores")
    net = mx.sym.SoftmaxOutput(net, mx.sym.Variable("kinds_label"), name="loss")
    net.save("named.json")
    shape = ("--shape", "pictures=4,6", "--realisation", realisation)
    text = said(capsys, "named.json", *shape, "-o", "plan.json")
    line = re.search(r"module = (.*)", text)
    assert line is not None
    assert ("\n  import mxnet as mx\n" in text) is (realisation == "packed")
    assert line[1].endswith(", data_names=['pictures'], label_names=['kinds_label'])")
    found = {"mx": mx, "Module": Module, "load_plan": load_plan}
    eval(line[1], found).bind([("pictures", (4, 6))], [("kinds_label", (4,))])
    assert "names=" not in said(capsys, *NET, "-o", "other.json")


def test_what_module_cannot_train_is_not_given_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="scores")
    net.save("body.json")
    text = said(capsys, "body.json", "--shape", "data=4,6", "-o", "plan.json")
    assert "Wrote plan.json.\nOf its outputs scores_output is no loss: put yours behind it" in text
    assert "To train by it" not in text


@pytest.mark.parametrize("reserve", ["0", "0B", "0 MiB", "0.0"])
def test_no_reserve_can_be_said(reserve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" not in said(capsys, *NET, "--reserve", reserve)


def test_a_share_of_nothing_is_no_reserve(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", *NET, "--reserve", "0%"]) != 0
    assert "the reserve '0%' cannot be used" in capsys.readouterr().err
