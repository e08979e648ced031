"""What holds for every schedule, against the brute-force search over all of them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import UNIT, tensors, unit_chain
from helpers.planning import NEVER_SECONDS
from helpers.small_graphs import small_graphs
from memplan.programs.moment_program import Bound, MomentProgram, moment_bound
from memplan.programs.moment_refinement import refine_moments
from memplan.programs.moments import Moments
from memplan.programs.proof import ProofOptions
from memplan.programs.solver import Program
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.strategies import Status
from memplan.strategies.base import Problem
from memplan.util.stop import Stop
from oracles.sequences import BruteForceSequences


def bound_of(moments: Moments, budget_nbytes: int) -> Bound:
    """By one moment, with the usual work."""
    return moment_bound(moments, budget_nbytes, Stop(math.inf), ProofOptions())


def in_line(moments: Moments, candidates: list[int]) -> list[int]:
    """Those of ``candidates`` that are ancestors of the next one."""
    chosen: list[int] = []
    for t in sorted(set(candidates)):
        ancestors, _ = moments.before_and_after(t)
        if not chosen or chosen[-1] in ancestors:
            chosen.append(t)
    return chosen


@taking(impossible=3, possible=10)
@examples(150, quick=20)
@given(st.data())
def test_no_schedule_is_below_the_floor_or_the_bound(
    taken: Counter[str], data: st.DataObject
) -> None:
    backward = data.draw(st.booleans())
    graph = data.draw(small_graphs(max_forward=4))
    oracle = BruteForceSequences(any_order=True, recompute_backward=backward)
    least = oracle.solve(Problem(graph, None)).schedule
    assert least is not None
    lowest = simulate(least).peak_nbytes
    moments = Moments(graph, recompute_backward=backward)
    assert moments.floor.nbytes <= lowest
    budget = data.draw(st.integers(max(0, lowest - 2), lowest + 4))
    outcome = oracle.solve(Problem(graph, budget))
    chosen = in_line(
        moments, data.draw(st.lists(st.sampled_from(range(len(graph.ops))), min_size=1))
    )
    with Program("CBC") as program:
        several = MomentProgram(moments, chosen, budget, program).bound(
            Stop.after(NEVER_SECONDS), relax=False
        )
    for bound in (bound_of(moments, budget), several):
        if outcome.schedule is None:
            taken["impossible"] += 1
            assert outcome.status is Status.INFEASIBLE
        else:
            taken["possible"] += 1
            assert bound.seconds <= outcome.schedule.seconds + 1e-6 * graph.seconds


@taking(relaxed=2)
@examples(60)
@given(st.data())
def test_several_moments_say_no_less_than_each_of_them(
    taken: Counter[str], data: st.DataObject
) -> None:
    """Relaxations, too: they do not spread what runs again over the intervals."""
    graph = data.draw(small_graphs(max_forward=5))
    moments = Moments(graph)
    budget = moments.floor.nbytes + data.draw(st.integers(0, 3))
    chosen = in_line(moments, moments.promising(budget)[:4])

    def seconds(ops: list[int]) -> float:
        with Program() as program:
            return (
                MomentProgram(moments, ops, budget, program)
                .bound(Stop.after(NEVER_SECONDS), relax=True)
                .seconds
            )

    if len(chosen) > 1:
        highest = max(seconds([t]) for t in chosen)
        taken["relaxed"] += highest > graph.seconds
        assert seconds(chosen) >= highest - 1e-5 * graph.seconds


def test_moments_that_prove_nothing_are_not_looked_at() -> None:
    """Gradients of weights are where most bytes are, but nothing runs after them."""
    length = 40
    forward = [Op(f"f{i}", "op", (i - 1,) if i else (), (i,), 1.0) for i in range(length)]
    tensors = [Tensor(f"f{i}", 1, 1) for i in range(length)]
    backward: list[Op] = []
    before = length - 1
    for i in reversed(range(1, length)):
        for kind, size in (("weight", 20), ("other", 20), ("data", 1)):
            backward.append(Op(f"{kind}{i}", "op", (before, i - 1), (len(tensors),), 1.0))
            tensors.append(Tensor(f"{kind}{i}", size, size))
        before = len(tensors) - 1
    graph = TrainingGraph((*forward, *backward), tuple(tensors), (before,), length)
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    bound = bound_of(Moments(graph), peak // 2)
    assert bound.seconds >= graph.seconds + 10


def test_of_other_ops_what_they_read_or_have_written_is_there() -> None:
    """While c is written, s must wait for k, or k for f: there is no room for either."""
    ops = (
        Op("s", "op", (), (0,), 5.0),
        Op("a", "op", (0,), (1,), 1.0),
        Op("c", "op", (1,), (2,), 1.0),
        Op("k", "op", (0,), (3,), 1.0),
        Op("f", "op", (2, 3), (4,), 1.0),
    )
    sizes = zip(ops, (1, 3, 3, 1, 1), strict=True)
    graph = TrainingGraph(ops, tuple(Tensor(op.name, n, n) for op, n in sizes), (4,), len(ops))
    bound = bound_of(Moments(graph), 6)
    optimum = BruteForceSequences(any_order=True).solve(Problem(graph, 6)).schedule
    assert optimum is not None
    assert bound.seconds == pytest.approx(optimum.seconds) == graph.seconds + 5.0


def test_what_an_op_writes_over_runs_again_if_it_is_needed_later() -> None:
    """While the loss writes two gradients, the output has no room beside both; later it has."""
    over = (Handover(0, 0, alias=False),)
    ops = (
        Op("output", "forward", (), (0,), 2.0),
        Op("loss", "backward", (0,), (1, 2), 1.0, False, differentiates=0, handovers=over),
        Op("weights", "backward", (1,), (3,), 1.0, False),
    )
    sizes = {"output": 10, "gradient": 10, "label": 10, "weights": 1}
    graph = TrainingGraph(ops, tensors(**sizes), (0, 3), nforward=1)
    budget = 22 * UNIT
    optimum = BruteForceSequences(any_order=True).solve(Problem(graph, budget)).schedule
    assert optimum is not None
    assert optimum.seconds == graph.seconds + 2.0
    bound = bound_of(Moments(graph), budget)
    assert bound.seconds == pytest.approx(optimum.seconds, rel=1e-5)


def test_the_floor_names_what_forces_it() -> None:
    graph = unit_chain(8)
    floor = Moments(graph).floor
    assert floor.op is not None
    op = graph.ops[floor.op]
    assert floor.nbytes == 3 * UNIT  # a backward op reads two tensors and writes one
    assert set(floor.tensors) == {*op.inputs, *op.outputs}


def test_below_the_floor_the_bound_is_infinite() -> None:
    graph = unit_chain(8)
    assert math.isinf(bound_of(Moments(graph), 2 * UNIT - 1).seconds)


def test_the_end_of_the_step_may_prove_that_nothing_fits() -> None:
    """At the first run of each op the other may still have to run."""
    ops = tuple(Op(name, "op", (), (place,), 1.0) for place, name in enumerate("pq"))
    graph = TrainingGraph(ops, tensors(p=2, q=3), heads=(0, 1), nforward=2)
    assert Moments(graph).floor.op is None
    assert math.isinf(bound_of(Moments(graph), 5 * UNIT - 1).seconds)
    assert bound_of(Moments(graph), 5 * UNIT).seconds == graph.seconds


def _split() -> TrainingGraph:
    """The parts of an array are read in turn, then backwards; b2 writes a ``weight`` at once."""
    names = ("x0", "x1", "x2", "h0", "h1", "h2", "g2", "weight", "g1", "g0")
    sizes = tensors(**{name: {"x": 4, "w": 6}.get(name[0], 1) for name in names})

    def op(name: str, inputs: str, outputs: str) -> Op:
        reads, writes = (tuple(map(names.index, text.split())) for text in (inputs, outputs))
        return Op(name, "op", reads, writes, 1.0, recomputable=name[0] != "b")

    ops = (
        *(op("split", "", "x0 x1 x2"), op("f0", "x0", "h0"), op("f1", "x1 h0", "h1")),
        *(op("f2", "x2 h1", "h2"), op("b2", "h2 x2", "g2 weight")),
        *(op("b1", "g2 x1", "g1"), op("b0", "g1 x0", "g0")),
    )
    return TrainingGraph(ops, sizes, (names.index("weight"), names.index("g0")), nforward=4)


def test_what_has_too_many_outputs_for_gradients_beside_cannot_run_again() -> None:
    """After b2, the weight's gradient stays, and g2 or what comes of it; else parts could go."""
    graph = _split()
    moments, lowest = Moments(graph), 19 * UNIT
    least = BruteForceSequences(any_order=True).solve(Problem(graph, None)).schedule
    assert least is not None
    assert simulate(least).peak_nbytes == lowest
    split, b2 = 0, 4
    assert moments.again.staying_nbytes({b2}) == 7 * UNIT
    assert not moments.again.may_run(split, (12 - 1) * UNIT)
    assert moments.again.may_run(split, 12 * UNIT)
    assert moments.floor.nbytes < lowest - UNIT
    for budget in range(moments.floor.nbytes, lowest, UNIT):
        assert math.isinf(bound_of(moments, budget).seconds)
    bound = bound_of(moments, lowest)
    assert bound.seconds == pytest.approx(least.seconds, rel=1e-5)


