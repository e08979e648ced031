"""The integer program over flags against the exact replay.

A bound is proven only if no row of the program asks for more than is alive. With the flags fixed,
the least that every row allows is compared with the replay, moment by moment.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, combinations

import mip
import mxnet as mx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from mxnet.gluon.model_zoo import vision

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import (
    UNIT,
    in_mxnets_order,
    layered_graphs,
    mirrored_graphs,
    tensors,
    training_graphs,
    unit_chain,
)
from helpers.networks import Network, unrolled_lstm
from helpers.planning import NEVER_SECONDS
from memplan.errors import ScheduleError
from memplan.mxnet.trace.build import trace
from memplan.programs import mirror_refinement
from memplan.programs.linear import Linear
from memplan.programs.mirror_program import MirrorProgram
from memplan.programs.mirror_refinement import _moments, refine_flags
from memplan.programs.proof import ProofOptions
from memplan.programs.solver import SOLVERS, Program
from memplan.step.costs import with_costs
from memplan.step.graph import Handover, Op, TrainingGraph
from memplan.step.mirroring import flaggable, mirror
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

Moment = tuple[int, int | None]

TOLERANCE = 0.5  # bytes; the smallest tensor has four


class Measured(MirrorProgram):
    """A program with fixed flags, whose rows are measured instead of kept."""

    def __init__(self, graph: TrainingGraph, flags: frozenset[int]) -> None:
        super().__init__(graph, 0, Program())
        fix(self, flags)
        self.rows: list[Linear] = []

    def _add_row(self, nbytes: Linear) -> None:
        self.rows.append(nbytes)

    def least_nbytes(self, moments: Sequence[Moment]) -> list[float]:
        """The fewest bytes that the row of every moment allows."""
        for op, copy in moments:
            assert self.add_moment(op, copy)
        terms = Linear.total(self.rows).terms
        variables = self.program.variables
        self.program.model.objective = mip.LinExpr(
            [variables[number] for number in terms], list(terms.values())
        )
        solved = self.program.solve(Stop.after(NEVER_SECONDS), relax=True)
        assert solved.values is not None
        return [row.value(dict(enumerate(solved.values))) for row in self.rows]


def fix(program: MirrorProgram, flags: frozenset[int]) -> None:
    for op, number in program.number.items():
        variable = program.program.variables[number]
        variable.lb = variable.ub = float(op in flags)


def check(graph: TrainingGraph, flags: frozenset[int], *, exact: bool, at_most: int = 10**6) -> int:
    """Compare the rows of (at most so many) moments with the replay; how many were of copies."""
    schedule = mirror(graph, flags)
    live = simulate(schedule).live_nbytes
    moments = list(_moments(schedule))
    assert len(moments) == len(schedule.ops)
    moments = random.Random(0).sample(moments, min(at_most, len(moments)))
    found = Measured(graph, flags).least_nbytes([(op, copy) for _, op, copy in moments])
    for (step, op, copy), least in zip(moments, found, strict=True):
        at = f"step {step}, op {op}, copy {copy}"
        assert least <= live[step] + TOLERANCE, at
        if exact and copy is None:
            assert least == pytest.approx(live[step], abs=TOLERANCE), at
    return sum(copy is not None for _, _, copy in moments)


def tame(graph: TrainingGraph) -> TrainingGraph:
    """``graph`` without the hand-overs of which the program does not know whether they are taken.

    Two that compete for an input or an output, gradients that are aliases of forward tensors,
    those of what has an alias, and those to outputs that nobody reads, or only backward ops that
    may read copies.
    """
    ops = []
    aliases = [
        (op.inputs[h.input], op.outputs[h.output])
        for op in graph.ops
        for h in op.handovers
        if h.alias
    ]
    shared = {tensor for pair in aliases for tensor in pair}
    for index, op in enumerate(graph.ops):
        kept: list[Handover] = []
        for handover in op.handovers:
            source, target = op.inputs[handover.input], op.outputs[handover.output]
            readers = graph.readers[target]
            if not (
                any(handover.input == h.input or handover.output == h.output for h in kept)
                or (handover.alias and graph.producer[source] < graph.nforward <= index)
                or (not handover.alias and source in shared)
                or not (
                    target in graph.heads
                    or any(r < graph.nforward or index >= graph.nforward for r in readers)
                )
            ):
                kept.append(handover)
        ops.append(dataclasses.replace(op, handovers=tuple(kept)))
    return dataclasses.replace(graph, ops=tuple(ops))


@st.composite
def flagged_graphs(draw: st.DrawFn) -> tuple[TrainingGraph, frozenset[int]]:
    drawn = (mirrored_graphs(), training_graphs().map(in_mxnets_order), layered_graphs())
    graph = draw(st.one_of(drawn))
    may = flaggable(graph)
    return graph, frozenset(draw(st.sets(st.sampled_from(may))) if may else ())


@given(flagged_graphs())
def test_no_row_asks_for_more_than_is_alive(flagged: tuple[TrainingGraph, frozenset[int]]) -> None:
    check(*flagged, exact=False)


@given(flagged_graphs())
def test_rows_of_ops_in_their_place_are_exact(
    flagged: tuple[TrainingGraph, frozenset[int]],
) -> None:
    graph, flags = flagged
    check(tame(graph), flags, exact=True)


@taking(fits=20)
@examples(200, quick=100, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.one_of(layered_graphs(max_forward=6), mirrored_graphs(max_forward=5)))
def test_what_fits_to_the_byte_is_not_proved_infeasible(
    taken: Counter[str], graph: TrainingGraph
) -> None:
    """With elements of one byte: a row in MiB would drown in the solver's tolerance."""
    elements = [dataclasses.replace(t, nbytes=t.nbytes // UNIT) for t in graph.tensors]
    graph = dataclasses.replace(graph, tensors=tuple(elements))
    sets = chain.from_iterable(combinations(flaggable(graph), n) for n in range(len(graph.ops)))
    peaks = [simulate(mirror(graph, frozenset(flags))).peak_nbytes for flags in sets]
    for budget in sorted({peak for peak in peaks if peak < peaks[0]}):
        taken["fits"] += 1
        facts = refine_flags(graph, budget, Stop.after(NEVER_SECONDS), ProofOptions())
        assert not any(math.isinf(fact.bound_seconds) for fact in facts)


def test_a_copy_runs_when_it_is_asked_for_not_when_it_is_needed() -> None:
    f0, f1, loss, b1, b0 = range(5)
    ops = (
        Op("f0", "f", (), (f0,), 1.0),
        Op("f1", "f", (f0,), (f1,), 1.0),
        Op("loss", "f", (f1,), (loss,), 1.0),
        Op("b_loss", "b", (f1,), (b1,), 1.0, False, loss, (loss,)),
        # The forward tensor comes first: MXNet fetches it before it computes the gradient.
        Op("b1", "b", (f0, b1), (b0,), 1.0, False, f1, (f1,)),
    )
    sizes = {"f0": 5, "f1": 2, "loss": 1, "gradient1": 2, "gradient0": 5}
    graph = TrainingGraph(ops, tensors(**sizes), heads=(loss, b0), nforward=3)
    schedule = mirror(graph, {f0, f1})
    assert [graph.ops[op].name for op in schedule.ops[3:]] == ["f0", "b_loss", "f1", "b1"]
    assert check(graph, frozenset({f0, f1}), exact=True) == 2


def test_of_two_names_for_one_buffer_a_copy_may_have_one() -> None:
    e, alias, v, loss, b_v = range(5)
    ops = (
        Op("e", "f", (), (e,), 1.0),
        Op("alias", "f", (e,), (alias,), 1.0, False, handovers=(Handover(0, 0, True),)),
        Op("v", "f", (e, alias), (v,), 1.0),
        Op("loss", "f", (v,), (loss,), 1.0),
        Op("b_loss", "b", (v,), (b_v,), 1.0, False, loss, (loss,)),
        # Reads the copy of e, which it may overwrite, and the original by its other name.
        Op("b_v", "b", (b_v, e, alias), (5,), 1.0, False, v, (v,), (Handover(1, 0, False),)),
    )
    sizes = {"e": 5, "alias": 5, "v": 2, "loss": 1, "gradient": 2, "parameter": 5}
    graph = TrainingGraph(ops, tensors(**sizes), heads=(loss, 5), nforward=4)
    check(graph, frozenset({e, v}), exact=True)
    check(graph, frozenset({v}), exact=False)


@taking(row=20)
@examples(50)
@given(flagged_graphs())
def test_the_row_of_a_copy_that_runs_elsewhere_asks_for_nothing(
    taken: Counter[str],
    flagged: tuple[TrainingGraph, frozenset[int]],
) -> None:
    graph, flags = flagged
    here = {(op, copy) for _, op, copy in _moments(mirror(graph, flags))}
    backward = range(graph.nforward, len(graph.ops))
    moments = [(op, copy) for op in backward for copy in flaggable(graph)]
    elsewhere = [moment for moment in moments if moment not in here]
    for least in Measured(graph, flags).least_nbytes(elsewhere) if elsewhere else ():
        taken["row"] += 1
        assert least <= TOLERANCE


@examples(100)
@given(flagged_graphs())
def test_the_objective_is_the_time_of_the_copies(
    flagged: tuple[TrainingGraph, frozenset[int]],
) -> None:
    graph, flags = flagged
    program = MirrorProgram(graph, 10**6, Program())
    fix(program, flags)
    seconds = program.program.solve(Stop.after(NEVER_SECONDS), relax=True).value / program.scale
    assert seconds == pytest.approx(mirror(graph, flags).seconds - graph.seconds, abs=1e-6)


def resnet() -> Network:
    scores = vision.resnet18_v1()(mx.sym.Variable("data"))
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (2, 3, 32, 32)}


def attention(layers: int = 2, width: int = 16) -> Network:
    """Self-attention: the gradient of batch_dot reads a forward tensor before a gradient."""
    body = mx.sym.Variable("data")
    for layer in range(layers):
        query, key, value = (
            mx.sym.FullyConnected(body, num_hidden=width, flatten=False, name=f"{part}{layer}")
            for part in ("query", "key", "value")
        )
        scores = mx.sym.softmax(mx.sym.batch_dot(query, key, transpose_b=True) * 0.25)
        found = mx.sym.batch_dot(scores, value)
        body = body + mx.sym.LeakyReLU(found, act_type="gelu")
        body = mx.sym.reshape(body, shape=(0, 0, -1)) + mx.sym.BlockGrad(body)
    scores = mx.sym.FullyConnected(mx.sym.mean(body, axis=1), num_hidden=5)
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (2, 8, width)}


