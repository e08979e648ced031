"""From a network and a budget to a plan: figures, forms of arguments, and every way to be wrong."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.graphs import unit_chain
from helpers.networks import hinted_resnet, residual_net, two_headed_net
from memplan.errors import ArgumentError, BudgetError, CostError, ScheduleError, TraceError
from memplan.mxnet.realise.measure import reported_mib
from memplan.mxnet.trace.build import trace
from memplan.planning import record
from memplan.planning.job import Job
from memplan.programs.moments import Moments
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Outcome, Status
from memplan.strategies.evict import Evict
from memplan.util.nbytes import format_nbytes

ROOFLINE = "roofline:v100"


@pytest.fixture(scope="module")
def network() -> tuple[mx.sym.Symbol, dict[str, tuple[int, ...]]]:
    return residual_net(batch=16, size=32, units=6, filters=16)


@pytest.fixture(autouse=True)
def little_time_to_look_for_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.job.LOWEST_SECONDS", 0.5)


def quick(network: Any, **options: Any) -> memplan.Plan:
    net, shapes = network
    options = {"strategy": "anneal", "time_limit": 1, "costs": ROOFLINE} | options
    return memplan.plan(net, **options, **shapes)


def flagged(symbol: mx.sym.Symbol) -> set[str]:
    nodes = json.loads(symbol.tojson())["nodes"]
    return {n["name"] for n in nodes if n.get("attrs", {}).get("__force_mirroring__") == "True"}


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


@pytest.mark.parametrize("budget", ["60%", 0.6, "16MiB", 16 << 20])
def test_forms_of_a_budget(network: Any, budget: Any) -> None:
    plan = quick(network, budget=budget)
    expected = 16 << 20 if budget in ("16MiB", 16 << 20) else int(plan.unplanned.total_nbytes * 0.6)
    assert plan.budget_nbytes == expected
    assert plan.total_nbytes <= expected


def test_without_a_budget_it_is_the_least_memory(network: Any) -> None:
    plan = quick(network)
    assert plan.budget_nbytes is None
    assert plan.lower_bound is None
    assert plan.allocated_nbytes < 0.6 * plan.unplanned.allocated_nbytes


def test_a_budget_that_the_step_fits_needs_no_plan(network: Any) -> None:
    plan = quick(network, budget=1.0, strategy="memonger")
    assert plan.status is Status.OPTIMAL
    assert not plan.schedule.recomputed
    assert plan.overhead == 0
    assert plan.lower_bound == 0


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
    ):
        assert flagged(symbol)
        hints = [n for n in symbol.attr_dict().values() if "__mirror_stage__" in n]
        assert hints


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
    plan = quick(network, budget=0.6, strategy="checkmate", time_limit=2)
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
            assert float(row["overhead"]) == pytest.approx(plan.overhead, abs=1e-6)
    lines = str(table).splitlines()
    assert lines[0].split() == list(table.HEADER)
    assert [line.split()[0] for line in lines[1:]] == [*strategies, *strategies]
    assert "no plan found" in lines[2]
    assert "least" in lines[3]
    assert f"{planned[0].overhead:.1%}" in lines[1]


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


@pytest.mark.parametrize(
    ("attrs", "changed"),
    [
        ({}, True),
        ({"cudnn_off": True}, False),
        ({"use_global_stats": True}, False),
        ({"eps": 1e-3}, True),
    ],
)
def test_batch_norm_on_cudnn_gets_the_root_of_its_momentum(
    attrs: dict[str, Any], changed: bool
) -> None:
    net = mx.sym.Variable("data")
    for i in range(6):
        net = mx.sym.Convolution(net, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{i}")
        net = mx.sym.BatchNorm(net, momentum=0.81, name=f"norm{i}", **attrs)
        net = mx.sym.Activation(net, act_type="relu", name=f"relu{i}")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    plan = memplan.plan(
        net, strategy="memonger", costs=ROOFLINE, ctx=mx.gpu(0), data=(8, 3, 16, 16)
    )
    norms = [n for n in json.loads(plan.symbol.tojson())["nodes"] if n["op"] == "BatchNorm"]
    flags = [n["attrs"].get("__force_mirroring__") == "True" for n in norms]
    assert len(norms) == 6
    assert any(flags)
    for norm, is_flagged in zip(norms, flags, strict=True):
        expected = 0.9 if changed and is_flagged else 0.81
        assert float(norm["attrs"]["momentum"]) == pytest.approx(expected)


@dataclass(frozen=True)
class OnlyThePeak:
    """Minds live bytes only, so that MXNet's blocks exceed what it was asked for."""

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        candidates = flaggable(graph)
        for kept in range(len(candidates), 0, -1):
            schedule = mirror(graph, frozenset(candidates[:: max(1, kept)]))
            if budget_nbytes is None or simulate(schedule).peak_nbytes <= budget_nbytes:
                return Outcome(Status.OPTIMAL, schedule, graph.seconds)
        return Outcome(Status.INFEASIBLE)


