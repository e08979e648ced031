"""Bounds of moments in imposed orders, against all orders and all schedules of small graphs."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from memplan.programs.moment_program import Bound, MomentProgram
from memplan.programs.moment_ranking import fullest_between
from memplan.programs.moments import Moments
from memplan.programs.order_tree import OrderTree, raise_bound
from memplan.programs.proof import RECOMPUTED, ProofOptions
from memplan.programs.solver import Program
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Problem
from memplan.util.stop import Stop
from oracles.sequences import BruteForceSequences


@st.composite
def branching_graphs(draw: st.DrawFn) -> TrainingGraph:
    """Branches that are joined, and for each a backward op, which the graph does not order."""
    lengths = draw(st.sampled_from([(1, 2), (2, 2), (1, 1, 1)]))
    ops: list[Op] = []
    tensors: list[Tensor] = []

    def add(name: str, *inputs: int, again: bool = True) -> int:
        size = draw(st.integers(2, 5) if again else st.integers(1, 2))
        tensors.append(Tensor(name, size, size))
        seconds = float(draw(st.integers(1, 4)))
        ops.append(Op(name, "op", inputs, (len(ops),), seconds, recomputable=again))
        return len(ops) - 1

    source = add("source")
    branches: list[list[int]] = []
    for number, length in enumerate(lengths):
        branch = [source]
        for place in range(length):
            branch.append(add(f"branch{number}.{place}", branch[-1]))
        branches.append(branch)
    loss = add("loss", *(branch[-1] for branch in branches), again=False)
    backward = []
    for number, branch in enumerate(branches):
        saved = draw(st.lists(st.sampled_from(branch), min_size=1, unique=True))
        backward.append(add(f"backward{number}", loss, *saved, again=False))
    return TrainingGraph(tuple(ops), tuple(tensors), tuple(backward), len(ops))


def orders(graph: TrainingGraph, begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every order of the ops in which each comes after those that it depends on."""
    if len(begun) == len(graph.ops):
        yield begun
    for t in set(range(len(graph.ops))).difference(begun):
        if set(begun).issuperset(graph.dependencies[t]):
            yield from orders(graph, (*begun, t))


def reordered(
    graph: TrainingGraph, order: Sequence[int], imposed: Sequence[int] = ()
) -> TrainingGraph:
    """The graph with its ops in this order; those ``imposed`` depend on each other in turn."""
    ops = list(graph.ops)
    for before, t in pairwise(imposed):
        ops[t] = dataclasses.replace(ops[t], after=(before,))
    number_of = {t: number for number, t in enumerate(order)}
    return dataclasses.replace(graph, ops=tuple(ops[t].renumbered(number_of) for t in order))


def optimum(graph: TrainingGraph, budget_nbytes: int) -> float:
    """The seconds of the cheapest schedule in this order; infinite if there is none."""
    oracle = BruteForceSequences(any_order=True)
    schedule = oracle.solve(Problem(graph, budget_nbytes)).schedule
    return math.inf if schedule is None else schedule.seconds


def seconds_of(
    graph: TrainingGraph, ops: Sequence[int], budget_nbytes: int, *, relax: bool
) -> float:
    with Program() as program:
        moments = MomentProgram(Moments(graph), ops, budget_nbytes, program)
        return moments.bound(Stop(math.inf), relax=relax).seconds


@taking(unordered=10, dearer=5, equal=5)
@examples(300, quick=60)
@given(st.data())
def test_an_imposed_order_says_what_the_graph_with_that_order_says(
    taken: Counter[str], data: st.DataObject
) -> None:
    """Neither less nor more, and no more than a schedule in that order takes."""
    graph = data.draw(branching_graphs())
    order = data.draw(st.sampled_from(list(orders(graph))))
    ops = [t for t in order if data.draw(st.integers(0, 2))]
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    budget = peak - data.draw(st.integers(1, 8))
    imposed = reordered(graph, order, ops)
    numbers = [order.index(t) for t in ops]
    for relax in (True, False):
        seconds = seconds_of(graph, ops, budget, relax=relax)
        assert seconds == pytest.approx(seconds_of(imposed, numbers, budget, relax=relax), rel=1e-5)
    least = optimum(reordered(graph, order), budget)
    assert seconds <= least + 1e-5 * graph.seconds
    taken["dearer"] += graph.seconds < seconds < math.inf
    taken["equal"] += graph.seconds < least < seconds + 1e-4 * graph.seconds
    taken["unordered"] += imposed.dependencies != reordered(graph, order).dependencies


