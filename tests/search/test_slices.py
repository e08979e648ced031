"""Slices between cuts, and other orders: valid, within the budget where there is no point."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, tensors, training_graphs, unrolled
from memplan.memory.memory import Live
from memplan.search.choosing import Choosing
from memplan.search.reordered import better_order, mirrored_order, reordered
from memplan.search.rounds import Rounds
from memplan.search.segments import articulation_points
from memplan.search.sequence_search import search
from memplan.search.sequences import Rules
from memplan.search.slices import _Sequences, sliced_schedules
from memplan.step.graph import Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies.auto import Auto
from memplan.strategies.base import Problem
from memplan.strategies.spaces.space import SearchOptions
from memplan.util.remember import forget
from memplan.util.stop import Stop


def made(graph: TrainingGraph, budget_nbytes: int, *, reorder: bool = True) -> list[Schedule]:
    forget(graph)  # what another test, or another constant, has made
    return sliced_schedules(graph, budget_nbytes, Stop.after(1e5), reorder=reorder)


def braid(nsteps: int) -> TrainingGraph:
    """Two states, each of which reads both before it: no op by itself cuts the forward pass.

    The backward pass reads what the forward pass wrote; its gradients of weights, of no bytes, come
    last, and until then what they read waits.
    """
    ops = [Op(f"f{n}", "f", tuple(range(n - n % 2 - 2, n - n % 2)) if n > 1 else (), (n,), 1.0)
           for n in range(2 * nsteps)]  # fmt: skip
    last = 2 * nsteps - 1
    ops.append(Op("loss", "loss", (last - 1, last), (last + 1,), 1.0))
    for n in range(last, -1, -1):
        above = (len(ops) - 1,) if n == last else (len(ops) - 1, len(ops) - 2)
        inputs = (*above, n)
        ops.append(Op(f"b{n}", "b", inputs, (len(ops),), 1.0, False, differentiates=n))
    for op in range(last + 2, len(ops)):
        ops.append(Op(f"w{op}", "w", (op,), (len(ops),), 0.0, False))
    names = {op.name: 0 if op.kind == "w" else 1 for op in ops}
    heads = tuple(n for n, op in enumerate(ops) if op.kind == "w")
    return TrainingGraph(tuple(ops), tensors(**names), heads=heads, nforward=last + 2)


@taking(recomputes=2)
@examples(100)
@given(
    st.one_of(training_graphs(), st.integers(4, 20).map(braid)), st.floats(0.3, 1.0), st.booleans()
)
def test_schedules_are_valid(
    taken: Counter[str], graph: TrainingGraph, share: float, reorder: bool
) -> None:
    budget = int(share * simulate(Schedule.unplanned(graph)).peak_nbytes)
    for schedule in made(graph, budget, reorder=reorder):
        taken["recomputes"] += bool(schedule.recomputed)
        verdict = validate(schedule, simulate(schedule).peak_nbytes)
        assert verdict.valid, verdict.reason
        backward = [op for op in schedule.ops if op >= graph.nforward]
        assert sorted(backward) == list(range(graph.nforward, len(graph.ops)))
        if not reorder:
            assert backward == sorted(backward)


def test_the_eager_order_lets_nothing_wait() -> None:
    graph = braid(20)
    order = better_order(graph)
    assert list(order[: graph.nforward]) == list(range(graph.nforward))
    kinds = [graph.ops[op].kind for op in order[graph.nforward :]]
    assert kinds == ["b", "w"] * 40


def test_the_backward_pass_finishes_the_last_branch_first() -> None:
    """In the base order the gradients of both branches take turns, and wait for those of weights.

    Ops 0 to 5 are one branch, 6 to 11 the other one, 12 joins them.
    """
    ops = [Op(f"f{n}", "f", () if n in (0, 6) else (n - 1,), (n,), 1.0) for n in range(12)]
    ops.append(Op("loss", "loss", (5, 11), (12,), 1.0))
    above = {5: 12, 11: 12}
    for n in (5, 11, 4, 10, 3, 9, 2, 8, 1, 7, 0, 6):
        ops.append(Op(f"b{n}", "b", (above[n], n), (len(ops),), 1.0, False, differentiates=n))
        above[n - 1] = len(ops) - 1
    for op in range(13, 25):
        twin = ops[op].differentiates
        ops.append(Op(f"w{op}", "w", (op,), (len(ops),), 0.0, False, differentiates=twin))
    names = {op.name: 0 if op.kind == "w" else 1 for op in ops}
    heads = tuple(n for n, op in enumerate(ops) if op.kind == "w")
    graph = TrainingGraph(tuple(ops), tensors(**names), heads=heads, nforward=13)
    order = mirrored_order(graph)
    assert [graph.ops[op].differentiates for op in order[13::2]] == list(range(11, -1, -1))
    assert [graph.ops[op].kind for op in order[13:]] == ["b", "w"] * 12


def test_a_schedule_of_another_order_is_one_of_the_original() -> None:
    graph = braid(20)
    other = reordered(graph)
    assert other.graph.nforward == graph.nforward
    schedule = other.back(Schedule.unplanned(other.graph))
    assert schedule.graph is graph
    assert list(schedule.ops) == list(better_order(graph))
    assert other.there(schedule).ops == Schedule.unplanned(other.graph).ops
    assert simulate(schedule).live_nbytes == simulate(other.there(schedule)).live_nbytes


@pytest.mark.parametrize("reorder", [True, False])
def test_a_search_begins_in_the_better_order_if_it_may(reorder: bool) -> None:
    graph = braid(4)
    rules = Rules(recompute_backward=False, reorder=reorder, match_ranges=())
    rounds = Rounds(graph, rules, seed=0, stop=Stop.after(1e5))
    ops = rounds.schedule(rounds.first).ops
    assert list(ops) == (list(better_order(graph)) if reorder else list(range(len(graph.ops))))


@pytest.mark.parametrize(("nbytes", "most"), [(24, 0.25), (12, 0.7)])
def test_a_braid_fits_where_only_slices_do(nbytes: int, most: float) -> None:
    """In its base order no schedule fits: 40 gradients wait for those of weights."""
    graph, budget = braid(20), nbytes * UNIT
    assert not articulation_points(graph)
    fitting = [s for s in made(graph, budget) if simulate(s).peak_nbytes <= budget]
    assert min(schedule.overhead for schedule in fitting) <= most
    assert all(simulate(s).peak_nbytes > budget for s in made(graph, budget, reorder=False))


def test_auto_finds_a_plan_in_the_better_order() -> None:
    """In the base order there is none in these bytes, however much is recomputed."""
    outcome = Auto(effort=0.01).solve(Problem(braid(20), 14 * UNIT, memory=Live()))
    assert outcome.schedule is not None
    assert outcome.schedule.overhead <= 0.7


def test_what_many_slices_read_is_made_again_for_groups_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All the parts leave little room for states, and for what is between two of these."""
    graph, budget = unrolled(40), 120 * UNIT

    def cheapest() -> Schedule:
        fitting = [s for s in made(graph, budget) if simulate(s).peak_nbytes <= budget]
        return min(fitting, key=lambda schedule: schedule.seconds)

    remaking = cheapest()
    assert validate(remaking, budget).valid
    monkeypatch.setattr("memplan.search.slices.NGROUPS", (0,))
    storing = cheapest()
    assert storing.overhead > remaking.overhead + 0.03
    assert remaking.ops.count(0) > storing.ops.count(0)


