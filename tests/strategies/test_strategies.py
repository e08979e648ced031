"""Strategies of the mirror realisation, and the registry of all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import memplan
from helpers.amounts import examples
from helpers.branches import taking
from helpers.clock import TickingClock
from helpers.graphs import UNIT, layered_graphs, mirrored_graphs, unit_chain
from helpers.networks import hinted_resnet, residual_net
from helpers.planning import NEVER_SECONDS
from helpers.problems import mirrored
from memplan import strategies
from memplan.errors import ArgumentError
from memplan.memory.blocks import allocate
from memplan.mxnet.trace.build import trace
from memplan.search.segments import flags_keeping
from memplan.step.graph import TrainingGraph
from memplan.step.mirroring import flaggable, flags_of, mirror
from memplan.step.schedule import Schedule
from memplan.step.validate import validate
from memplan.strategies.auto import Auto
from memplan.strategies.base import Outcome, Problem, Status
from memplan.strategies.chen import ChenGreedy
from memplan.util import stop
from oracles.flags import BruteForceFlags

HEURISTICS = (
    "store_all",
    "memonger",
    "chen_sqrt",
    "chen_greedy",
    "search",
)
SEARCHES = ("search", "checkmate")


def made(name: str, **options: Any) -> strategies.Strategy:
    """A strategy that ends by counts."""
    bounds = {"effort": 0.02, "time_limit": NEVER_SECONDS} if name in SEARCHES else {}
    return strategies.create(name, **bounds, **options)


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    net, shapes = residual_net(batch=4, size=16, units=5)
    graph = trace(net, shapes=shapes).graph
    return graph.with_seconds([1e-6 + 1e-9 * op.traffic_nbytes for op in graph.ops])


@pytest.mark.parametrize("name", [*HEURISTICS, "checkmate"])
@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
def test_plans_are_valid_mirrored_and_within_the_budget(
    graph: TrainingGraph, name: str, share: float
) -> None:
    budget = int(share * allocate(Schedule.unplanned(graph)).nbytes)
    outcome = made(name).solve(mirrored(graph, budget))
    assert outcome.lower_bound_seconds is None or outcome.lower_bound_seconds >= graph.seconds
    if outcome.schedule is None:
        assert outcome.status is Status.NO_PLAN_FOUND
        return
    assert validate(outcome.schedule).valid
    assert allocate(outcome.schedule).nbytes <= budget
    assert mirror(graph, flags_of(outcome.schedule)) == outcome.schedule
    if outcome.lower_bound_seconds is not None:
        assert outcome.schedule.seconds >= outcome.lower_bound_seconds - 1e-12


@pytest.mark.parametrize("name", HEURISTICS)
def test_heuristics_never_say_that_nothing_is_possible(graph: TrainingGraph, name: str) -> None:
    outcome = made(name).solve(mirrored(graph, 1))
    assert (outcome.status, outcome.schedule) == (Status.NO_PLAN_FOUND, None)


@pytest.mark.parametrize("name", [*HEURISTICS[1:], "checkmate"])
def test_without_a_budget_memory_is_saved(graph: TrainingGraph, name: str) -> None:
    found = made(name).solve(mirrored(graph, None)).schedule
    assert found is not None
    assert allocate(found).nbytes < 0.9 * allocate(Schedule.unplanned(graph)).nbytes


def test_checkmate_proves_what_cannot_be(graph: TrainingGraph) -> None:
    assert made("checkmate").solve(mirrored(graph, 1)).status is Status.INFEASIBLE


def test_memonger_keeps_the_hinted_stages_only() -> None:
    net, shapes = hinted_resnet()
    graph = trace(net, shapes=shapes).graph
    hinted = {i for i, op in enumerate(graph.ops) if op.mirror_stage is not None}
    found = made("memonger").solve(mirrored(graph, None)).schedule
    assert hinted
    assert found is not None
    kept = flags_keeping(graph, ()) - flags_of(found)
    assert kept
    assert kept <= hinted


def subsets(items: Sequence[int]) -> Iterator[frozenset[int]]:
    """Every set of some of the items."""
    for size in range(len(items) + 1):
        yield from map(frozenset, combinations(items, size))


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[TrainingGraph, int]:
    """A graph, and a budget that takes recomputation: one that some set of flags just meets.

    Or, now and then, one that none meets; or the unplanned bytes where nothing takes fewer.
    """
    graph = draw(st.one_of(layered_graphs(max_forward=7), mirrored_graphs(max_forward=5)))
    graph = graph.with_seconds([float(draw(st.integers(0, 3))) for _ in graph.ops])
    reached = {allocate(mirror(graph, flags)).nbytes for flags in subsets(flaggable(graph))}
    unplanned = allocate(Schedule.unplanned(graph)).nbytes
    budgets = sorted(nbytes for nbytes in reached if nbytes < unplanned)
    return graph, draw(st.sampled_from([*budgets, max(0, min(reached) - 1)]))


@pytest.mark.parametrize("solver", ["CBC", "HIGHS"])
@taking(none=1, plan=2, optimal=1)
@examples(40, suppress_health_check=list(HealthCheck))
@given(problem=small_problems())
def test_checkmate_is_what_trying_everything_finds(
    taken: Counter[str], solver: str, problem: tuple[TrainingGraph, int]
) -> None:
    graph, budget = problem
    best = BruteForceFlags().solve(mirrored(graph, budget))
    found = made("checkmate", solver=solver).solve(mirrored(graph, budget))
    if best.schedule is None:
        taken["none"] += 1
        assert found.schedule is None
        assert found.status in (Status.INFEASIBLE, Status.NO_PLAN_FOUND)
        return
    assert found.status is not Status.INFEASIBLE
    optimum = best.schedule.seconds
    assert found.lower_bound_seconds is None or found.lower_bound_seconds <= optimum + 1e-6
    if found.schedule is not None:
        taken["plan"] += 1
        assert found.schedule.seconds >= optimum
        assert allocate(found.schedule).nbytes <= budget
    if found.status is Status.OPTIMAL:
        taken["optimal"] += 1
        assert found.schedule is not None
        assert found.schedule.seconds == optimum


@taking(plan=10)
@examples(60, suppress_health_check=list(HealthCheck))
@given(problem=small_problems())
def test_plans_of_random_graphs(taken: Counter[str], problem: tuple[TrainingGraph, int]) -> None:
    graph, budget = problem
    best = BruteForceFlags().solve(mirrored(graph, budget))
    for name in HEURISTICS:
        options = {"ntrial": 12} if name.startswith(("memonger", "chen_greedy")) else {}
        strategy = made(name, **options)
        least = strategy.solve(mirrored(graph, None)).schedule
        assert least is not None
        assert validate(least).valid
        assert mirror(graph, flags_of(least)) == least
        within = strategy.solve(mirrored(graph, budget)).schedule
        if name != "search":
            assert (within is not None) == (allocate(least).nbytes <= budget)
        if within is not None:
            taken["plan"] += 1
            assert best.schedule is not None
            assert best.schedule.seconds <= within.seconds
            assert allocate(within).nbytes <= budget
            assert mirror(graph, flags_of(within)) == within


def test_checkmate_keeps_its_time_limit(
    graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = allocate(Schedule.unplanned(graph)).nbytes // 2
    clock = TickingClock(0.01)
    clock.replaces_that_of(monkeypatch, stop)
    strategies.create("checkmate", time_limit=2.0).solve(mirrored(graph, budget))
    assert 20 < clock.looks < 220


def test_brute_force_refuses_what_would_take_forever(graph: TrainingGraph) -> None:
    with pytest.raises(ArgumentError, match="at most 16"):
        BruteForceFlags().solve(mirrored(graph, None))


def test_brute_force_proves() -> None:
    graph = unit_chain(3)
    unplanned = allocate(Schedule.unplanned(graph)).nbytes
    assert BruteForceFlags().solve(mirrored(graph, unplanned)).schedule == Schedule.unplanned(graph)
    assert BruteForceFlags().solve(mirrored(graph, 1)) == Outcome(Status.INFEASIBLE)


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("memonger", "ntrial", [0, 1.5, None]),
        ("griewank", "max_slots", [0, "24"]),
        ("checkmate", "solver", ["GUROBI", None]),
        ("checkmate", "program_share", [-0.1, 1.1, math.nan]),
        ("checkmate_lp", "thresholds", [0, 1.5]),
        ("checkmate_lp", "allowances", [0.1, (2.0,), ()]),
        ("evict", "patience", [-1, "x"]),
        ("search", "rounds", [0, 1.5]),
        ("search", "seed", [-1, 1.5, "x", None]),
        ("search", "start", [5]),
        ("auto", "rounds", [-1]),
        ("auto", "gap", [-0.1, math.inf, 10**400, None]),
        ("auto", "effort", [0, 10**400, math.nan]),
        ("auto", "time_limit", [-1, 10**400, "5"]),
    ],
)
def test_options_out_of_range_are_named(name: str, option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ArgumentError, match=f"^{option} must be"):
            strategies.create(name, **{option: value})


def test_numpys_numbers_are_options_of_pythons() -> None:
    strategy = strategies.create("auto", gap=np.float32(0.5), seed=np.int64(3))
    assert strategy == strategies.create("auto", gap=0.5, seed=3)
    assert {type(strategy.gap), type(strategy.seed)} == {float, int}  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="gap must be"):
        strategies.create("auto", gap=True)


WITH_A_START = [
    n for n in strategies.names() if "start" in strategies.options_of(strategies.create(n))
]


@pytest.mark.parametrize("name", WITH_A_START)
def test_a_start_of_the_strategys_own_is_not_forgotten_for_the_problems(name: str) -> None:
    graph, budget = unit_chain(60), 14 * UNIT
    best = strategies.create("griewank").solve(Problem(graph, budget)).schedule
    given = strategies.create("auto", effort=1e-6).solve(Problem(graph, budget)).schedule
    assert best is not None
    assert given is not None
    problem = Problem(graph, budget, start=given, time_limit=NEVER_SECONDS)
    without = strategies.create(name, effort=1e-6).solve(problem).schedule
    assert without is not None
    assert without.seconds > best.seconds
    found = strategies.create(name, effort=1e-6, start=best).solve(problem).schedule
    assert found is not None
    assert found.seconds == best.seconds


@dataclass(frozen=True)
class Plugin:
    """What a user's strategy may look like."""

    factor: int = 1

    def solve(self, problem: Problem) -> Outcome:
        return Outcome(Status.FEASIBLE, Schedule.unplanned(problem.graph))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_rows", dict(strategies._rows))