def test_a_budget_for_everything_costs_nothing() -> None:
    graph = unit_chain(8)
    bound = bound_of(Moments(graph), simulate(Schedule.unplanned(graph)).peak_nbytes)
    assert (bound.seconds, bound.ops) == (graph.seconds, ())


def test_one_moment_proves_the_optimum_of_a_chain_that_drops_one_tensor() -> None:
    graph = unit_chain(8)
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    bound = bound_of(Moments(graph), peak - UNIT)
    optimum = BruteForceSequences(max_ops=20).solve(Problem(graph, peak - UNIT)).schedule
    assert optimum is not None
    assert bound.seconds == pytest.approx(optimum.seconds, rel=1e-5)
    assert bound.seconds > graph.seconds
    assert len(bound.drops[0]) == 1


@taking(refined=5)
@examples(60)
@given(st.data())
def test_refined_schedules_fit_and_cost_no_less_than_the_bound(
    taken: Counter[str], data: st.DataObject
) -> None:
    graph = data.draw(small_graphs(max_forward=4))
    least = BruteForceSequences().solve(Problem(graph, None)).schedule
    assert least is not None
    budget = simulate(least).peak_nbytes + data.draw(st.integers(0, 3))
    optimum = BruteForceSequences(any_order=True).solve(Problem(graph, budget)).schedule
    assert optimum is not None
    highest = 0.0
    proving = ProofOptions(looks=data.draw(st.sampled_from([math.inf, 1e3, 1.0])))
    for fact in refine_moments(graph, budget, Stop(math.inf), proving):
        assert highest <= fact.bound_seconds <= optimum.seconds + 1e-6 * graph.seconds
        highest = fact.bound_seconds
        if fact.schedule is not None:
            taken["refined"] += 1
            assert validate(fact.schedule).valid
            assert simulate(fact.schedule).peak_nbytes <= budget