@taking(uncounted=20, less=3)
@examples(200, quick=40)
@given(st.data())
def test_what_is_negligible_says_no_less_than_a_budget_larger_by_it(
    taken: Counter[str], data: st.DataObject
) -> None:
    """And no more than with every tensor counted."""
    graph = data.draw(branching_graphs())
    order = data.draw(st.sampled_from(list(orders(graph))))
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes - data.draw(st.integers(1, 8))
    negligible = data.draw(st.integers(2, 8))
    moments = Moments(graph, negligible_nbytes=negligible)
    uncounted = {
        c for c, d in zip(moments.buffers.class_of, moments.class_of, strict=True) if d < 0
    }
    assert sum(moments.buffers.classes[c][0] for c in uncounted) <= negligible
    with Program() as program:
        seconds = MomentProgram(moments, order, budget, program).bound(Stop(math.inf)).seconds
    slack = 1e-5 * graph.seconds
    exact = seconds_of(graph, order, budget, relax=False)
    assert seconds <= exact + slack
    assert seconds >= seconds_of(graph, order, budget + negligible, relax=False) - slack
    taken["uncounted"] += bool(uncounted)
    taken["less"] += seconds < exact - slack


@pytest.mark.parametrize(("gap_seconds", "is_counted"), [(0.0, True), (0.1, False)])
def test_where_no_gap_is_allowed_every_tensor_counts(
    gap_seconds: float, *, is_counted: bool
) -> None:
    graph = tree_of_four_branches().graph
    sizes = (1, *[tensor.nbytes * 10_000 for tensor in graph.tensors[1:]])
    tensors = tuple(Tensor(f"t{a}", size, size) for a, size in enumerate(sizes))
    tree = OrderTree(
        dataclasses.replace(graph, tensors=tensors),
        *(90_000, Stop(math.inf), ProofOptions(gap_seconds=gap_seconds)),
    )
    assert (tree.moments.class_of[0] >= 0) == is_counted
    assert min(tree.moments.class_of[1:]) >= 0


@pytest.mark.long
@taking(proved=5, dearer=5, impossible=1, told=5)
@examples(200, quick=60)
@given(st.data())
def test_no_schedule_in_any_order_takes_less_than_the_tree_says(
    taken: Counter[str], data: st.DataObject
) -> None:
    graph = data.draw(branching_graphs())
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    budget = peak - data.draw(st.integers(1, 6))
    least = min(optimum(reordered(graph, order), budget) for order in orders(graph))
    enough = least + data.draw(st.sampled_from([math.inf, 0.0, -0.5]))
    highest = graph.seconds
    candidates = data.draw(st.lists(st.sampled_from(range(len(graph.ops))), unique=True))
    options = ProofOptions(effort=0.2, candidates=tuple(candidates), enough_seconds=enough)
    for fact in raise_bound(graph, budget, Stop(math.inf), options):
        assert highest <= fact.bound_seconds
        highest = fact.bound_seconds
    assert highest <= least + 1e-5 * graph.seconds
    taken["dearer"] += graph.seconds < least < math.inf
    taken["impossible"] += least == math.inf
    taken["told"] += bool(candidates)
    taken["proved"] += highest >= least - 1e-4 * graph.seconds > graph.seconds


def tree_of_four_branches() -> OrderTree:
    branches = [Op(f"branch{a}", "op", (0,), (a,), 1.0) for a in range(1, 5)]
    ops = (Op("source", "op", (), (0,), 1.0), *branches, Op("last", "op", (1, 2, 3, 4), (5,), 1.0))
    graph = TrainingGraph(ops, tuple(Tensor(f"t{a}", 2, 2) for a in range(6)), (5,), 6)
    return OrderTree(graph, 9, Stop(math.inf), ProofOptions())


@pytest.mark.parametrize("seed", range(10))
def test_every_order_is_that_of_one_leaf(seed: int) -> None:
    """Whatever relaxations say, and so wherever the look at a moment's places ends."""
    tree = tree_of_four_branches()
    graph = tree.graph

    def relaxation(ops: tuple[int, ...]) -> Bound:
        seconds = graph.seconds + random.Random(f"{seed} {ops}").randrange(4)
        return Bound(seconds, ops, ((),) * len(ops))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_relaxation", relaxation)
        for _ in range(8):
            tree.grow()
    for order in orders(graph):
        places = [[order.index(t) for t in leaf.bound.ops] for leaf in tree.leaves]
        assert sum(place == sorted(place) for place in places) == 1