@pytest.mark.parametrize(
    "network",
    # Nine steps: the gradients of a shared weight are added up one after the other from eight on,
    # so that backward ops wait for each other.
    [
        pytest.param(resnet, marks=pytest.mark.long),
        pytest.param(lambda: unrolled_lstm(steps=9, layers=1), marks=pytest.mark.long),
        attention,
    ],
    ids=["resnet18_v1", "unrolled_lstm", "attention"],
)
def test_real_networks(network: Callable[[], Network]) -> None:
    symbol, shapes = network()
    graph = trace(symbol, shapes=shapes).graph
    rng = random.Random(1)
    copies = 0
    for share in (0.4, 0.8):
        flags = frozenset(op for op in flaggable(graph) if rng.random() < share)
        copies += check(graph, flags, exact=True, at_most=100)
    assert copies > 20


def test_the_most_of_all_rows_is_the_peak_of_the_unplanned_step() -> None:
    graph = dataclasses.replace(unit_chain(4), heads=(4, 8))
    program = Measured(graph, frozenset())
    moments = [(op, None) for op in range(len(graph.ops))]
    most = max(program.least_nbytes(moments))
    assert most == pytest.approx(simulate(mirror(graph, frozenset())).peak_nbytes, abs=TOLERANCE)
    assert not any(program.add_moment(op) for op, _ in moments)


