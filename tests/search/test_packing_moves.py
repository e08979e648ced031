"""Sequences that are changed so that they can be packed: what is placed, and what stays true."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples, long_except
from helpers.graphs import tensors, training_graphs
from helpers.held_out import held_out
from memplan.memory.memory import Packed
from memplan.memory.offsets.buffers import Buffers
from memplan.memory.offsets.passes import Passes
from memplan.memory.offsets.placement import NO_SEGMENTS
from memplan.memory.packing import ALIGNMENT, _Lifetimes
from memplan.search import settling
from memplan.search.kernels.annealing import BEST_SECONDS
from memplan.search.kernels.packing import (
    BEGIN,
    END,
    SIZE,
    Repacking,
    list_buffers,
    quick_nbytes,
    repack,
)
from memplan.search.kernels.sequence import load
from memplan.search.kernels.state import LENGTH, OP
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.sequences import Rules
from memplan.search.settling import EXTRA, change_to_pack, settle
from memplan.step.graph import Handover, Op, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import replay, simulate
from memplan.step.validate import validate
from memplan.util.stop import Stop

RULES = Rules(recompute_backward=False, reorder=True, match_ranges=())


def begun(graph: TrainingGraph, share: float, seed: int) -> tuple[Rounds, int]:
    """A search that has found something in this share of the unplanned peak, if it can."""
    budget = int(share * simulate(Schedule.unplanned(graph)).peak_nbytes)
    search = Rounds(graph, RULES, seed=seed, stop=Stop.after(1e6))
    search.round(Round(False, 2.0, 0.1, recreates=True), budget)
    return search, budget


def buffers_of(schedule: Schedule) -> Buffers:
    """The buffers that packing places."""
    lifetimes = _Lifetimes(schedule.graph, len(schedule.ops))
    replay(schedule, lifetimes)
    sizes, first, last = map(np.array, (lifetimes.sizes, lifetimes.first, lifetimes.last))
    return Buffers.from_lifetimes(sizes, first, last + 1)


def without_aliases(graph: TrainingGraph) -> TrainingGraph:
    """A search counts an alias of what is read twice as a tensor of its own, which is more."""
    ops = [
        dataclasses.replace(op, handovers=tuple(h for h in op.handovers if not h.alias))
        for op in graph.ops
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


@examples(50)
@given(training_graphs().map(without_aliases), st.floats(0.5, 1.0), st.integers(0, 100))
def test_buffers_and_quick_placements_are_those_of_packing(
    graph: TrainingGraph, share: float, seed: int
) -> None:
    search, _ = begun(graph, share, seed)
    sequence = best_sequence(search.found)
    if not len(sequence):
        return
    load(search.model, search.state, sequence, len(sequence), 0)
    room, buffers = search.packing, buffers_of(search.schedule(sequence))
    count, _ = list_buffers(search.model, search.state, room, 0)
    listed = room.buffers[[SIZE, BEGIN, END], :count].T.tolist()
    packed = np.array([buffers.sizes, buffers.first, buffers.last]).T.tolist()
    assert sorted(listed) == sorted(packed)
    if count:
        passes = Passes(buffers, -1, NO_SEGMENTS)
        by_size = passes.best.nbytes
        passes.run_forms()
        assert min(by_size, quick_nbytes(room, count, 0)[0]) == passes.best.nbytes


@examples(50)
@given(training_graphs(), st.floats(0.5, 1.0), st.integers(0, 100), st.floats(0.0, 0.2))
def test_what_is_changed_stays_valid_within_the_budget_and_as_cheap_as_it_must_be(
    graph: TrainingGraph, share: float, seed: int, extra: float
) -> None:
    search, budget = begun(graph, share, seed)
    sequence = best_sequence(search.found)
    if not len(sequence):
        return
    load(search.model, search.state, sequence, len(sequence), budget)
    count, _ = list_buffers(search.model, search.state, search.packing, 0)
    _, before, _ = quick_nbytes(search.packing, count, 0)
    most = search.seconds(sequence) + extra
    task = Repacking(0, 0, 50, 1_000_000, most)
    repack(search.model, search.state, search.packing, task)
    count, _ = list_buffers(search.model, search.state, search.packing, 0)
    _, after, _ = quick_nbytes(search.packing, count, 0)
    changed = search.schedule(search.state.steps[OP, : search.state.totals[LENGTH]].copy())
    assert after <= before
    assert validate(changed).valid
    assert simulate(changed).peak_nbytes <= budget
    assert changed.seconds <= most + 1e-9


@pytest.mark.parametrize("seed", long_except([7, 72], [7]))
def test_what_no_offsets_are_found_for_is_changed_until_it_fits(seed: int) -> None:
    graph, memory = dict(held_out())["wide tree"], Packed()
    search, budget = begun(graph, 0.5, seed)
    search.excess = memory.excess
    found = search.schedule(best_sequence(search.found))
    assert memory.excess(found, budget) > 0
    assert settle(search, budget) == 0
    best = search.best()
    assert best is not None
    assert validate(best).valid
    assert memory.nbytes(best) <= budget
    assert best.seconds <= found.seconds + EXTRA * graph.seconds


def test_where_something_fits_less_is_spent_on_what_is_hardly_cheaper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is changed must stay cheaper than what fits: here by half of what it was."""
    search, _ = begun(dict(held_out())["many cells"], 0.5, 0)
    cost, tasks = float(search.found.figures[BEST_SECONDS]), []

    def noted(model: object, state: object, room: object, task: Repacking) -> tuple[int, int]:
        tasks.append(task)
        return 0, 0

    monkeypatch.setattr(settling, "repack", noted)
    change_to_pack(search, 0)
    search.settled.figures[:] = search.nops, cost + 0.2 * EXTRA * search.unit, 0
    change_to_pack(search, 0)
    extra = [(task.seconds - cost) / search.unit for task in tasks]
    assert extra == pytest.approx([EXTRA, 0.1 * EXTRA])


def test_what_is_written_in_place_of_an_input_is_one_buffer() -> None:
    ops = (
        Op("read", "forward", (), (0,), 1.0),
        Op("relu", "forward", (0,), (1,), 1.0, handovers=(Handover(0, 0, alias=False),)),
        Op("loss", "forward", (1,), (2,), 1.0),
    )
    graph = TrainingGraph(ops, tensors(read=2, relu=2, loss=1), heads=(2,), nforward=3)
    search, _ = begun(graph, 1.0, 0)
    load(search.model, search.state, search.unplanned, len(search.unplanned), 0)
    assert list_buffers(search.model, search.state, search.packing, 0) == (2, 0)
    assert list_buffers(search.model, search.state, search.packing, 2 * ALIGNMENT)[0] == 0
