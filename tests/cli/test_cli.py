"""The commands: their results are those of the Python calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.command_line import MIRROR, NET, QUICK, SHAPE
from helpers.networks import residual_net
from helpers.planning import flagged
from memplan.cli import main as cli
from memplan.cli.output import Exit
from memplan.mxnet.load import load_network
from memplan.mxnet.plan_file import load_plan, plan_text


def test_plan_writes_the_network_and_says_what_python_says(result: Any) -> None:
    said = result("plan", *NET, *QUICK, *MIRROR, "--reserve", "1KiB", "-o", "planned.json")
    symbol, _ = residual_net(units=2)
    plan = memplan.plan(symbol, strategy="chen_sqrt", reserve="1KiB", data=(2, 3, 8, 8))
    assert mx.sym.load("planned.json").tojson() == plan.symbol.tojson()
    assert flagged(plan.symbol) == set(said["recomputed"])
    assert len(said["recomputed"]) > 3
    assert said["planned"]["total_nbytes"] == plan.total_nbytes
    assert said["planned"]["reserve_nbytes"] == 1024
    assert said["unplanned"]["allocated_nbytes"] == plan.unplanned.allocated_nbytes
    assert said["overhead"] == plan.overhead
    assert said["budget_nbytes"] is said["report"] is None
    assert (said["status"], said["strategy"]) == ("feasible", "chen_sqrt")
    assert said["output"] == "planned.json"


def test_the_planned_network_trains_as_before(result: Any) -> None:
    result("plan", *NET, *QUICK, *MIRROR, "-o", "planned.json")
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
    assert said["realisation"] == "packed"
    assert "MXNet holds more" not in page


def test_a_mirrored_plan_s_report_says_what_mxnet_holds(result: Any) -> None:
    result("plan", *NET, *QUICK, *MIRROR, "--report", "report.html")
    page = Path("report.html").read_text(encoding="utf-8")
    assert "MXNet holds more, as its blocks neither split nor merge" in page


@pytest.mark.parametrize(
    ("text", "budget"),
    [("0.9", 0.9), ("90%", "90%"), ("1.0", 1.0), ("190 KiB", "190 KiB"), ("least", None)],
)
def test_budgets(text: str, budget: Any, result: Any) -> None:
    said = result("plan", *NET, "--strategy", "chen_greedy", "--budget", text)
    symbol, _ = residual_net(units=2)
    options = {"strategy": "chen_greedy", "realisation": "auto", "data": (2, 3, 8, 8)}
    plan = memplan.plan(symbol, budget=budget, **options)
    assert said["budget_nbytes"] == plan.budget_nbytes
    assert said["planned"]["total_nbytes"] == plan.total_nbytes


def test_what_to_do_next_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        assert cli.run(["plan", *arguments, *QUICK]) == 0
        return capsys.readouterr().err

    assert "-o FILE" in said(*NET)
    assert "mx.mod.Module(mx.sym.load('out.json'))" in said(*NET, *MIRROR, "-o", "out.json")
    packed = said(*NET, "-o", "out.json")
    assert "Module(mx.sym.load('net-symbol.json'), plan=load_plan('out.json'))" in packed
    block = said("nets:block", "--shape", "data=2,6")
    assert "from memplan.mxnet.gluon import TrainStep" in block
    assert "TrainStep(block, strategy=" in block
    body = mx.sym.load("net-symbol.json").get_internals()["scores_output"]
    body.save("body.json")
    assert "scores_output is no loss" in said("body.json", *SHAPE, *MIRROR, "-o", "out.json")


def test_an_explicit_plan_is_a_file_that_module_trains_by(
    result: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    explicit = (*NET, *QUICK, "--realisation", "explicit", "--grad-req", "first_*=null")
    said = result("plan", *explicit, "-o", "plan.json")
    plan = load_plan("plan.json")
    assert plan.total_nbytes == said["planned"]["total_nbytes"]
    assert plan.unplanned.seconds == said["unplanned"]["seconds"]
    assert plan.overhead == said["overhead"] > 0
    assert plan.trace.grad_req["first_weight"] == "null"
    assert plan_text(plan) == Path("plan.json").read_text(encoding="utf-8")

    module = memplan.mxnet.Module(
        mx.sym.load("net-symbol.json"), plan=plan, fixed_param_names=["first_weight"]
    )
    module.bind([("data", (2, 3, 8, 8))], [("softmax_label", (2,))])
    assert module.plan is plan

    assert cli.run(["explain", "plan.json"]) == 0
    assert "The peak of live activations" in capsys.readouterr().out


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
    assert result("plan", "nets:symbol", *QUICK, "--shape", "data=2,6")["realisation"] == "packed"
    said = result("plan", "nets:block", *QUICK, "--shape", "data=2,6")
    assert said["realisation"] == "packed"
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


def test_a_block_of_numpy_and_its_loss_are_planned(result: Any) -> None:
    shapes = ("--shape", "data=2,6", "--shape", "label=2")
    with mx.util.np_shape(True), mx.util.np_array(True):
        assert result("plan", "nets:frozen", *QUICK, *shapes)["realisation"] == "packed"


def test_a_module_of_the_folder_is_not_taken_for_one_of_python(result: Any) -> None:
    """The process that plans imports what this one has imported already."""
    sys.path[:] = filter(None, sys.path)
    Path("random.py").write_text("raise SystemExit('of the user')\n", encoding="utf-8")
    assert result("plan", "nets:symbol", *SHAPE, *QUICK)["status"] == "feasible"
    assert sys.path[-1] == ""


def test_every_network_is_looked_for_in_the_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the first one of a process, after which the folder is in the path, and last."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "others.py").write_text("raise ImportError('not this one')\n", encoding="utf-8")
    Path("others.py").write_text("from nets import symbol\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(elsewhere), *filter(None, sys.path)])
    monkeypatch.delitem(sys.modules, "others", raising=False)
    shapes = {"data": (2, 3, 8, 8)}
    load_network("nets:symbol", shapes=shapes)
    assert load_network("others:symbol", shapes=shapes).symbol.list_arguments()
    assert sys.path[0] == str(elsewhere)


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


@pytest.mark.long
def test_compare_takes_by_itself_what_the_realisation_has(result: Any) -> None:
    shapes = ("--shape", "data=2,6", "--time-limit", "0.1", "--budgets", "1MiB")
    rows = result("compare", "nets:block", *shapes)["rows"]
    found = {row["strategy"] for row in rows}
    assert found == {"memonger", "chen_greedy", "auto"}


def test_frontier(result: Any) -> None:
    rows = result("frontier", *NET, *MIRROR, "--strategy", "chen_greedy", "--budgets", "3")["rows"]
    totals = [row["total_nbytes"] for row in rows]
    assert len(totals) > 1
    assert totals == sorted(totals, reverse=True)
    assert rows[0]["overhead"] == 0
    chosen = result("frontier", *NET, *MIRROR, "--strategy", "chen_greedy", "--budgets", "90%,80%")[
        "rows"
    ]
    assert {row["budget_nbytes"] for row in chosen[1:]} <= {
        int(0.9 * totals[0]),
        int(0.8 * totals[0]),
    }


def test_a_frontier_whose_budgets_have_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["frontier", *NET, *MIRROR, "--strategy", "chen_greedy", "--budgets", "5000"]
    assert cli.run([*command, "--json"]) == Exit.PROVED
    figures = json.loads(capsys.readouterr().out)
    assert [row["strategy"] for row in figures["rows"]] == ["store_all"]
    assert [(row["budget_nbytes"], row["status"]) for row in figures["left_out"]] == [
        (5000, "infeasible")
    ]
    assert cli.run([*command[:-1], "5000,90%"]) == Exit.OK
    assert "without a plan: 4.88 KiB (infeasible)" in capsys.readouterr().out


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


@pytest.mark.parametrize("share", ["0", "0%"])
def test_max_batch_names_its_own_option(error: Any, share: str) -> None:
    network = ("net-symbol.json", "--shape", "data=N,3,8,8", "--strategy", "chen_greedy")
    least = memplan.plan(residual_net(units=2)[0], strategy="chen_greedy", data=(1, 3, 8, 8))
    options = ("--budget", str(least.total_nbytes), "--max-overhead", share, *MIRROR)
    said = error(4, "max-batch", *network, *options)
    assert "max_overhead" not in said
    assert "aise --max-overhead" in said


def test_max_batch_of_a_network_with_parameters(result: Any) -> None:
    symbol = mx.sym.load("net-symbol.json")
    shapes, _, _ = symbol.infer_shape(data=(1, 3, 8, 8))
    shape_of = dict(zip(symbol.list_arguments(), shapes, strict=True))
    mx.nd.save("net-0001.params", {"arg:scores_weight": mx.nd.zeros(shape_of["scores_weight"])})
    network = ("net-symbol.json", "--shape", "data=N,3,8,8")
    assert result("max-batch", *network, *QUICK, "--budget", "300KiB")["batch_size"] > 2


def test_a_mirrored_network_is_explained_anew_which_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def said(*arguments: str) -> str:
        assert cli.run(["explain", *arguments, *SHAPE, *QUICK]) == 0
        return capsys.readouterr().err

    assert cli.run(["plan", *NET, *QUICK, *MIRROR, "-o", "mirrored.json"]) == 0
    assert flagged(mx.sym.load("mirrored.json"))
    assert "new one" not in said(NET[0])
    assert "mirrored.json is a Symbol with flags of a mirror plan" in said("mirrored.json")


def test_explain(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = result("explain", *NET, *QUICK)
    assert sum(tensor["nbytes"] for tensor in said["alive"]) == said["peak_nbytes"]
    assert said["plan"]["planned"]["peak_nbytes"] == said["peak_nbytes"]
    assert {tensor["role"] for tensor in said["alive"]} & {"kept", "recomputed"}
    name = said["plan"]["recomputed"][0]
    assert "ecomputed at step" in result("explain", *NET, *QUICK, name)["reason"]
    assert cli.run(["explain", *NET, "--strategy", "store_all", name]) == 0
    assert "kept" in capsys.readouterr().out
    assert cli.run(["explain", *NET, *QUICK]) == 0
    assert "\n\nBeside activations: arguments and other gradients " in capsys.readouterr().out


def _graph(costs: memplan.CostTable) -> memplan.TrainingGraph:
    symbol, _ = residual_net(units=2)
    plan = memplan.plan(symbol, strategy="store_all", costs=costs, data=(2, 3, 8, 8))
    return plan.schedule.graph


@pytest.mark.long
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
    # Which ten of the sixteen ops are the most expensive, the clock decides.
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " ms  " in line]
    assert len(rows) == 10
    assert {row[2] for row in rows} <= {json.loads(signature)[0] for signature in table.seconds}
    assert [float(row[0]) for row in rows] == sorted((float(row[0]) for row in rows), reverse=True)


def test_a_strategy_that_is_no_dataclass_is_listed(
    result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain:
        """A plain one."""

        def solve(self, problem: Any) -> Any:
            raise AssertionError(problem)

    monkeypatch.setattr(memplan.strategies, "_rows", dict(memplan.strategies._rows))
    memplan.strategies.register("plain", Plain)
    rows = [row for row in result("strategies")["strategies"] if row["name"] == "plain"]
    assert {(row["summary"], *row["options"]) for row in rows} == {("A plain one.",)}


def test_strategies_lists_the_registry(result: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = result("strategies")["strategies"]
    for kind in memplan.strategies.REALISATIONS:
        names = [row["name"] for row in rows if row["realisation"] == kind]
        assert names == list(memplan.strategies.names(kind))
    assert all(row["summary"] and "`" not in row["summary"] for row in rows)
    options = next(row for row in rows if row["name"] == "search")["options"]
    assert options["seed"] == "0"
    assert "start" not in options  # no schedule can stand behind the name
    assert cli.run(["strategies", "--realisation", "mirror"]) == 0
    printed = capsys.readouterr().out
    assert "memonger" in printed
    assert "griewank" not in printed