def test_refinement_ends_after_so_many_looks() -> None:
    graph, budget, stop = unit_chain(24), 6 * UNIT, Stop.after(NEVER_SECONDS)
    whole = list(refine_moments(graph, budget, stop, ProofOptions()))
    begun = list(refine_moments(graph, budget, stop, ProofOptions(looks=1.0)))
    assert 1 == len(begun) < len(whole)
    assert graph.seconds < begun[0].bound_seconds <= whole[-1].bound_seconds
    assert begun == list(refine_moments(graph, budget, stop, ProofOptions(looks=1.0)))
    assert not stop.cut_by_clock


def test_refinement_proves_that_nothing_fits() -> None:
    (fact,) = refine_moments(unit_chain(8), 2 * UNIT - 1, Stop(math.inf), ProofOptions())
    assert fact.schedule is None
    assert math.isinf(fact.bound_seconds)


def test_an_answer_keeps_what_only_recomputation_reads() -> None:
    """For b1 f1 runs again, which needs what f0 has written: no backward op reads that."""
    sizes = (1, 4, 4, 1, 4, 1)
    ops = (
        Op("f0", "op", (), (0,), 9.0),
        Op("f1", "op", (0,), (1,), 1.0),
        Op("f2", "op", (1,), (2,), 1.0),
        Op("loss", "loss", (2,), (3,), 1.0),
        Op("b2", "op", (2, 3), (4,), 1.0),
        Op("b1", "op", (1, 4), (5,), 1.0),
    )
    tensors = tuple(Tensor(f"t{i}", size * 1024, size * 256) for i, size in enumerate(sizes))
    graph = TrainingGraph(ops, tensors, (5,), 4)
    first = next(refine_moments(graph, 10 * 1024, Stop(math.inf), ProofOptions()))
    assert first.schedule is not None
    assert validate(first.schedule, 10 * 1024).valid
    assert first.schedule.seconds == pytest.approx(15.0)
    assert first.bound_seconds == pytest.approx(15.0, rel=1e-5)
