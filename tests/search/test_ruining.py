"""What attempts of ruin and recreate begin with: what is taken back, and put elsewhere."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import UNIT, tensors, training_graphs, unit_chain
from memplan.search.kernels.model import WRITER
from memplan.search.kernels.moves import move_several, reorder
from memplan.search.kernels.recreating import rank
from memplan.search.kernels.ruining import AVOIDED, AVOIDING, reorder_some, ruin
from memplan.search.kernels.sequence import load
from memplan.search.kernels.state import BUDGET, CHANGES, EXCESS, LENGTH, OP, copy_state
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequences import Rules
from memplan.step.graph import Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.compiled import Compiled
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())


def loaded(graph: TrainingGraph, share: float, seed: int, *, reorder: bool = True) -> Rounds:
    """A search whose state is what a round has found in this share of the peak, or the step."""
    budget = int(share * simulate(Schedule.unplanned(graph)).peak_nbytes)
    rules = RULES._replace(reorder=reorder)
    search = Rounds(graph, rules, seed=seed, stop=Stop.after(1e6))
    search.round(Round(False, 2.0, 0.1, recreates=True), budget)
    best = best_sequence(search.found)
    sequence = best if len(best) else search.unplanned
    load(search.model, search.state, sequence, len(sequence), budget)
    copy_state(search.state, search.ruining.now)
    return search


@examples(60)
@given(training_graphs(), st.integers(0, 100), st.floats(0.5, 1.0), st.booleans())
def test_what_is_put_elsewhere_is_legal_and_counted(
    graph: TrainingGraph, seed: int, share: float, may_reorder: bool
) -> None:
    search = loaded(graph, share, seed, reorder=may_reorder)
    model, state = search.model, search.state
    for _ in range(5):
        reorder_some(model, state)
        move_several(model, state)
    length, budget = int(state.totals[LENGTH]), int(state.totals[BUDGET])
    sequence, live = state.steps[OP, :length].copy(), state.live[:length].copy()
    excess, seconds = int(state.totals[EXCESS]), float(state.seconds[0])
    assert search.is_legal(sequence)
    load(model, state, sequence, length, budget)
    assert state.live[:length].tolist() == live.tolist()
    assert (int(state.totals[EXCESS]), round(float(state.seconds[0]), 9)) == (
        excess,
        round(seconds, 9),
    )


def two_chains(length: int) -> TrainingGraph:
    """Two chains, one behind the other, that only the last op joins."""
    ops = [
        Op(f"{name}{k}", "op", (number * length + k - 1,) if k else (), (number * length + k,), 1.0)
        for number, name in enumerate("ab")
        for k in range(length)
    ]
    ops.append(Op("last", "op", (length - 1, 2 * length - 1), (2 * length,), 1.0))
    sizes = {op.name: 1 for op in ops}
    return TrainingGraph(tuple(ops), tensors(**sizes), (2 * length,), len(ops))


def swaps(move: Compiled, attempts: int) -> int:
    """How often one move lets the second chain, of four ops, run before the first."""
    search = Rounds(two_chains(4), RULES, seed=0, stop=Stop.after(1e6))
    sequence, swapped = np.arange(10), [4, 5, 6, 7, 0, 1, 2, 3, 8, 9]
    count = 0
    for _ in range(attempts):
        load(search.model, search.state, sequence, len(sequence), 100 * UNIT)
        search.state.totals[CHANGES] = 0
        move(search.model, search.state)
        count += search.state.steps[OP, :10].tolist() == swapped
    return count


def test_a_chain_comes_before_another_one_by_one_move() -> None:
    assert swaps(reorder, 1000) == 0
    assert swaps(move_several, 1000) > 10


def test_attempts_put_several_runs_elsewhere_and_count_them() -> None:
    search = Rounds(two_chains(4), RULES, seed=0, stop=Stop.after(1e6))
    sequence, counts = np.arange(10), list[int]()
    for _ in range(300):
        load(search.model, search.state, sequence, len(sequence), 100 * UNIT)
        counts.append(reorder_some(search.model, search.state))
    assert 0 in counts
    assert max(counts) > 2


def test_in_some_attempts_what_was_taken_back_counts_more() -> None:
    search = loaded(unit_chain(32), 0.3, 0)
    state, now, weights = search.state, search.ruining.now, search.ruining.weights
    navoiding, nruins = 0, 400
    for _ in range(nruins):
        copy_state(now, state)
        ruin.py_func(search.model, state, weights)
        removed = np.bincount(now.steps[OP, : now.totals[LENGTH]], minlength=len(weights))
        removed -= np.bincount(state.steps[OP, : state.totals[LENGTH]], minlength=len(weights))
        is_more = weights > 1.0
        assert set(weights[is_more]) <= {AVOIDED}
        assert not is_more.any() or (is_more == (removed > 0)).all()
        navoiding += is_more.any()
    assert 0.6 * AVOIDING < navoiding / nruins <= 1.1 * AVOIDING


def test_what_counts_more_is_chosen_later() -> None:
    graph = unit_chain(16)
    search = Rounds(graph, RULES, seed=0, stop=Stop.after(1e6))
    model, state, room = search.model, search.state, search.ruining
    load(model, state, search.unplanned, len(search.unplanned), 4 * UNIT)
    peak = int(np.argmax(state.live[: state.totals[LENGTH]]))
    count = rank(model, state, peak, 0.0, room)
    scores = room.scores[:count].copy()
    assert count > 3
    avoided = int(room.tensors[1])
    room.weights[model.tensors[WRITER, avoided]] = AVOIDED
    assert rank(model, state, peak, 0.0, room) == count
    expected = [AVOIDED if k == 1 else 1.0 for k in range(count)] * scores
    assert np.allclose(room.scores[:count], expected)
