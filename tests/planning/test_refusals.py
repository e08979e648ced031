"""What planning refuses: arguments, what strategies return, budgets that cannot be met."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.buckets import network as unrolled
from helpers.graphs import unit_chain
from helpers.networks import residual_net, two_headed_net
from helpers.planning import NoDataclass, half_of_the_ops, quick
from memplan.errors import ArgumentError, BudgetError, CostError, ScheduleError, TraceError
from memplan.mxnet.trace.build import trace
from memplan.planning import least
from memplan.planning.apart import _fields
from memplan.planning.attempt import budget_error, try_strategy
from memplan.planning.child import ChildJob
from memplan.planning.job import Job
from memplan.planning.plan import Attempt
from memplan.planning.realised import realise
from memplan.planning.without_budget import solvers_of_least
from memplan.programs.moments import Moments
from memplan.step.graph import reached
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies import create
from memplan.strategies.auto import Auto
from memplan.strategies.base import MOST_OVERHEAD, Outcome, Problem, Status
from memplan.strategies.search import Search
from memplan.util.nbytes import format_nbytes
from oracles.flags import BruteForceFlags

pytestmark = pytest.mark.usefixtures("little_time_to_look_for_the_least")


@dataclass(frozen=True)
class OnlyThePeak:
    """Minds live bytes only, so that MXNet's blocks exceed what it was asked for."""

    def solve(self, problem: Problem) -> Outcome:
        candidates = flaggable(problem.graph)
        for kept in range(len(candidates), 0, -1):
            schedule = mirror(problem.graph, frozenset(candidates[:: max(1, kept)]))
            if (
                problem.budget_nbytes is None
                or simulate(schedule).peak_nbytes <= problem.budget_nbytes
            ):
                return Outcome(Status.OPTIMAL, schedule, problem.graph.seconds)
        return Outcome(Status.INFEASIBLE)


def test_a_plan_that_mxnet_places_beyond_the_budget_is_tightened(network: Any) -> None:
    unplanned = quick(network, strategy="store_all").unplanned
    held = unplanned.fixed_nbytes
    budget = held + (unplanned.peak_nbytes + unplanned.allocated_nbytes) // 2
    plan = quick(network, strategy=OnlyThePeak(), budget=budget)
    assert plan.total_nbytes <= budget
    # The strategy called its answer to the tightened question optimal; of the true one it is not.
    assert plan.status is Status.FEASIBLE


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
class NothingFound:
    """Finds nothing, and says whether that is for want of time."""

    cut: bool

    def solve(self, problem: Problem) -> Outcome:
        del problem
        return Outcome(Status.NO_PLAN_FOUND, cut_by_clock=self.cut)


@pytest.mark.parametrize("cut", [True, False])
def test_a_refusal_says_whether_the_clock_cut_the_search(network: Any, *, cut: bool) -> None:
    with pytest.raises(BudgetError, match="NothingFound found no plan within") as error:
        quick(network, strategy=NothingFound(cut), budget=0.9)
    assert ("a higher time_limit may find one" in str(error.value)) is cut


@dataclass(frozen=True)
class Backwards:
    """Recomputes an op right after it ran, which mirroring never does."""

    def solve(self, problem: Problem) -> Outcome:
        op = flaggable(problem.graph)[0]
        order = [*range(op + 1), op, *range(op + 1, len(problem.graph.ops))]
        return Outcome(Status.FEASIBLE, Schedule.sequence(problem.graph, order))


@dataclass(frozen=True)
class Over(Backwards):
    """Keeps nothing: each backward op has all that it depends on run again."""

    def solve(self, problem: Problem) -> Outcome:
        graph, order = problem.graph, list(range(problem.graph.nforward))
        again = set(flaggable(graph))
        for op in range(graph.nforward, len(graph.ops)):
            order += sorted(again & reached([op], graph.dependencies))
            order.append(op)
        return Outcome(Status.FEASIBLE, Schedule.sequence(graph, order))


@pytest.mark.long
def test_what_takes_several_steps_is_no_plan_unless_it_is_asked_for(network: Any) -> None:
    options = {"strategy": Over(), "budget": 0.9, "realisation": "explicit"}
    with pytest.raises(BudgetError, match="at no more than 4 times the step's time"):
        quick(network, **options)
    assert quick(network, max_overhead=math.inf, **options).overhead > MOST_OVERHEAD