def test_chains_are_solved_again_with_what_their_sequences_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a chain says of bytes is about true, and near the least memory all depends on it."""
    graph, budget = braid(30), 11 * UNIT

    def cheapest() -> Schedule:
        fitting = [s for s in made(graph, budget) if simulate(s).peak_nbytes <= budget]
        return min(fitting, key=lambda schedule: schedule.seconds)

    corrected = cheapest()
    assert validate(corrected, budget).valid
    monkeypatch.setattr("memplan.search.slices.CORRECTED_CHAINS", 0)
    assert cheapest().overhead > corrected.overhead + 0.3


def test_a_search_recreates_from_slices_where_what_it_has_is_expensive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, budget = unrolled(40), 88 * UNIT
    rules = Rules(recompute_backward=False, reorder=True, match_ranges=())

    def found(start: Schedule | None = None) -> Schedule:
        starts, stop = [] if start is None else [start], Stop.after(1e5)
        schedule = search(graph, budget, rules=rules, starts=starts, seed=0, stop=stop, rounds=1)
        assert schedule is not None
        assert validate(schedule, budget).valid
        return schedule

    from_slices = found()
    start = min(made(graph, budget), key=lambda schedule: schedule.overhead)
    assert found(start).overhead <= start.overhead
    monkeypatch.setattr("memplan.search.beginnings.FAR_OVERHEAD", 10.0)
    assert found().overhead > from_slices.overhead


def test_what_fits_is_not_lost_for_slices_that_do_not() -> None:
    graph, budget = unrolled(40), 100 * UNIT
    start = min(made(graph, budget), key=lambda schedule: schedule.overhead)
    assert start.overhead > 0.3

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        return 0 if schedule.ops == start.ops else UNIT

    rules, stop = Rules(recompute_backward=False, reorder=True, match_ranges=()), Stop.after(1e5)
    options: dict[str, Any] = {"seed": 0, "stop": stop, "rounds": 1, "excess": excess}
    assert search(graph, budget, rules=rules, starts=[start], **options) == start


def test_equal_slices_are_made_once_unless_they_were_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget, nmade = unrolled(40), 100 * UNIT, 0
    anew = _Sequences.entry

    def counting(*arguments: Any) -> Any:
        nonlocal nmade
        nmade += 1
        return anew(*arguments)

    monkeypatch.setattr(_Sequences, "entry", counting)
    cut = Stop(math.inf, work=1.0)
    sliced_schedules(graph, budget, cut, reorder=True)
    assert cut.work_left < 0.0
    nmade, all_work = 0, 1e9
    first, again = Stop(math.inf, work=all_work), Stop(math.inf, work=all_work)
    schedules = sliced_schedules(graph, budget, first, reorder=True)
    assert nmade > 0
    nmade = 0
    assert sliced_schedules(graph, budget, again, reorder=True) == schedules
    assert nmade == 0
    assert again.work_left == pytest.approx(first.work_left)
    assert sliced_schedules(graph, budget, Stop(math.inf, work=1.0), reorder=True) != schedules


def test_a_search_of_auto_begins_with_slices_where_no_drops_fit() -> None:
    graph, budget = unrolled(40), 86 * UNIT
    rules: dict[str, Any] = {"recompute_backward": False, "reorder": True, "seed": 0, "few": False}
    assert Choosing(graph, **rules).solve(budget, Stop.after(1e5)) is None
    problem = Problem(graph, budget, memory=Live())
    found = problem.space.beginnings(problem, Stop.after(1e5), SearchOptions())
    assert any(validate(schedule, budget).valid for schedule in found)
