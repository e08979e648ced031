"""The command line: its results are those of the Python calls, its files whole, its codes true."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.networks import residual_net
from helpers.paths import ROOT
from memplan.cli import main as cli
from memplan.cli import output as cli_output
from memplan.cli import progress as cli_progress
from memplan.mxnet.load import load_network
from memplan.mxnet.plan_file import load_plan, plan_text
from memplan.planning import job
from memplan.util.progress import LOGGER, tell

SHAPE = ("--shape", "data=2,3,8,8")
NET = ("net-symbol.json", *SHAPE)
QUICK = ("--strategy", "chen_sqrt")

NETS = """
    import mxnet as mx

    def symbol():
        print("a print of the user's")
        hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc")
        return mx.sym.SoftmaxOutput(mx.sym.Activation(hidden, act_type="relu"), name="softmax")

    def block():
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(mx.gluon.nn.Dense(8, activation="relu"), mx.gluon.nn.Dense(4))
        return net

    def half():
        net = block()
        net.cast("float16")
        return net

    def frozen():
        net = block()
        net[0].collect_params().setattr("grad_req", "null")
        return net, mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def broken():
        raise KeyError("no such layer")

    def number():
        return 3

    def unchecked():
        return mx.gluon.nn.Sequential()

    def unplannable():
        data = mx.sym.Variable("data") * mx.sym.Variable("weight", shape=(4, 2))
        return mx.sym.MakeLoss(mx.sym.contrib.boolean_mask(data, mx.sym.Variable("mask")))
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own with a network and a module, as the current one."""
    monkeypatch.setattr(job, "LOWEST_SECONDS", 0.1)
    symbol, _ = residual_net(units=2)
    symbol.save(str(tmp_path / "net-symbol.json"))
    (tmp_path / "nets.py").write_text(textwrap.dedent(NETS), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("nets", None)


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command that must succeed; its result as JSON."""

    def call(*arguments: str) -> Any:
        code = cli.run([*arguments, "--json"])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    return call


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command that must fail with ``code``; its message."""

    def call(code: int, *arguments: str) -> str:
        assert cli.run(arguments) == code
        printed = capsys.readouterr()
        assert not printed.out
        assert "Traceback" not in printed.err
        return printed.err

    return call


def _process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memplan", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _flagged(symbol: mx.sym.Symbol) -> set[str]:
    found = symbol.attr_dict().items()
    return {name for name, attrs in found if "__force_mirroring__" in attrs}


def test_plan_writes_the_network_and_says_what_python_says(result: Any) -> None:
    said = result("plan", *NET, *QUICK, "--reserve", "1KiB", "-o", "planned.json")
    symbol, _ = residual_net(units=2)
    made = memplan.plan(symbol, strategy="chen_sqrt", reserve="1KiB", data=(2, 3, 8, 8))
    assert mx.sym.load("planned.json").tojson() == made.symbol.tojson()
    assert _flagged(made.symbol) == set(said["recomputed"])
    assert len(said["recomputed"]) > 3
    assert said["planned"]["total_nbytes"] == made.total_nbytes
    assert said["planned"]["reserve_nbytes"] == 1024
    assert said["unplanned"]["allocated_nbytes"] == made.unplanned.allocated_nbytes
    assert said["overhead"] == made.overhead
    assert said["budget_nbytes"] is said["report"] is None
    assert (said["status"], said["strategy"]) == ("feasible", "chen_sqrt")
    assert said["output"] == "planned.json"


def test_the_planned_network_trains_as_before(result: Any) -> None:
    result("plan", *NET, *QUICK, "-o", "planned.json")
    gradients = []
    for path in ("net-symbol.json", "planned.json"):
        mx.random.seed(1)
        executor = mx.sym.load(path).simple_bind(mx.cpu(), data=(2, 3, 8, 8))
        for array in executor.arg_dict.values():
            array[:] = mx.nd.random.uniform(shape=array.shape)
        executor.forward(is_train=True)
        executor.backward()
        gradients.append(executor.grad_dict["first_weight"].asnumpy())
    assert np.abs(gradients[0]).max() > 0
    np.testing.assert_array_equal(*gradients)


def test_plan_writes_a_report(result: Any) -> None:
    said = result("plan", *NET, *QUICK, "--report", "report.html")
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "unit0_conv1" in page
    assert said["report"] == "report.html"


@pytest.mark.parametrize(
    ("text", "budget"),
    [("0.9", 0.9), ("90%", "90%"), ("1.0", 1.0), ("190 KiB", "190 KiB"), ("least", None)],
)
def test_budgets(text: str, budget: Any, result: Any) -> None:
    said = result("plan", *NET, "--strategy", "chen_greedy", "--budget", text)
    symbol, _ = residual_net(units=2)
    made = memplan.plan(symbol, strategy="chen_greedy", budget=budget, data=(2, 3, 8, 8))
    assert said["budget_nbytes"] == made.budget_nbytes
    assert said["planned"]["total_nbytes"] == made.total_nbytes


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["plan", "net-symbol.json", "--shape", "data=2,x-,8"], "data=32,3,224,224"),
        (["plan", "net-symbol.json", "--shape", "data"], "data=32,3,224,224"),
        (["plan", *NET, "--shape", "budget=2"], "'budget'"),
        (["plan", "net-symbol.json", "--dtype", "float16"], "data=float16"),
        (["plan", *NET, "--dtype", "data=float1"], "'float1'"),
        (["plan", *NET, "--grad-req", "data=always"], "write"),
        (["plan", *NET, "--grad-req", "nothing*=null"], "nothing*"),
        (["plan", *NET, "--ctx", "tpu"], "'tpu'"),
        (["plan", *NET, "--budget", "4GG"], "4GG"),
        (["plan", *NET, "--strategy", "magic"], "'magic'"),
        (["plan", *NET, "--costs", "roofline:abacus"], "'abacus'"),
        (["plan", *NET, "--time-limit", "-1"], "--time-limit"),
        (["plan", *NET, "--cache", "net-symbol.json"], "net-symbol.json"),
        (["plan", "net-symbol.json"], "'data'"),
        (["plan", "net-symbol.json", "--shape", "dat=2,3,8,8"], "'dat'"),
        (["plan", "missing-symbol.json", *SHAPE], "missing-symbol.json"),
        (["plan", "net", *SHAPE], "module:function"),
        (["plan", "nets:broken"], "no such layer"),
        (["plan", "nets:missing"], "missing"),
        (["plan", "nowhere:net"], "nowhere"),
        (["plan", "nets:number"], "int"),
        (["plan", "nets:unchecked", "--shape", "data=2,4"], "Sequential, which is no HybridBlock"),
        (["plan", "nets:block"], "inputs"),
        (["compare", *NET, "--strategies", "store_all,magic"], "'magic'"),
        (["frontier", *NET, "--budgets", "1"], "budgets"),
        (["explain", *NET, *QUICK, "unit0_conv3"], "unit0_conv1"),
        (["max-batch", *NET, "--budget", "1MiB"], "N"),
        (["fly"], "fly"),
    ],
    ids=" ".join,
)
def test_bad_usage_names_the_culprit(arguments: list[str], culprit: str, error: Any) -> None:
    assert culprit in error(2, *arguments)


@pytest.mark.parametrize("text", ["", "hello", '{"nodes": 1}', "\0\1"])
def test_a_file_that_is_no_symbol_is_bad_usage(text: str, error: Any) -> None:
    Path("bad.json").write_text(text, encoding="utf-8")
    assert "is no Symbol" in error(2, "plan", "bad.json", *SHAPE)


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
    assert "lack" in error(6, "plan", *NET, "--costs", "costs.json")


def test_an_unusable_mxnet_has_its_code() -> None:
    Path("mxnet").mkdir()
    Path("mxnet/__init__.py").write_text("raise OSError('libcuda.so.1')", encoding="utf-8")
    done = _process("plan", *NET, PYTHONPATH=f"{Path.cwd()}{os.pathsep}{ROOT}")
    assert done.returncode == 5
    assert "libcuda.so.1" in done.stderr
    assert "Traceback" not in done.stderr
    assert _process("strategies", PYTHONPATH=f"{Path.cwd()}{os.pathsep}{ROOT}").returncode == 0


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
    before = {path: path.read_bytes() for path in Path().glob("*.*")}
    monkeypatch.setattr(memplan, "plan", lambda *_, **__: pytest.fail("searched before"))
    assert arguments[-1].split("/")[-1] in error(code, "plan", *NET, *arguments)
    assert {path: path.read_bytes() for path in Path().glob("*.*")} == before


def test_nothing_half_written_is_left(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.json").write_text("old", encoding="utf-8")
    before = sorted(Path().iterdir())

    def full(self: Path, text: str, **_: Any) -> None:
        with self.open("w", encoding="utf-8") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left" in error(7, "plan", *NET, *QUICK, "-o", "out.json")
    assert Path("out.json").read_text(encoding="utf-8") == "old"
    assert sorted(Path().iterdir()) == before


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


def test_what_to_do_next_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert cli.run(["plan", *arguments, *QUICK]) == 0
        return capsys.readouterr().err

    assert "-o FILE" in said(*NET)
    assert "mx.mod.Module(mx.sym.load('out.json'))" in said(*NET, "-o", "out.json")
    explicit = said(*NET, "-o", "out.json", "--realisation", "explicit")
    assert "Module(mx.sym.load('net-symbol.json'), plan=load_plan('out.json'))" in explicit
    assert "TrainStep(block, loss" in said("nets:block", "--shape", "data=2,6")
    body = mx.sym.load("net-symbol.json").get_internals()["scores_output"]
    body.save("body.json")
    assert "scores_output is no loss" in said("body.json", *SHAPE, "-o", "out.json")


def test_an_explicit_plan_is_a_file_that_module_trains_by(
    result: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    explicit = (*NET, *QUICK, "--realisation", "explicit", "--grad-req", "first_*=null")
    said = result("plan", *explicit, "-o", "plan.json")
    made = load_plan("plan.json")
    assert made.total_nbytes == said["planned"]["total_nbytes"]
    assert made.unplanned.seconds == said["unplanned"]["seconds"]
    assert made.overhead == said["overhead"] > 0
    assert made.trace.grad_req["first_weight"] == "null"
    assert plan_text(made) == Path("plan.json").read_text(encoding="utf-8")

    module = memplan.mxnet.Module(
        mx.sym.load("net-symbol.json"), plan=made, fixed_param_names=["first_weight"]
    )
    module.bind([("data", (2, 3, 8, 8))], [("softmax_label", (2,))])
    assert module.plan is made

    assert cli.run(["explain", "plan.json"]) == 0
    assert "The peak of live activations" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["format", "ops", "shapes", "schedule", "strategy"])
def test_a_damaged_plan_file_is_bad_usage(damage: str, result: Any, error: Any) -> None:
    result("plan", *NET, *QUICK, "--realisation", "explicit", "-o", "plan.json")
    data = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    if damage == "format":
        data["format"] = "memplan.plan/2"
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
    if damage != "format":
        assert "holds no plan" in error(2, "explain", "plan.json")


def test_a_gluon_export_takes_the_dtypes_of_its_parameters_and_must_fit_them(
    result: Any, error: Any
) -> None:
    block = mx.gluon.nn.HybridSequential()
    block.add(mx.gluon.nn.Dense(8, activation="relu"), mx.gluon.nn.Dense(4))
    block.initialize()
    block.hybridize()
    block(mx.nd.zeros((2, 6)))
    block.export("dense", epoch=2)
    single = result("plan", "dense-symbol.json", *QUICK, "--shape", "data=2,6")
    params = mx.nd.load("dense-0002.params")
    mx.nd.save("dense-0010.params", {n: array.astype("float16") for n, array in params.items()})
    half = result("plan", "dense-symbol.json", *QUICK, "--shape", "data=2,6")
    assert half["unplanned"]["total_nbytes"] * 2 == single["unplanned"]["total_nbytes"]
    message = error(2, "plan", "dense-symbol.json", "--shape", "data=2,7")
    assert "(8, 7)" in message
    assert "(8, 6)" in message
    assert "dense-0010.params" in message
    Path("dense-0010.params").write_bytes(b"damaged")
    assert "dense-0010.params" in error(2, "plan", "dense-symbol.json", "--shape", "data=2,6")


def test_functions_give_symbols_and_blocks(result: Any) -> None:
    assert result("plan", "nets:symbol", *QUICK, "--shape", "data=2,6")["realisation"] == "mirror"
    said = result("plan", "nets:block", *QUICK, "--shape", "data=2,6")
    assert said["realisation"] == "explicit"
    half = result("plan", "nets:half", *QUICK, "--shape", "data=2,6", "--dtype", "data=float16")
    assert half["unplanned"]["total_nbytes"] * 2 == said["unplanned"]["total_nbytes"]
    frozen = load_network("nets:frozen", shapes={"data": (2, 6), "label": (2,)})
    requests = frozen.grad_req
    assert isinstance(requests, dict)
    assert requests["net_dense0_weight"] == requests["net_dense0_bias"] == "null"
    assert requests["net_dense1_weight"] == "write"
    assert "label" in frozen.symbol.list_arguments()
    labels = ("--shape", "label=2")
    result("plan", "nets:frozen", *QUICK, "--shape", "data=2,6", *labels)


def test_patterns_of_grad_req_count_in_order() -> None:
    network = load_network(
        "net-symbol.json",
        shapes={"data": (2, 3, 8, 8)},
        requests=[("unit*", "null"), ("unit1_conv*", "add"), ("unit1_conv2_weight", "write")],
    )
    requests = network.grad_req
    assert isinstance(requests, dict)
    assert requests["unit0_conv1_weight"] == "null"
    assert requests["unit1_a_bn_gamma"] == "null"
    assert requests["unit1_conv1_weight"] == "add"
    assert requests["unit1_conv2_weight"] == requests["first_weight"] == "write"
    assert requests["data"] == requests["softmax_label"] == "null"


def test_compare(result: Any, error: Any, capsys: pytest.CaptureFixture[str]) -> None:
    some = ("--strategies", "store_all,chen_sqrt", "--budgets", "10,least")
    rows = result("compare", *NET, *some, "-o", "table.csv")["rows"]
    assert [row["strategy"] for row in rows] == ["store_all", "chen_sqrt"] * 2
    assert [row["budget_nbytes"] for row in rows] == [10, 10, None, None]
    assert rows[0]["total_nbytes"] is None
    assert rows[3]["total_nbytes"] < rows[2]["total_nbytes"]
    lines = Path("table.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split(",") == list(rows[0])
    assert [line.split(",")[3] for line in lines[3:]] == [str(r["total_nbytes"]) for r in rows[2:]]
    assert cli.run(["compare", *NET, "--strategies", "store_all", "--budgets", "10"]) == 3
    assert "store_all" in capsys.readouterr().out
    assert cli.run(["compare", *NET, "--strategies", "store_all", "--budgets", "90%"]) == 4


def test_compare_takes_by_itself_what_the_realisation_has(result: Any) -> None:
    shapes = ("--shape", "data=2,6", "--time-limit", "0.1", "--budgets", "99%")
    rows = result("compare", "nets:block", *shapes)["rows"]
    found = {row["strategy"] for row in rows}
    assert "chen_greedy" in found
    assert "memonger" not in found


def test_frontier(result: Any) -> None:
    rows = result("frontier", *NET, "--strategy", "chen_greedy", "--budgets", "3")["rows"]
    totals = [row["total_nbytes"] for row in rows]
    assert len(totals) > 1
    assert totals == sorted(totals, reverse=True)
    assert rows[0]["overhead"] == 0
    chosen = result("frontier", *NET, "--strategy", "chen_greedy", "--budgets", "90%,80%")["rows"]
    assert {row["budget_nbytes"] for row in chosen[1:]} <= {
        int(0.9 * totals[0]),
        int(0.8 * totals[0]),
    }


def test_max_batch(result: Any) -> None:
    network = ("net-symbol.json", "--shape", "data=N,3,8,8")
    found = result("max-batch", *network, *QUICK, "--budget", "1MiB", "-o", "sizes.csv")
    assert found["batch_size"] > 2
    assert found["plan"]["planned"]["total_nbytes"] <= 2**20
    fits = {trial["batch_size"]: trial["fits"] for trial in found["tried"]}
    assert fits[found["batch_size"]]
    assert not fits[found["too_large"]]
    assert found["too_large"] == found["batch_size"] + 1
    lines = Path("sizes.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0].split(",") == list(found["tried"][0])


def test_max_batch_of_a_network_with_parameters(result: Any) -> None:
    symbol = mx.sym.load("net-symbol.json")
    shapes, _, _ = symbol.infer_shape(data=(1, 3, 8, 8))
    shape_of = dict(zip(symbol.list_arguments(), shapes, strict=True))
    mx.nd.save("net-0001.params", {"arg:scores_weight": mx.nd.zeros(shape_of["scores_weight"])})
    network = ("net-symbol.json", "--shape", "data=N,3,8,8")
    assert result("max-batch", *network, *QUICK, "--budget", "300KiB")["batch_size"] > 2


def test_explain(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = result("explain", *NET, *QUICK)
    assert sum(tensor["nbytes"] for tensor in said["alive"]) == said["peak_nbytes"]
    assert said["plan"]["planned"]["peak_nbytes"] == said["peak_nbytes"]
    assert {tensor["role"] for tensor in said["alive"]} & {"kept", "recomputed"}
    name = said["plan"]["recomputed"][0]
    assert "ecomputed at step" in result("explain", *NET, *QUICK, name)["reason"]
    assert cli.run(["explain", *NET, "--strategy", "store_all", name]) == 0
    assert "kept" in capsys.readouterr().out


def _graph(costs: memplan.CostTable) -> memplan.TrainingGraph:
    symbol, _ = residual_net(units=2)
    made = memplan.plan(symbol, strategy="store_all", costs=costs, data=(2, 3, 8, 8))
    return made.schedule.graph


def test_profile_gives_costs_to_plan_by(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = result("profile", *NET, "--repeats", "1", "--warmup", "0", "-o", "costs.json")
    table = memplan.CostTable.load("costs.json")
    assert said["seconds"] == table.seconds
    assert said["shapes"] == {"data": [2, 3, 8, 8]}
    made = result("plan", *NET, *QUICK, "--costs", "costs.json")
    assert made["costs"].startswith("measured on cpu")
    unplanned = sum(op.seconds for op in _graph(table).ops)
    assert made["unplanned"]["seconds"] == pytest.approx(unplanned)
    assert cli.run(["profile", *NET, "--repeats", "1", "--warmup", "0"]) == 0
    assert "_backward_Convolution" in capsys.readouterr().out


def test_strategies_lists_the_registry(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = result("strategies")["strategies"]
    for kind in memplan.strategies.REALISATIONS:
        names = [row["name"] for row in rows if row["realisation"] == kind]
        assert names == list(memplan.strategies.names(kind))
    assert all(row["summary"] and "`" not in row["summary"] for row in rows)
    assert next(row for row in rows if row["name"] == "anneal")["options"]["seed"] == "0"
    assert cli.run(["strategies", "--realisation", "explicit"]) == 0
    printed = capsys.readouterr().out
    assert "griewank" in printed
    assert "memonger" not in printed


def test_a_pipe_gets_the_result_and_nothing_else() -> None:
    done = _process("plan", "nets:symbol", "--shape", "data=2,6", *QUICK, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["status"] == "feasible"
    assert done.stderr == "a print of the user's\n"


def test_a_reader_that_leaves_early_is_told_nothing() -> None:
    command = f"{sys.executable} -m memplan strategies"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # Python's own complaint at its exit would be of what is still to be flushed.
    assert (done.returncode, done.stderr) == (7, "")


STUCK = """
    import hashlib
    from dataclasses import dataclass
    import memplan, mxnet as mx

    @dataclass(frozen=True)
    class Stuck:
        "Never returns to Python, like a solver."
        def solve(self, graph, budget_nbytes):
            print("solving", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)

    memplan.strategies.register("stuck", Stuck)

    def net():
        hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="fc")
        return mx.sym.SoftmaxOutput(hidden, name="softmax")