@pytest.mark.usefixtures("registry")
def test_a_registered_strategy_is_known_by_its_name() -> None:
    strategies.register("mine", Plugin)
    assert "mine" in strategies.names()
    assert strategies.create("mine", factor=3) == Plugin(3)
    assert strategies.create("mine", realisation="explicit") == Plugin()
    net, shapes = residual_net()
    assert memplan.plan(net, strategy="mine", **shapes).strategy == "mine"
    with pytest.raises(ArgumentError, match="already"):
        strategies.register("mine", Plugin)
    strategies.register("mine", lambda: Plugin(5), replace=True)
    assert strategies.create("mine") == Plugin(5)


@pytest.mark.parametrize(
    ("name", "loader"), [("", Plugin), (3, Plugin), ("mine:linear", Plugin), ("mine", Plugin())]
)
def test_what_cannot_be_registered(name: Any, loader: Any) -> None:
    with pytest.raises(ArgumentError):
        strategies.register(name, loader)


def test_an_installed_package_brings_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Entry:
        name: str

        def load(self) -> type[Plugin]:
            return Plugin

    monkeypatch.setattr(strategies, "entry_points", lambda group: [Entry("theirs")])
    assert "theirs" in strategies.names()
    assert strategies.create("theirs", factor=2) == Plugin(2)