@pytest.mark.parametrize(("more_seconds", "nleaves"), [(0.0, 1), (1e-4, 1), (0.1, 2)])
def test_of_moments_that_gain_as_much_the_one_with_fewest_places_is_taken(
    more_seconds: float, nleaves: int
) -> None:
    """One after another of the branches has two places, what comes last has one."""
    tree = tree_of_four_branches()
    last = len(tree.graph.ops) - 1

    def relaxation(ops: tuple[int, ...]) -> Bound:
        more = sum(more_seconds for t in ops if t != last)
        return Bound(tree.graph.seconds + more, ops, ((),) * len(ops))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_relaxation", relaxation)
        patch.setattr(tree, "_candidates", lambda *_: iter(range(1, last + 1)))
        while len(tree.leaves[0].bound.ops) < 2:
            tree.grow()
    assert len(tree.leaves) == nleaves


def test_candidates_that_are_given_are_looked_at_beside_others() -> None:
    """And not in their place: on a large graph, those of a poor plan would take all of the time."""
    graph = tree_of_four_branches().graph
    tree = OrderTree(graph, 9, Stop(math.inf), ProofOptions(candidates=(2, 3, 4)))
    tree.gains |= dict.fromkeys((0, 1, 5), 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplan.programs.order_tree.TRIALS", 2)
        assert tree._trials((0,)) == [1, 5, 2, 3, 4]
        patch.setattr("memplan.programs.order_tree.GIVEN_SIZE", 2 * len(graph.ops))
        assert tree._trials((0,)) == [1, 5, 2, 3]
        tree.gains |= {2: 0.5, 4: 0.7}
        assert tree._trials((1,)) == [0, 5, 3, 4]
        patch.setattr("memplan.programs.order_tree.GIVEN_SIZE", 0)
        assert tree._trials((1,)) == [0, 5, 3]


def test_what_an_answer_has_room_for_is_no_candidate() -> None:
    """Unless there is nothing else: the answer that is given is of an integer program."""
    tree = tree_of_four_branches()
    tree.gains |= dict.fromkeys((1, 2, 3), 1.0)
    assert tree._trials((1,), {1, 3}) == [3]
    assert tree._trials((1,), {1}) == [2, 3]
    order = [[0], [1], [2], [3], [4], [5]]
    assert tree._over(order) == {4, 5}  # five tensors of two bytes, where nine are allowed


@pytest.mark.parametrize(("gain", "is_looked_at"), [(0.5, True), (0.2, False)])
def test_what_gained_little_may_gain_more_with_another_moment(
    gain: float, *, is_looked_at: bool
) -> None:
    tree = tree_of_four_branches()
    tree.gains |= {1: 9.0, 2: gain}
    seen: list[tuple[int, ...]] = []

    def relaxation(ops: tuple[int, ...]) -> Bound:
        seen.append(ops)
        return Bound(tree.graph.seconds + 1.0, ops, ((),))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_relaxation", relaxation)
        patch.setattr(tree, "_candidates", lambda *_: iter(()))
        tree.grow()
    assert ((2,) in seen) == is_looked_at


def test_what_gained_nothing_is_looked_at_again_in_more_places() -> None:
    """Of the heads of three branches: beside the source each has one place, beside another two."""
    tree = tree_of_four_branches()
    seen: list[tuple[int, ...]] = []

    def relaxation(ops: tuple[int, ...]) -> Bound:
        seen.append(ops)
        return Bound(tree.graph.seconds + (3 in ops), ops, ((),) * len(ops))

    def look(ops: tuple[int, ...]) -> list[tuple[int, ...]]:
        seen.clear()
        bound = Bound(tree.graph.seconds, ops, ((),) * len(ops))
        tree._best_children(dataclasses.replace(tree.leaves[0], bound=bound))
        return [order for order in seen if 2 in order]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "_relaxation", relaxation)
        patch.setattr(tree, "_candidates", lambda *_: iter((2, 3)))
        assert look((0,)) == [(0, 2)]
        assert tree.gains[2] == 0.0
        assert look((0,)) == []
        assert look((0, 1))
        assert look((0, 1)) == []  # in as many places as before