def test_a_plan_that_mxnet_places_beyond_the_budget_is_tightened(network: Any) -> None:
    unplanned = quick(network, strategy="store_all").unplanned
    held = unplanned.fixed_nbytes
    budget = held + (unplanned.peak_nbytes + unplanned.allocated_nbytes) // 2
    plan = quick(network, strategy=OnlyThePeak(), budget=budget)
    assert plan.total_nbytes <= budget
    # The strategy called its answer to the tightened question optimal; of the true one it is not.
    assert plan.status is Status.FEASIBLE


def half_of_the_ops(graph: TrainingGraph) -> frozenset[int]:
    candidates = flaggable(graph)
    return frozenset(candidates[: len(candidates) // 2])


class NoDataclass:
    """The least that a strategy must be."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Any:
        if self.answer is not None:
            return self.answer
        return Outcome(Status.FEASIBLE, mirror(graph, half_of_the_ops(graph)))


def test_a_strategy_need_not_be_a_dataclass(network: Any) -> None:
    plan = quick(network, strategy=NoDataclass())
    assert plan.strategy == "NoDataclass"
    assert frozenset(plan.schedule.recomputed) == half_of_the_ops(plan.schedule.graph)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (3, "must return an Outcome, but returned int"),
        (Outcome(Status.FEASIBLE, 3), "must return a Schedule of the graph"),  # type: ignore[arg-type]
        (
            Outcome(Status.FEASIBLE, Schedule.unplanned(unit_chain(3))),
            "must return a Schedule of the graph",
        ),
    ],
)
def test_what_a_strategy_may_not_return(network: Any, answer: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"strategy NoDataclass {message}"):
        quick(network, strategy=NoDataclass(answer), budget=0.6)


@dataclass(frozen=True)
class Backwards:
    """Recomputes an op right after it ran, which mirroring never does."""

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        op = flaggable(graph)[0]
        order = [*range(op + 1), op, *range(op + 1, len(graph.ops))]
        return Outcome(Status.FEASIBLE, Schedule.sequence(graph, order))


def test_a_schedule_that_mirroring_cannot_run_is_refused(network: Any) -> None:
    with pytest.raises(ScheduleError, match="no set of force_mirroring flags"):
        quick(network, strategy=Backwards(), budget=0.6)


def test_a_budget_that_cannot_be_met_names_the_lowest_that_can(network: Any) -> None:
    with pytest.raises(BudgetError, match="The lowest that memplan reaches") as caught:
        quick(network, strategy="memonger", budget=0.2)
    assert not caught.value.proved
    lowest = caught.value.lowest_nbytes
    assert lowest is not None
    assert str(lowest) in str(caught.value)
    plan = quick(network, strategy="anneal", time_limit=8, budget=int(lowest * 1.05))
    assert plan.total_nbytes <= lowest * 1.05


def test_the_lowest_that_is_named_can_be_reached() -> None:
    data = mx.sym.Variable("data")
    for layer in range(4):
        data = mx.sym.FullyConnected(data, num_hidden=64, name=f"fc{layer}")
        data = mx.sym.Activation(data, act_type="tanh", name=f"tanh{layer}")
    net = mx.sym.LinearRegressionOutput(data, name="loss")
    options: dict[str, Any] = {"reserve": 4096, "data": (512, 64)}
    fixed = memplan.plan(net, strategy="store_all", **options).fixed_nbytes
    with pytest.raises(BudgetError) as caught:
        memplan.plan(net, strategy="memonger", budget=fixed + 5000, **options)
    lowest = caught.value.lowest_nbytes
    assert lowest is not None
    plan = memplan.plan(net, strategy="brute_force", budget=lowest, **options)
    assert plan.total_nbytes == lowest
    with pytest.raises(BudgetError, match="proved") as caught:
        memplan.plan(net, strategy="brute_force", budget=lowest - 1, **options)
    assert caught.value.proved


def test_a_budget_below_what_is_fixed_is_proved_impossible(network: Any) -> None:
    with pytest.raises(BudgetError, match="proved") as caught:
        quick(network, budget=1000)
    assert caught.value.proved


@pytest.mark.parametrize("realisation", ["mirror", "explicit"])
def test_what_no_plan_can_do_without_is_named(network: Any, realisation: str) -> None:
    options = {"realisation": realisation, "strategy": "store_all"}
    plan = quick(network, **options)
    floor = Moments(plan.schedule.graph).floor
    budget = plan.fixed_nbytes + floor.nbytes - 1
    with pytest.raises(BudgetError) as caught:
        quick(network, **(options | {"budget": budget}))
    assert caught.value.proved
    assert caught.value.lowest_nbytes is not None
    assert caught.value.lowest_nbytes > budget
    message = str(caught.value)
    assert floor.op is not None
    assert f"while {plan.schedule.graph.ops[floor.op].name!r}" in message
    largest = max(plan.schedule.graph.tensors[a].nbytes for a in floor.tensors)
    names = [t.name for a, t in enumerate(plan.schedule.graph.tensors) if a in floor.tensors]
    assert any(f"{name!r} {format_nbytes(largest)}" in message for name in names)


def test_every_plan_has_a_bound_that_holds_for_all(network: Any) -> None:
    for realisation, strategy in (("mirror", "memonger"), ("explicit", "chen_greedy")):
        plan = quick(network, realisation=realisation, strategy=strategy, budget=0.7)
        assert plan.lower_bound is not None
        assert 0.0 < plan.lower_bound <= plan.overhead


def test_what_is_proved_in_order_only_is_said_to_be(network: Any) -> None:
    net, shapes = network
    job = Job.prepare(net, realisation="explicit", costs=ROOFLINE, **shapes)
    limit = int(0.8 * simulate(Schedule.unplanned(job.graph)).peak_nbytes)
    schedule = Evict(time_limit=2).solve(job.graph, limit).schedule
    assert schedule is not None
    budget = job.graph.fixed_nbytes + job.placed_nbytes(schedule)
    in_order = NoDataclass(Outcome(Status.FEASIBLE, schedule, schedule.seconds, in_order=True))
    made = job.attempt(in_order, budget).plan
    assert made is not None
    assert made.bound_in_order
    assert "keeps the order of the ops" in str(made)
    kept = record.from_json(job, record.to_json(job.attempt(in_order, budget))).plan
    assert kept is not None
    assert kept.bound_in_order
    impossible = NoDataclass(Outcome(Status.INFEASIBLE, in_order=True))
    attempt = job.attempt(impossible, budget)
    assert "no plan that keeps the order of the ops fits" in str(
        job.budget_error(attempt, impossible)
    )
    anyhow = NoDataclass(Outcome(Status.FEASIBLE, schedule))
    plain = job.attempt(anyhow, budget).plan
    assert plain is not None
    assert not plain.bound_in_order


def test_a_plan_that_costs_no_more_than_the_bound_is_optimal(network: Any) -> None:
    net, shapes = network
    job = Job.prepare(net, realisation="explicit", costs=ROOFLINE, **shapes)
    limit = int(0.8 * simulate(Schedule.unplanned(job.graph)).peak_nbytes)
    found = NoDataclass(Evict(time_limit=5).solve(job.graph, limit))
    bounded = job._bounded(found.answer, found, limit)
    assert found.answer.status is Status.FEASIBLE
    assert bounded.status is Status.OPTIMAL
    longer = Schedule.sequence(job.graph, [*found.answer.schedule.ops, 0])
    dearer = Outcome(Status.FEASIBLE, longer)
    assert job._bounded(dearer, found, limit).status is Status.FEASIBLE


def test_checkmate_proves_that_a_budget_is_impossible(network: Any) -> None:
    # One op's own output and input do not fit.
    fixed = quick(network, strategy="store_all").fixed_nbytes
    with pytest.raises(BudgetError, match="proved"):
        quick(network, strategy="checkmate", budget=fixed + (1 << 18), time_limit=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "chekmate"}, "choose from .*checkmate"),
        ({"strategy": memplan.strategies.Strategy}, "a name or an object"),
        ({"budget": "4 potatoes"}, "potatoes"),
        ({"budget": 0}, "less than one byte"),
        ({"budget": 1.5}, "share"),
        ({"realisation": "wish"}, "'mirror'"),
        ({"time_limit": 0}, "time_limit"),
        ({"costs": "roofline:abacus"}, "abacus"),
        ({"costs": 3}, "costs must be"),
        ({"grad_req": "perhaps"}, "perhaps"),
        ({"grad_req": "null"}, "no argument wants a gradient"),
        ({"label": (3,)}, "'label'"),
        ({"type_dict": {"dta": "float16"}}, "'dta'"),
        ({"type_dict": ["data"]}, "type_dict must be a dict"),
        ({"grad_req": ["write"]}, "grad_req must be"),
        ({"reserve": "much"}, "the reserve 'much' cannot be used"),
        ({"reserve": -1}, "the reserve -1 cannot be used"),
        ({"reserve": 0.1}, "the reserve 0.1 cannot be used"),
        ({"ctx": "gpu"}, "ctx must be a context"),
    ],
)
def test_arguments_that_cannot_be_used(network: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        quick(network, **options)


def test_missing_and_inconsistent_shapes_name_the_argument() -> None:
    net, _ = two_headed_net()
    with pytest.raises(ArgumentError, match="'data' must be a tuple"):
        memplan.plan(net, strategy="store_all", data=5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'data'"):
        memplan.plan(net, strategy="store_all")
    with pytest.raises(ArgumentError, match="do not fit"):
        memplan.plan(net, strategy="store_all", data=(4, 3))


@pytest.mark.parametrize("thing", [42, None, "resnet", [mx.sym.Variable("data")], mx.nd.zeros(3)])
def test_only_a_symbol_can_be_planned(thing: Any) -> None:
    with pytest.raises(ArgumentError, match="Symbol"):
        memplan.plan(thing, data=(2, 3))


def test_a_gluon_block_is_told_how_to_become_a_symbol() -> None:
    block = mx.gluon.nn.Dense(3)
    with pytest.raises(ArgumentError, match=r"block\(mx.sym.Variable"):
        memplan.plan(block, data=(2, 3))


def test_an_op_without_a_gradient_is_named() -> None:
    net = mx.sym.topk(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8), name="best")
    net = mx.sym.MakeLoss(mx.sym.contrib.div_sqrt_dim(mx.sym.all_finite(net, name="finite")))
    with pytest.raises(TraceError, match="'finite'"):
        memplan.plan(net, strategy="store_all", data=(4, 8))


def test_costs_of_another_device_or_network_are_refused(network: Any, tmp_path: Path) -> None:
    net, shapes = network
    graph = trace(net, shapes=shapes).graph
    table = memplan.CostTable("gpu(Tesla T4)", {op.signature: 1e-4 for op in graph.ops})
    assert quick(network, costs=table, strategy="store_all").costs == "measured on gpu(Tesla T4)"
    path = tmp_path / "costs.json"
    table.save(path)
    assert quick(network, costs=str(path), strategy="store_all").costs.endswith("gpu(Tesla T4)")
    with pytest.raises(CostError, match="Tesla T4"):
        quick(network, costs=table, ctx=mx.cpu(), strategy="store_all")
    poorer = dataclasses.replace(table, seconds=dict(list(table.seconds.items())[3:]))
    with pytest.raises(CostError, match="lack"):
        quick(network, costs=poorer, strategy="store_all")


def test_a_gpu_that_is_not_here_can_be_planned_for_by_a_roofline() -> None:
    if mx.context.num_gpus():
        pytest.skip("there is a GPU")
    net, shapes = residual_net()
    with pytest.raises(CostError, match="pass costs='roofline:v100'"):
        memplan.plan(net, ctx=mx.gpu(0), strategy="store_all", **shapes)
    plan = memplan.plan(net, ctx=mx.gpu(0), costs=ROOFLINE, strategy="store_all", **shapes)
    assert plan.costs == ROOFLINE