def test_an_unknown_name_is_answered_by_those_of_the_realisation() -> None:
    net, shapes = residual_net()
    with pytest.raises(ArgumentError, match="no strategy 'magic'; choose from") as refused:
        memplan.plan(net, strategy="magic", **shapes)
    assert str(refused.value).endswith("choose from " + ", ".join(strategies.names("mirror")))


def test_an_unknown_name_lists_the_choices_of_the_realisation() -> None:
    with pytest.raises(ArgumentError, match=r"memonger.*checkmate"):
        strategies.create("memnger")
    with pytest.raises(ArgumentError, match="no strategy 'griewank' for realisation 'mirror'"):
        strategies.create("griewank", realisation="mirror")
    assert "griewank" in strategies.names("explicit")
    assert "griewank" not in strategies.names("mirror")


@pytest.mark.parametrize("thing", [Plugin, 3, None])
def test_only_a_name_or_a_strategy_will_do(thing: Any) -> None:
    with pytest.raises(ArgumentError, match="a name or an object"):
        strategies.create(thing)


def test_options_may_stand_behind_the_name() -> None:
    assert strategies.create("chen_greedy:linear:ntrial=12") == ChenGreedy(linear=True, ntrial=12)
    assert strategies.create("chen_greedy:linear=false").linear is False  # type: ignore[attr-defined]
    assert strategies.create("auto:solver=CBC:seed=3", seed=4) == Auto(solver="CBC", seed=4)
    for wrong in ("chen_greedy:linaer", "chen_greedy:ntrial=many", "chen_greedy:linear=no"):
        with pytest.raises(ArgumentError, match=wrong.partition(":")[2].partition("=")[0]):
            strategies.create(wrong)