@pytest.mark.long
def test_any_time_is_worded_as_such(network: Any) -> None:
    """It is no number of percent, and none is above it."""
    with pytest.raises(BudgetError, match=", whatever its time") as caught:
        quick(network, strategy="memonger", budget=0.2, max_overhead=math.inf)
    assert "inf%" not in str(caught.value)
    job = Job.prepare(network[0], max_overhead=math.inf, **network[1])
    missed = Attempt("memonger", None, Status.NO_PLAN_FOUND, None, 0.0)
    text = str(budget_error(job, missed, "memonger"))
    assert "no plan, whatever its time" in text
    assert "Raise max_overhead" not in text


def test_a_schedule_that_mirroring_cannot_run_is_refused(network: Any) -> None:
    with pytest.raises(ScheduleError, match="no set of force_mirroring flags"):
        quick(network, strategy=Backwards(), budget=0.6)


@pytest.mark.long
def test_a_budget_that_cannot_be_met_names_the_least_that_can(network: Any) -> None:
    with pytest.raises(BudgetError, match="The least memory that memplan reaches") as caught:
        quick(network, strategy="memonger", budget=0.2)
    assert not caught.value.proved
    lowest = caught.value.lowest_nbytes
    assert lowest is not None
    assert str(lowest) in str(caught.value)
    assert "At that least memory strategy='auto' plans" in str(caught.value)
    assert quick(network, strategy="auto:effort=0.05", budget=lowest).total_nbytes <= lowest


@pytest.mark.parametrize(
    ("realisation", "holder"),
    [
        ("packed", "memplan's array takes"),
        ("updating", "memplan's array takes"),
        ("explicit", "MXNet allocates"),
        ("mirror", "MXNet allocates"),
    ],
)
def test_who_holds_the_least_is_named(realisation: str, holder: str) -> None:
    """By the process that plans, which knows of a realisation what a search asks of it."""
    net, shapes = residual_net(units=1)
    prepared = Job.prepare(net, realisation=realisation, **shapes)
    unplanned = Schedule.unplanned(prepared.graph)
    footprint = realise(prepared, unplanned).footprint
    job = ChildJob(trace=prepared.trace, **_fields(prepared))
    job._leasts[solvers_of_least(create("store_all"))] = least.Least(
        unplanned, footprint, unplanned, create("store_all"), cut_by_clock=False
    )
    missed = Attempt("store_all", 1, Status.NO_PLAN_FOUND, None, 0.0)
    text = str(budget_error(job, missed, "store_all"))
    allocated = format_nbytes(footprint.allocated_nbytes)
    assert f"more; {holder} {allocated} for them. " in text


def test_the_least_that_is_named_can_be_reached() -> None:
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
    plan = memplan.plan(net, strategy=BruteForceFlags(), budget=lowest, **options)
    assert plan.total_nbytes == lowest
    with pytest.raises(BudgetError, match="proved") as caught:
        memplan.plan(net, strategy=BruteForceFlags(), budget=lowest - 1, **options)
    assert caught.value.proved


@pytest.mark.long
def test_a_budget_below_what_is_fixed_is_proved_impossible(network: Any) -> None:
    with pytest.raises(BudgetError, match="proved") as caught:
        quick(network, budget=1000)
    assert caught.value.proved


@pytest.mark.long
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


