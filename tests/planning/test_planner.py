"""From a network and a budget to a plan: its figures and bounds, and the forms of arguments."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.networks import hinted_resnet, residual_net
from helpers.planning import NEVER_SECONDS, ROOFLINE, NoDataclass, flagged, quick
from memplan.errors import ArgumentError, CostError
from memplan.mxnet.realise.measure import reported_mib
from memplan.mxnet.trace.build import trace
from memplan.planning import attempt_json
from memplan.planning.attempt import bounded, budget_error, try_strategy
from memplan.planning.job import Job
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Outcome, Problem, Status
from memplan.strategies.evict import Evict
from memplan.strategies.search import Search
from memplan.strategies.spaces.flags import Flags
from memplan.util.stop import Stop

pytestmark = pytest.mark.usefixtures("little_time_to_look_for_the_least")


def test_figures_agree_with_each_other_and_with_mxnet(network: Any) -> None:
    plan = quick(network, budget=0.6, reserve="1MiB")
    net, shapes = network
    traced = trace(net, shapes=shapes)
    assert plan.total_nbytes == plan.fixed_nbytes + plan.allocated_nbytes + (1 << 20)
    assert plan.total_nbytes <= plan.budget_nbytes == int(plan.unplanned.total_nbytes * 0.6)
    assert plan.allocated_nbytes >> 20 == reported_mib(plan.symbol, traced)
    assert plan.unplanned.allocated_nbytes >> 20 == reported_mib(net, traced)
    assert plan.peak_nbytes == simulate(plan.schedule).peak_nbytes <= plan.allocated_nbytes
    assert plan.overhead == pytest.approx(plan.schedule.seconds / plan.unplanned.seconds - 1)
    assert 0 < plan.overhead < 1
    assert flagged(plan.symbol) >= {
        plan.schedule.graph.ops[op].name for op in plan.schedule.recomputed
    }


def test_a_time_limit_does_not_count_what_compiling_takes(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, hours = time.monotonic, [0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + 3600.0 * hours[0])
    monkeypatch.setattr(Flags, "prepare", lambda _: hours.append(hours.pop() + 1))
    net, shapes = network
    job = Job.prepare(net, time_limit=600.0, **shapes)
    attempt = try_strategy(job, Search(rounds=1), job.unplanned.total_nbytes * 3 // 4)
    assert attempt.plan is not None
    assert not attempt.cut_by_clock
    assert hours[0] > 0


@pytest.mark.parametrize("budget", ["60%", 0.6, "16MiB", 16 << 20])
def test_forms_of_a_budget(network: Any, budget: Any) -> None:
    plan = quick(network, budget=budget)
    expected = 16 << 20 if budget in ("16MiB", 16 << 20) else int(plan.unplanned.total_nbytes * 0.6)
    assert plan.budget_nbytes == expected
    assert plan.total_nbytes <= expected


def test_without_a_budget_it_is_the_least_memory(network: Any) -> None:
    plan = quick(network)
    assert plan.budget_nbytes is None
    assert plan.lower_bound_overhead is None
    assert plan.allocated_nbytes < 0.6 * plan.unplanned.allocated_nbytes


def test_a_budget_that_the_step_fits_needs_no_plan(network: Any) -> None:
    plan = quick(network, budget=1.0, strategy="memonger")
    assert plan.status is Status.OPTIMAL
    assert not plan.schedule.recomputed
    assert plan.overhead == 0
    assert plan.lower_bound_overhead == 0


def test_the_users_symbol_is_left_alone_and_old_flags_are_forgotten() -> None:
    net, shapes = residual_net()
    data = json.loads(net.tojson())
    for node in data["nodes"]:
        node.setdefault("attrs", {})["__force_mirroring__"] = "True"
    net = mx.sym.load_json(json.dumps(data))
    before = net.tojson()
    planned = memplan.search_plan(net, strategy="store_all", **shapes)
    assert net.tojson() == before
    assert not flagged(planned)


def test_memongers_call_is_taken_as_it_is() -> None:
    net, shapes = hinted_resnet()
    for symbol in (
        memplan.search_plan(net, ntrial=6, type_dict=None, **shapes),
        memplan.search_plan(net, 6, None, **shapes),
        memplan.search_plan(net, 6, strategy=memplan.strategies.create("memonger"), **shapes),
    ):
        assert flagged(symbol)
        hints = [n for n in symbol.attr_dict().values() if "__mirror_stage__" in n]
        assert hints


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating", "auto"])
def test_the_symbol_for_any_script_is_that_of_a_mirror_plan(realisation: str) -> None:
    net, shapes = residual_net()
    with pytest.raises(ArgumentError, match=r"any training script.* Leave realisation out; or"):
        memplan.search_plan(net, realisation=realisation, **shapes)
    symbol = memplan.search_plan(net, realisation="mirror", strategy="store_all", **shapes)
    assert symbol.list_outputs() == net.list_outputs()
    with pytest.raises(ArgumentError, match="no realisation 'mirrored'"):
        memplan.search_plan(net, realisation="mirrored", **shapes)


def test_shapes_may_come_from_the_variables() -> None:
    net = mx.sym.Variable("data", shape=(8, 20))
    for width in (32, 32, 10):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=width), act_type="tanh")
    plan = memplan.plan(mx.sym.SoftmaxOutput(net, name="softmax"), strategy="store_all")
    assert plan.unplanned.allocated_nbytes > 0


def test_half_precision_is_counted_as_it_is(network: Any) -> None:
    full = quick(network, strategy="store_all")
    half = quick(network, strategy="store_all", type_dict={"data": "float16"})
    assert half.allocated_nbytes == pytest.approx(full.allocated_nbytes / 2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "function", "options"),
    [
        ("seed", memplan.plan, {}),
        ("ctx", memplan.search_plan, {}),
        ("ntrial", memplan.search_plan, {}),
        ("budgets", memplan.compare, {}),
        ("costs", memplan.frontier, {}),
        ("gap", memplan.max_batch_size, {"budget": "1GiB"}),
    ],
)
def test_an_input_that_is_called_as_an_option_is(name: str, function: Any, options: Any) -> None:
    net = mx.sym.MakeLoss(mx.sym.FullyConnected(mx.sym.Variable(name), num_hidden=2))
    shape = ("N" if options else 8, 3)
    with pytest.raises(ArgumentError, match=rf"{name}=.* an option .* rename the input"):
        function(net, **{name: shape}, **options)


def test_gradients_are_those_that_grad_req_asks_for() -> None:
    net, shapes = residual_net()
    default = memplan.plan(net, strategy="store_all", **shapes)
    everything = memplan.plan(net, strategy="store_all", grad_req="write", **shapes)
    inputs = 4 * math.prod(shapes["data"]) + 4 * shapes["data"][0]
    assert everything.fixed_nbytes - default.fixed_nbytes == inputs
    one = {"data": "write"}
    assert memplan.plan(net, strategy="store_all", grad_req=one, **shapes).fixed_nbytes < (
        default.fixed_nbytes
    )


def test_the_summary_says_what_a_person_wants_to_know(network: Any) -> None:
    plan = quick(network, budget=0.75, strategy="checkmate:effort=0.05")
    text = str(plan)
    assert text.startswith("Fits in ")
    assert f"{plan.overhead:+.1%}" in text
    assert "unplanned" in text
    assert "checkmate" in text
    assert "roofline:v100" in text


def test_compare_gives_a_row_for_every_strategy_and_budget(network: Any) -> None:
    net, shapes = network
    strategies = ("memonger", "store_all")
    table = memplan.compare(
        net, strategies=strategies, budgets=(0.6, None), costs=ROOFLINE, **shapes
    )
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [row["strategy"] for row in rows] == [*strategies, *strategies]
    assert [row["status"] for row in rows] == ["feasible", "no plan found", "feasible", "feasible"]
    assert int(rows[0]["total_nbytes"]) <= int(rows[0]["budget_nbytes"])
    assert rows[1]["total_nbytes"] == ""
    assert [row["budget_nbytes"] == "" for row in rows] == [False, False, True, True]
    planned = [attempt.plan for attempt in table.rows]
    for row, plan in zip(rows, planned, strict=True):
        if plan is not None:
            assert int(row["total_nbytes"]) == plan.total_nbytes
            assert int(row["allocated_nbytes"]) == plan.allocated_nbytes
            assert int(row["peak_nbytes"]) == plan.peak_nbytes
            parts = ("allocated", "fixed", "optimizer", "workspace", "reserve")
            assert sum(int(row[f"{part}_nbytes"]) for part in parts) == plan.total_nbytes
            assert float(row["overhead"]) == pytest.approx(plan.overhead, abs=1e-6)
    lines = str(table).splitlines()
    assert lines[0].split() == list(table.HEADER)
    assert [line.split()[0] for line in lines[1:]] == [*strategies, *strategies]
    assert "no plan found" in lines[2]
    assert "least" in lines[3]
    assert f"{planned[0].overhead:.1%}" in lines[1]


def test_numpys_numbers_will_do(network: Any, tmp_path: Path) -> None:
    options = {
        "time_limit": np.int64(50),
        "max_overhead": np.float32(0.5),
        "budget": np.float32(0.75),
        "reserve": np.int64(0),
        "cache": tmp_path,
    }
    plan = quick(network, strategy="chen_sqrt", **options)
    assert plan.schedule == quick(network, strategy="chen_sqrt", budget=0.75).schedule
    for name in ("time_limit", "max_overhead"):
        with pytest.raises(ArgumentError, match=f"^{name} must be"):
            quick(network, **{name: True})


@pytest.mark.parametrize("name", ["strategies", "budgets"])
def test_nothing_to_compare(network: Any, name: str) -> None:
    net, shapes = network
    with pytest.raises(ArgumentError, match=f"^{name}: none is named"):
        memplan.compare(net, **{name: ()}, **shapes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": b"auto"}, "strategy must be a name"),
        ({"strategies": "memonger", "budgets": b"60%"}, "the budget b'60%' cannot be used"),
        ({"strategies": np.array(0.8)}, "strategy must be a name"),
        ({"strategies": [mx.sym.Variable("data")]}, "strategy must be a name"),
        ({"strategies": "memonger", "budgets": np.array(0.8)}, "the budget array.* cannot be used"),
        ({"budgets": [mx.sym.Variable("data")]}, "the budget <Symbol data> cannot be used"),
        ({"executor": 10**5000}, "executor must be a.* bits"),
    ],
)
def test_what_is_no_list_or_is_one_of_other_things_cannot_be_compared(
    network: Any, options: dict[str, Any], message: str
) -> None:
    """Bytes would be read as one whole number after the other."""
    net, shapes = network
    with pytest.raises(ArgumentError, match=message):
        memplan.compare(net, **options, **shapes)


def test_compare_takes_a_single_strategy_and_budget(network: Any) -> None:
    net, shapes = network
    for budget in (0.9, "90%", None):
        table = memplan.compare(net, strategies="memonger", budgets=budget, **shapes)
        assert [row.strategy for row in table.rows] == ["memonger"]
        assert (table.rows[0].budget_nbytes is None) == (budget is None)


def test_an_environment_that_undoes_plans_is_said(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    with pytest.warns(UserWarning, match="MXNET_BACKWARD_DO_MIRROR"):
        quick(network, strategy="store_all", budget=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for realisation in ("packed", "explicit"):  # which it does not undo
            quick(network, realisation=realisation, strategy="store_all", budget=1.0)


def test_every_plan_has_a_bound_that_holds_for_all(network: Any) -> None:
    for realisation, strategy in (("mirror", "memonger"), ("explicit", "chen_greedy")):
        plan = quick(network, realisation=realisation, strategy=strategy, budget=0.7)
        assert plan.lower_bound_overhead is not None
        assert 0.0 < plan.lower_bound_overhead <= plan.overhead
        assert plan.lower_bound == plan.lower_bound_overhead


@pytest.mark.long
def test_what_is_proved_in_order_only_is_said_to_be(network: Any) -> None:
    net, shapes = network
    job = Job.prepare(net, realisation="explicit", costs=ROOFLINE, **shapes)
    limit = int(0.8 * simulate(Schedule.unplanned(job.graph)).peak_nbytes)
    schedule = Evict(patience=20).solve(Problem(job.graph, limit)).schedule
    assert schedule is not None
    budget = job.holds(schedule)
    in_order = NoDataclass(Outcome(Status.FEASIBLE, schedule, schedule.seconds, in_order=True))
    made = try_strategy(job, in_order, budget).plan
    assert made is not None
    assert made.bound_in_order
    assert "no plan that keeps the order of the ops in every stage within" in str(made)
    text = attempt_json.to_json(try_strategy(job, in_order, budget))
    plan = attempt_json.from_json(job, text).plan
    assert plan is not None
    assert plan.bound_in_order
    impossible = NoDataclass(Outcome(Status.INFEASIBLE, in_order=True))
    attempt = try_strategy(job, impossible, budget)
    assert "no plan that keeps the order of the ops in every stage fits" in str(
        budget_error(job, attempt, impossible)
    )
    anyhow = NoDataclass(Outcome(Status.FEASIBLE, schedule))
    plain = try_strategy(job, anyhow, budget).plan
    assert plain is not None
    assert not plain.bound_in_order


def test_a_plan_that_costs_no_more_than_the_bound_is_optimal(network: Any) -> None:
    net, shapes = network
    job = Job.prepare(
        net, realisation="explicit", costs=ROOFLINE, time_limit=NEVER_SECONDS, **shapes
    )
    limit = int(0.8 * simulate(Schedule.unplanned(job.graph)).peak_nbytes)
    problem = Problem(job.graph, limit)
    outcome = NoDataclass(Evict(patience=20).solve(problem))
    assert outcome.answer.status is Status.FEASIBLE
    stop = Stop(0.0)  # a part of the time limit is for the bound in any case
    assert bounded(job, outcome, problem, outcome.answer, stop).status is Status.OPTIMAL
    longer = Schedule.sequence(job.graph, [*outcome.answer.schedule.ops, 0])
    dearer = Outcome(Status.FEASIBLE, longer)
    assert bounded(job, outcome, problem, dearer, stop).status is Status.FEASIBLE


def test_a_gpu_that_is_not_here_can_be_planned_for_by_a_roofline() -> None:
    if mx.context.num_gpus():
        pytest.skip("there is a GPU")
    net, shapes = residual_net()
    with pytest.raises(CostError, match="pass costs='roofline:v100'"):
        memplan.plan(net, ctx=mx.gpu(0), strategy="store_all", **shapes)
    plan = memplan.plan(net, ctx=mx.gpu(0), costs=ROOFLINE, strategy="store_all", **shapes)
    assert plan.costs == ROOFLINE


def test_one_strategy_is_compared_as_a_list_of_one_is() -> None:
    net, shapes = residual_net(units=1)
    strategy = memplan.strategies.create("store_all")
    [row] = memplan.compare(net, strategies=strategy, budgets=1.0, **shapes).rows
    assert row.plan is not None
    with pytest.raises(ArgumentError, match="strateg"):
        memplan.compare(net, strategies=3, **shapes)


@pytest.mark.parametrize("realisation", ["mirror", "explicit", "packed", "updating"])
def test_plans_that_are_equal(realisation: str) -> None:
    """Their Symbols cannot be compared, and how long each took says nothing of it."""
    network = residual_net(batch=2, size=8, units=2, filters=2)
    how = {"strategy": "chen_sqrt", "realisation": realisation}
    plan = quick(network, **how)
    assert plan == quick(network, **how) == pickle.loads(pickle.dumps(plan))
    assert plan == copy.deepcopy(plan)
    assert len({plan, quick(network, **how), pickle.loads(pickle.dumps(plan))}) == 1
    assert plan != quick(network, **how, budget="1GiB")
    assert plan != quick(network, strategy="store_all", realisation=realisation)