@pytest.mark.parametrize("solver", SOLVERS)
def test_solutions_that_are_forbidden_do_not_come_again(solver: str) -> None:
    graph = unit_chain(3)  # f0, f1, f2 and the loss may run again, at a second each
    program = MirrorProgram(graph, 10**6, Program(solver))
    found = []
    bounds = []
    for _ in range(3):
        solution = program.solve(Stop.after(NEVER_SECONDS))
        assert not solution.infeasible
        assert solution.flags is not None
        found.append(solution.flags)
        bounds.append(solution.bound_seconds)
        program.forbid(solution.flags)
    # The loss has no backward op here, so that its copy never runs even if it is flagged.
    assert set(found[:2]) == {frozenset(), frozenset({3})}
    assert found[2] not in found[:2]
    assert bounds == pytest.approx([0.0, 0.0, 1.0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_budget_below_one_op_is_infeasible(solver: str) -> None:
    graph = unit_chain(3)
    program = MirrorProgram(graph, 2 * UNIT - 1, Program(solver))
    program.add_moment(graph.nforward)
    solution = program.solve(Stop.after(NEVER_SECONDS))
    assert solution.infeasible
    assert solution.flags is None
    assert solution.bound_seconds == 0.0


def test_all_solves_together_have_so_many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol, shapes = attention()
    graph = with_costs(trace(symbol, shapes=shapes).graph, "roofline:v100")
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * 6 // 10
    stop, bounds = Stop.after(NEVER_SECONDS), []
    for looks in (1.0, mirror_refinement.LOOKS):
        monkeypatch.setattr(mirror_refinement, "LOOKS", looks)
        *_, last = refine_flags(graph, budget, stop, ProofOptions(effort=0.25))
        bounds.append(last.bound_seconds)
        assert (last.schedule is None) is (looks == 1.0)
    assert graph.seconds <= bounds[0] <= bounds[1]
    assert not stop.cut_by_clock


def test_a_graph_in_another_order_is_refused() -> None:
    ops = (
        Op("late", "f", (), (0,)),
        Op("early", "f", (), (1,)),
        Op("loss", "f", (1, 0), (2,)),
    )
    graph = TrainingGraph(ops, tensors(a=1, b=1, c=1), heads=(2,), nforward=3)
    with pytest.raises(ScheduleError, match=r"'early' comes 1th in the graph, but .* run it 0th"):
        MirrorProgram(graph, 100, Program())
    assert MirrorProgram(in_mxnets_order(graph), 100, Program()).add_moment(0)
