"""Ops that write far more tensors than others: a search takes little memory, and keeps to it."""

from __future__ import annotations

import numpy as np
import pytest

from memplan.memory.memory import Blocks, Live
from memplan.search.kernels.annealing import expand
from memplan.search.kernels.arrays import USUAL_WIDTH
from memplan.search.kernels.model import sequence_model
from memplan.search.kernels.moves import MOST_CHAINED, propose
from memplan.search.kernels.sequence import load
from memplan.search.kernels.state import CHANGES, MOST_WIDTH, WIDTH, sequence_state
from memplan.search.rematerialize import repeatable
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequence_search import search
from memplan.search.sequences import Rules
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import validate
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())


def split(noutputs: int, nops: int) -> TrainingGraph:
    """One op writes so many tensors, of which a chain of so many reads one each, back and forth."""
    tensors = [Tensor(f"part{i}", 40, 10) for i in range(noutputs)]
    ops = [Op("split", "split", (), tuple(range(noutputs)), 1.0)]

    def add(*inputs: int) -> int:
        tensors.append(Tensor(f"t{len(tensors)}", 40, 10))
        output = len(tensors) - 1
        ops.append(Op(f"op{len(ops)}", "op", tuple(dict.fromkeys(inputs)), (output,), 1.0))
        return output

    outputs = [0]
    for i in range(1, nops):
        outputs.append(add(outputs[-1], i % noutputs))
    nforward, gradient = len(ops), outputs[-1]
    for i in reversed(range(1, nops)):
        gradient = add(gradient, outputs[i], i % noutputs)
    return TrainingGraph(tuple(ops), tuple(tensors), (gradient,), nforward)


def reshaped(naliases: int) -> TrainingGraph:
    """The output of the first op has so many reshapes, each of which an op reads."""
    tensors = [Tensor(str(i), 40, 10) for i in range(2 * naliases + 1)]
    ops = [Op("first", "op", (), (0,), 1.0)]
    for i in range(1, 2 * naliases, 2):
        ops.append(Op(f"r{i}", "op", (0,), (i,), 0.0, handovers=(Handover(0, 0, alias=True),)))
        ops.append(Op(f"f{i}", "op", (i, *([i - 1] if i > 1 else [])), (i + 1,), 1.0))
    return TrainingGraph(tuple(ops), tuple(tensors), (2 * naliases,), len(ops))


def nbytes(rounds: Rounds) -> int:
    """What the arrays take whose size depends on what a sequence may write."""
    memories = (*rounds.memory, *rounds.evictions._memory)
    return sum(array.nbytes for array in (*memories, rounds.room, *rounds.packing))


@pytest.mark.parametrize("wide", [split(399, 400), reshaped(399)], ids=["outputs", "aliases"])
def test_what_a_search_takes_grows_with_the_tensors_however_few_ops_they_belong_to(
    wide: TrainingGraph,
) -> None:
    narrow = Rounds(split(USUAL_WIDTH, 400), RULES, seed=0, stop=Stop.after(1e6))
    assert nbytes(Rounds(wide, RULES, seed=0, stop=Stop.after(1e6))) < 2 * nbytes(narrow)


def test_random_moves_leave_no_more_to_be_written_than_there_is_room_for() -> None:
    graph, most = split(100, 100), 1500
    model = sequence_model(graph, repeatable(graph, backward=False), reorder=True)
    state = sequence_state(model, 20 * len(graph.ops), 0)
    state.totals[MOST_WIDTH] = most
    load(model, state, np.arange(len(model.seconds)), len(model.seconds), 0)
    widest = 0
    for _ in range(3000):
        state.totals[CHANGES] = 0
        propose(model, state)
        widest = max(widest, int(state.totals[WIDTH]))
    assert most < widest <= most + MOST_CHAINED * 100
    ops = np.zeros(widest, dtype=np.int64)
    count = expand(model, state, ops)
    assert sum(len(graph.ops[op].outputs) for op in ops[:count]) == state.totals[WIDTH]


def test_at_peaks_nothing_is_recomputed_for_which_there_is_no_room() -> None:
    graph = split(30, 30)
    budget = simulate(Schedule.unplanned(graph)).peak_nbytes * 6 // 10
    lengths = []
    for most in (1000, 100):
        rounds = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6))
        rounds.state.totals[MOST_WIDTH] = most
        rounds.round(Round(False, 2.0, 0.1, recreates=True), budget)
        lengths.append(len(best_sequence(rounds.found)))
    assert lengths[0] > len(graph.ops)
    assert lengths[1] == 0


@pytest.mark.parametrize("match_ranges", [(), (1, 4)])
def test_a_search_recomputes_what_writes_many_tensors(match_ranges: tuple[int, ...]) -> None:
    graph = split(30, 30)
    memory = Blocks(match_ranges) if match_ranges else Live()
    budget = memory.nbytes(Schedule.unplanned(graph)) * 6 // 10
    rules, stop = RULES._replace(match_ranges=match_ranges), Stop.after(1e6, work=1e5)
    schedule = search(graph, budget, rules=rules, starts=[], seed=0, stop=stop, rounds=2)
    assert schedule is not None
    assert validate(schedule).valid
    assert memory.nbytes(schedule) <= budget
    assert schedule.ops.count(0) > 1