"""


def test_the_second_interrupt_ends_even_a_solver_in_c() -> None:
    Path("stuck.py").write_text(textwrap.dedent(STUCK), encoding="utf-8")
    arguments = ["plan", "stuck:net", "--shape", "data=2,6", "--strategy", "stuck", "-o", "out"]
    process = subprocess.Popen(
        [sys.executable, "-m", "memplan", *arguments, "--budget", "99%"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "solving\n"
        time.sleep(0.5)  # by then it is in C
        process.send_signal(signal.SIGINT)
        assert "again" in process.stderr.readline()
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert time.monotonic() - begin < 15
        assert "Interrupted" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
    assert not Path("out").exists()


def test_a_warning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    assert cli.run(["plan", *NET, *QUICK, "-o", "out.json"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "MIRROR" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("Warning: MXNET_BACKWARD_DO_MIRROR")


def test_an_interrupt_has_its_code(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memplan, "plan", interrupt)
    assert error(130, "plan", *NET) == "Interrupted.\n"


def test_what_was_found_before_an_interrupt_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = memplan.plan

    def interrupted(*arguments: Any, **options: Any) -> memplan.Plan:
        found = plan(*arguments, **options)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return found
        raise AssertionError

    monkeypatch.setattr(memplan, "plan", interrupted)
    assert cli.run(["plan", *NET, *QUICK, "-o", "out.json", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["output"] == "out.json"
    assert Path("out.json").exists()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_incumbent_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with cli_progress.working("planning"):
        tell("checkmate")
        tell("", incumbent_seconds=1.25, unplanned_seconds=1.0)
        tell("", bound_seconds=1.125, unplanned_seconds=1.0)
        time.sleep(0.3)
    assert "planning: checkmate, best +25.0%, bound +12.5%" in screen.getvalue()
    assert not LOGGER.handlers
    assert LOGGER.level == logging.NOTSET


def test_news_begin_anew_with_every_search() -> None:
    shown: list[str] = []
    news = cli_progress.News(shown.append)
    for extra in ({}, {"incumbent_seconds": 0.002}, {"bound_seconds": 0.001}):
        news.handle(logging.makeLogRecord({"msg": "row 1", **extra}))
    news.handle(logging.makeLogRecord({"msg": "row 2"}))
    assert shown == ["row 1", "row 1, best 2 ms", "row 1, best 2 ms, bound 1 ms", "row 2"]


def test_a_pipe_sees_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with cli_progress.working("planning"):
        tell("checkmate")
    assert capsys.readouterr() == ("", "")


COMMANDS = sorted(cli.cli.commands)


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_help_has_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*filter(None, [name]), "--help"]) == 0
    text = capsys.readouterr().out.replace("\\\n", " ")
    examples = re.findall(r"^ +memplan (.+)$", text, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        command, *arguments = shlex.split(example)
        cli.cli.commands[command].make_context(command, arguments)
    if name:
        assert "Keys of --json:" in text
    else:
        assert all(f"{int(code):5}  " in text for code in cli_output.Exit)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", *NET, *QUICK],
        ["compare", *NET, "--strategies", "store_all", "--budgets", "least"],
        ["frontier", *NET, *QUICK, "--budgets", "2"],
        ["explain", *NET, *QUICK],
        ["explain", *NET, *QUICK, "unit0_conv1"],
        ["max-batch", "net-symbol.json", "--shape", "data=N,3,8,8", *QUICK, "--budget", "1MiB"],
        ["profile", *NET, "--repeats", "1", "--warmup", "0"],
        ["strategies"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_help_names_every_key_of_the_json(
    arguments: list[str], result: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    said = result(*arguments)
    found = set(said)
    for key, value in said.items():
        if key in ("planned", "unplanned"):
            found |= set(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            found |= set(value[0])
    cli.run([arguments[0], "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out.partition("Keys of --json:")[2]))
    assert found <= words


@pytest.mark.parametrize(
    ("strategy", "realisation"),
    [("checkmate", "mirror"), ("checkmate", "explicit"), ("auto", "explicit")],
)
def test_searches_tell_their_best_and_their_bound(
    strategy: str, realisation: str, caplog: pytest.LogCaptureFixture
) -> None:
    symbol, _ = residual_net(units=2)
    with caplog.at_level(logging.INFO, logger="memplan"):
        made = memplan.plan(
            symbol,
            strategy=strategy,
            realisation=realisation,
            budget="90%",
            time_limit=3,
            data=(2, 3, 8, 8),
        )
    records = [record.__dict__ for record in caplog.records]
    assert records[0]["message"].startswith(strategy)
    unplanned = made.unplanned.seconds
    for name in ("incumbent_seconds", "bound_seconds"):
        told = [record[name] for record in records if record[name] is not None]
        assert told
        assert all(0.99 * unplanned <= seconds < 2 * unplanned for seconds in told)