def test_an_effort_without_end_may_stand_behind_the_name() -> None:
    assert strategies.create("auto:effort=inf") == Auto(effort=math.inf)


def test_an_option_stands_behind_the_name_once() -> None:
    with pytest.raises(ArgumentError, match="'auto:seed=1:seed=2': the option 'seed' stands"):
        strategies.create("auto:seed=1:seed=2")
    # An argument of a plan replaces it.
    text = strategies.configured("auto:seed=1:effort=2", gap=0.5, seed=3)
    assert text == "auto:effort=2:gap=0.5:seed=3"
    assert strategies.create(text) == Auto(effort=2, gap=0.5, seed=3)


@pytest.mark.usefixtures("registry")
def test_an_option_that_there_is_not_is_told_those_that_there_are() -> None:
    with pytest.raises(ArgumentError, match=r"'linaer'; its options are linear, ntrial"):
        strategies.create("chen_greedy:linaer")

    with pytest.raises(ArgumentError, match=r"'store_all': there is no option 'x'; it has none"):
        strategies.create("store_all:x")
    with pytest.raises(ArgumentError, match=r"no option 'strat'; .* seed, time_limit$"):
        strategies.create("search:strat=1")  # no schedule can stand behind a name
    with pytest.raises(ArgumentError, match=r"no option 'begin'; .* seed, start, time_limit$"):
        strategies.create("search", begin=1)

    def needs(seed: int) -> Any:
        raise AssertionError(seed)

    strategies.register("needs", needs)
    with pytest.raises(ArgumentError, match=r"strategy 'needs': .*'sed'"):
        strategies.create("needs:sed=1")


def test_every_name_can_be_made() -> None:
    for name in strategies.names():
        assert callable(strategies.create(name).solve)
    for realisation in strategies.REALISATIONS:
        assert set(strategies.names(realisation)) <= set(strategies.names())
        for name in strategies.names(realisation):
            assert strategies.create(name, realisation=realisation) == strategies.create(name)


def test_a_strategy_that_is_made_takes_no_options() -> None:
    with pytest.raises(ArgumentError, match=r"takes no ntrial; .*dataclasses\.replace"):
        strategies.create(strategies.create("memonger"), ntrial=5)