def test_the_fullest_first_run_between_two_recomputations() -> None:
    """An op that runs again does not count, however full it is, nor what takes too few seconds."""
    ops = [Op(f"op{t}", "op", (t - 1,) if t else (), (t,), float(t + 1)) for t in range(6)]
    tensors = tuple(Tensor(f"t{a}", size, size) for a, size in enumerate((1, 9, 1, 2, 5, 1)))
    graph = TrainingGraph(tuple(ops), tensors, (5,), len(ops))
    schedule = Schedule.sequence(graph, (0, 1, 2, 0, 3, 0, 1, 2, 3, 4, 5))
    assert fullest_between(schedule, 0.5) == (1, 3, 4)
    assert fullest_between(schedule, 1.0) == (1, 4)
    assert fullest_between(schedule, 99.0) == (1,)
    assert fullest_between(Schedule.unplanned(graph), 0.0) == (1,)


def test_a_bound_alone_is_raised_as_far_as_it_ends_the_search_of_the_best() -> None:
    graph = tree_of_four_branches().graph
    best = Schedule.sequence(graph, (0, 1, 0, 2, 3, 4, 0, 5))
    options = ProofOptions(gap_seconds=0.5)
    told = options.of_bound_alone(best)
    assert told.enough_seconds == best.seconds - 0.5
    assert told.candidates == fullest_between(best, RECOMPUTED * graph.seconds)
    assert len(told.candidates) == 3
    nothing = options.of_bound_alone(None)
    assert (nothing.enough_seconds, nothing.candidates) == (math.inf, ())


def test_a_graph_whose_ops_take_no_time_has_a_bound_of_none() -> None:
    ops = [
        Op("s", "op", (), (0,), 0.0),
        Op("a", "op", (0,), (1,), 0.0),
        Op("b", "op", (0,), (2,), 0.0),
        Op("c", "op", (1, 2), (3,), 0.0),
        Op("last", "op", (0, 3), (4,), 0.0),
    ]
    tensors = tuple(Tensor(f"t{a}", 2, 1) for a in range(len(ops)))
    tree = OrderTree(
        TrainingGraph(tuple(ops), tensors, (4,), len(ops)), 7, Stop(math.inf), ProofOptions()
    )
    while tree.grow():
        pass
    assert tree.seconds == 0.0


def test_after_its_integer_program_a_leaf_has_that_answer() -> None:
    """The next moment is chosen by what is over the budget in it."""
    tree = tree_of_four_branches()
    leaf = tree.leaves[0]
    while len(leaf.bound.ops) < 2:
        tree.grow()
        leaf = tree.leaves[0]
    with pytest.MonkeyPatch.context() as patch:
        answer = Bound(tree.graph.seconds + 1.0, leaf.bound.ops, ((1,), ()), (frozenset(),) * 2)
        patch.setattr(MomentProgram, "bound", lambda *_, **__: answer)
        assert tree._solved(leaf).bound is answer
        nothing = dataclasses.replace(answer, seconds=math.inf, present=())
        patch.setattr(MomentProgram, "bound", lambda *_, **__: nothing)
        assert tree._solved(leaf).bound is leaf.bound


@pytest.mark.parametrize("is_read_between", [False, True])
def test_what_two_full_moments_leave_no_room_for_runs_again_before_each_read(
    *, is_read_between: bool
) -> None:
    """At m0 and m1 there is room for s alone: p2, and p1 for it, run again after m1."""
    ops = [
        Op("s", "op", (), (0,), 1.0, recomputable=False),
        Op("p1", "op", (0,), (1,), 2.0),
        Op("p2", "op", (1,), (2,), 3.0),
        Op("m0", "op", (0,), (3, 4), 1.0, recomputable=False, after=(2,)),
        Op("between", "op", (2, 3) if is_read_between else (3,), (5,), 1.0, recomputable=False),
        Op("m1", "op", (5,), (6, 7), 1.0, recomputable=False),
        Op("last", "op", (2, 6), (8,), 1.0, recomputable=False),
    ]
    sizes = (1, 3, 3, 1, 7, 1, 1, 6, 1)
    tensors = tuple(Tensor(f"t{a}", size, size) for a, size in enumerate(sizes))
    graph = TrainingGraph(tuple(ops), tensors, (8,), len(ops))
    expected = graph.seconds + (10.0 if is_read_between else 5.0)
    assert optimum(graph, 9) == expected
    for relax in (True, False):
        assert seconds_of(graph, (3, 5), 9, relax=relax) == pytest.approx(expected, rel=1e-4)