@pytest.mark.long
def test_checkmate_proves_that_a_budget_is_impossible(network: Any) -> None:
    # One op's own output and input do not fit.
    fixed = quick(network, strategy="store_all").fixed_nbytes
    with pytest.raises(BudgetError, match="proved"):
        quick(network, strategy="checkmate", budget=fixed + (1 << 18))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "chekmate"}, "choose from .*checkmate"),
        ({"strategy": memplan.strategies.Strategy}, "a name or an object"),
        ({"budget": "4 potatoes"}, "potatoes"),
        ({"budget": 0}, "less than one byte"),
        ({"budget": 1.5}, "share"),
        ({"realisation": "wish"}, "'mirror', .*'auto'"),
        ({"realisation": None}, "there is no realisation None"),
        ({"realisation": []}, r"there is no realisation \[\]"),
        ({"realisation": {}}, "there is no realisation {}"),
        ({"realisation": np.array(0.9)}, "there is no realisation array"),
        ({"realisation": slice(1)}, "there is no realisation slice"),
        ({"reserve": np.array([1, 2])}, "the reserve array.* cannot be used"),
        ({"max_overhead": np.array([1, 2])}, "max_overhead must be"),
        ({"time_limit": np.array([1, 2])}, "time_limit must be"),
        ({"cache": ""}, "cache must be a folder"),
        ({"time_limit": 0}, "time_limit"),
        ({"time_limit": 10**400}, "time_limit"),
        ({"max_overhead": 10**400}, "max_overhead"),
        ({"cache": "\0"}, "cache must be a folder"),
        ({"costs": "roofline:abacus"}, "abacus"),
        ({"costs": 3}, "costs must be"),
        ({"grad_req": "perhaps"}, "perhaps"),
        ({"grad_req": "null"}, "no argument wants a gradient"),
        ({"label": (3,)}, "'label'"),
        ({"type_dict": {"dta": "float16"}}, "'dta'"),
        ({"type_dict": ["data"]}, "type_dict must be a dict"),
        ({"type_dict": 10**5000}, "type_dict must be a dict.* bits"),
        ({"type_dict": {"data": 10**5000}}, "the dtype of 'data' is .* bits"),
        ({"strategy": 10**5000}, "a name or an object.* bits"),
        ({"costs": 10**5000}, "costs must be .* bits"),
        ({"optimizer": 10**5000}, "optimizer must be .* bits"),
        ({"cache": 10**5000}, "cache must be .* bits"),
        ({"grad_req": 10**5000}, "grad_req must be .* bits"),
        ({"grad_req": {"data": 10**5000}}, "grad_req of 'data' is .* bits"),
        ({"grad_req": ["write"]}, "grad_req must be"),
        ({"reserve": "much"}, "the reserve 'much' cannot be used"),
        ({"reserve": "9" * 5000}, "the reserve '99.* cannot be used"),
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
    with pytest.raises(ArgumentError, match="'data' must be a tuple of integers"):
        memplan.plan(net, strategy="store_all", data=(True, 3, 8, 8))
    with pytest.raises(ArgumentError, match="'data'"):
        memplan.plan(net, strategy="store_all")
    with pytest.raises(ArgumentError, match="do not fit"):
        memplan.plan(net, strategy="store_all", data=(4, 3))


@pytest.mark.parametrize(
    "thing",
    [
        42,
        pytest.param(10**5000, id="huge"),
        None,
        "resnet",
        [mx.sym.Variable("data")],
        mx.nd.zeros(3),
    ],
)
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


@pytest.mark.long
def test_without_a_budget_the_refusal_names_the_time() -> None:
    net, shapes = residual_net(units=3)
    options: dict[str, Any] = {"realisation": "explicit", "strategy": "checkpoint_last"}
    with pytest.raises(BudgetError, match="no plan at one more forward pass at most") as caught:
        memplan.plan(net, **options, **shapes)
    assert "Name a budget, or take strategy='auto'" in str(caught.value)
    assert memplan.plan(net, max_overhead=math.inf, **options, **shapes).overhead > 0


def test_a_large_graph_is_refused_without_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of it, beside the search without a budget, takes a minute at 2,000 ops."""
    monkeypatch.setattr(least, "LARGE", 300)
    net, _, _ = unrolled(6)
    shapes: Any = {"data": (8, 6), "softmax_label": (8, 6)}
    job = Job.prepare(net, realisation="packed", **shapes)
    assert len(job.graph.ops) > least.LARGE
    monkeypatch.setattr(Search, "solve", None)
    monkeypatch.setattr(least, "schedule_without_budget", lambda *_: None)
    schedule, footprint, *_ = job.least_by(Auto())
    assert schedule.overhead <= MOST_OVERHEAD
    assert footprint.total_nbytes < 0.5 * job.unplanned.total_nbytes
    assert try_strategy(job, "evict:patience=0", footprint.total_nbytes).plan is not None
    missed = try_strategy(job, "evict:patience=0", 1)
    assert "at no more than 4 times the step's time" in str(budget_error(job, missed, "evict"))
