"""Schedules in one piece of memory: what is alive together lies apart, and little is lost."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.branches import taking
from helpers.graphs import schedules, tensors, training_graphs, unit_chain
from helpers.networks import Network, hinted_resnet, unrolled_lstm
from helpers.schedules import random_schedule
from helpers.small_graphs import small_graphs
from helpers.special_networks import transformer, unet
from memplan.errors import GraphError, ScheduleError
from memplan.memory import packing
from memplan.memory.memory import Packed
from memplan.memory.offsets.buffers import Buffers
from memplan.memory.offsets.placement import Placement, place
from memplan.memory.packing import ALIGNMENT, Packing, check_packing, pack
from memplan.planning.realisation import trace
from memplan.step.graph import Handover, Op, Tensor, TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.step.validate import _shared, _uses
from memplan.strategies.base import Problem


def enlarged(graph: TrainingGraph, factor: int) -> TrainingGraph:
    """``graph`` with larger tensors, so that not all take as much as one element."""
    found = [
        dataclasses.replace(t, nbytes=factor * t.nbytes, nelements=factor * t.nelements)
        for t in graph.tensors
    ]
    return dataclasses.replace(graph, tensors=tuple(found))


@st.composite
def packed(draw: st.DrawFn) -> tuple[Schedule, Packing]:
    graph = draw(st.one_of(training_graphs(8), small_graphs(6)))
    schedule = draw(schedules(enlarged(graph, draw(st.sampled_from((1, 100, 177))))))
    return schedule, pack(schedule)


def flaw(schedule: Schedule, found: Packing) -> str | None:
    """What is wrong with where tensors lie, if anything, by the rules of the second opinion."""
    tensors, uses = schedule.graph.tensors, _uses(schedule)
    placed = []
    for group in _shared(schedule, uses):
        offsets = {found.offsets[output] for output in group}
        if len(offsets) != 1:
            return f"{group} do not share their memory"
        alive = {step for member in group for step in (member[0], *uses[member])}
        begin = offsets.pop()
        end = begin + max(tensors[tensor].nbytes for _, tensor in group)
        if begin < 0 or begin % ALIGNMENT or end > found.nbytes:
            return f"{group} at {begin}"
        placed.append((group, min(alive), max(alive), begin, end))
    for (one, *a), (other, *b) in combinations(placed, 2):
        if a[0] <= b[1] and b[0] <= a[1] and a[2] < b[3] and b[2] < a[3]:
            return f"{one} and {other} overlap"
    return None


@examples(100)
@given(packed())
def test_what_is_alive_together_lies_apart(case: tuple[Schedule, Packing]) -> None:
    schedule, found = case
    assert flaw(schedule, found) is None
    assert found.nbytes >= simulate(schedule).peak_nbytes
    assert found.offsets.keys() == {
        (step, tensor)
        for step, op in enumerate(schedule.ops)
        for tensor in schedule.graph.ops[op].outputs
        if schedule.graph.tensors[tensor].nbytes
    }


def aligned(schedule: Schedule) -> Schedule:
    """``schedule`` with tensors of the size that they take in packed memory."""
    found = [
        dataclasses.replace(tensor, nbytes=-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        for tensor in schedule.graph.tensors
    ]
    graph = dataclasses.replace(schedule.graph, tensors=tuple(found))
    return dataclasses.replace(schedule, graph=graph)


@pytest.mark.parametrize(
    "network",
    [hinted_resnet(), transformer(), unet(), unrolled_lstm()],
    ids=["resnet", "transformer", "unet", "lstm"],
)
def test_little_more_than_the_peak_is_taken(network: Network) -> None:
    graph = trace(network[0], shapes=network[1], realisation="packed").graph
    for seed in range(3):
        schedule = random_schedule(graph, seed)
        packing = pack(schedule)
        assert flaw(schedule, packing) is None
        assert packing.nbytes <= 1.02 * simulate(aligned(schedule)).peak_nbytes


def reading(sizes: list[int], rng: random.Random, *, within: int) -> Schedule:
    """Tensors of these sizes, each of which reads two of so many before it."""
    count = len(sizes)
    ops = [
        Op(f"op{i}", "op", tuple(rng.sample(range(max(0, i - within), i), min(i, 2))), (i,), 1.0)
        for i in range(count)
    ]
    made = tuple(Tensor(f"t{i}", size, size // 4) for i, size in enumerate(sizes))
    return Schedule.unplanned(TrainingGraph(tuple(ops), made, (count - 1,), count))


def crowded(seed: int) -> Schedule:
    """Many tensors of many sizes that live for random times."""
    rng = random.Random(seed)
    sizes = [rng.choice((256, 512, 768, 1280, 2048)) for _ in range(40)]
    return reading(sizes, rng, within=12)


def test_the_peak_is_reached_by_the_complete_search(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [crowded(seed) for seed in range(8)]
    best = [pack(schedule) for schedule in made]
    for name in ("LONG", "QUICK"):
        monkeypatch.setattr(packing, name, packing.AT_ONCE)
    first = [pack(crowded(seed)) for seed in range(8)]
    peaks = [simulate(schedule).peak_nbytes for schedule in made]
    assert [found.nbytes for found in best] == peaks
    assert all(found.proved for found in best)
    assert [found.proved for found in first].count(False) >= 3
    assert [found.bound_nbytes for found in first] == peaks


def test_offsets_are_looked_for_in_the_budget_and_roughly_with_less_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def noted(buffers: Buffers, **options: int) -> Placement:
        asked.append(options)
        return place(buffers, **options)

    monkeypatch.setattr(packing, "place", noted)
    Packed().excess(crowded(0), 1, roughly=True)
    Packed().excess(crowded(0), 1)
    Packed().nbytes(crowded(0))
    capacities = [options["capacity_nbytes"] for options in asked]
    assert capacities[:4] == [1, 1, 1, 1]
    assert set(capacities[4:]) == {None}
    at_once, rough, again, thorough = [(o["nsquares"], o["nnodes"]) for o in asked[:4]]
    assert at_once == again == (0, 0)
    assert 0 < rough[0] < thorough[0]
    assert 0 < rough[1] < thorough[1]


@pytest.mark.long
def test_what_a_search_in_the_budget_has_found_is_the_packing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no more than what was found without a budget, by less work."""
    monkeypatch.setattr(packing, "THOROUGH", packing._Work(0, 1_500_000_000))

    def made() -> Schedule:
        rng = random.Random(13)
        sizes = [ALIGNMENT * rng.randint(1, 40) for _ in range(200)]
        return reading(sizes, rng, within=30)

    fewest, schedule = pack(made()).nbytes, made()
    budget = simulate(schedule).peak_nbytes
    assert fewest > budget
    assert Packed().excess(schedule, budget) == 0
    found = Packed().packing(schedule)
    assert Packed().nbytes(schedule) == found.nbytes == budget
    assert found.proved
    assert flaw(schedule, found) is None


def test_what_is_far_over_the_budget_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = crowded(0)
    peak = simulate(schedule).peak_nbytes
    assert Packed().is_within(schedule, Packed().nbytes(schedule))
    monkeypatch.setattr(packing, "place", lambda *_, **__: pytest.fail("it is packed"))
    assert not Packed().is_within(crowded(0), peak - 1)
    assert Problem(schedule.graph, peak - 1, memory=Packed()).unplanned() is None


def test_what_fits_by_the_shorter_search_fits() -> None:
    for seed in range(8):
        schedule = crowded(seed)
        least, peak = Packed().nbytes(schedule), simulate(schedule).peak_nbytes
        assert Packed().excess(schedule, peak - 1) > 0
        first = peak + Packed().excess(crowded(seed), peak)
        assert least <= first
        assert Packed().excess(schedule, first) == 0


def test_the_same_schedule_is_always_packed_the_same_way() -> None:
    schedule = crowded(3)
    packing = pack(schedule)
    np.random.seed(5)
    assert pack(schedule) == packing


@pytest.mark.parametrize("alias", [False, True])
def test_a_hand_over_shares_the_offset(alias: bool) -> None:
    def offsets(*handovers: Handover, last_reads: int) -> list[int]:
        ops = (
            Op("a", "op", (), (0,), 1.0),
            Op("b", "op", (0,), (1,), 1.0, handovers=handovers),
            Op("c", "op", (last_reads,), (2,), 1.0),
        )
        graph = TrainingGraph(ops, tensors(a=100, b=100, c=1), (1, 2), 3)
        found = pack(Schedule.unplanned(graph)).offsets
        return [found[0, 0], found[1, 1]]

    assert len(set(offsets(last_reads=1))) == 2
    assert len(set(offsets(Handover(0, 0, alias), last_reads=1))) == 1
    # Where the input lives on, only its alias may lie there.
    assert len(set(offsets(Handover(0, 0, alias), last_reads=0))) == (1 if alias else 2)


def test_more_bytes_than_compiled_code_can_count_are_refused() -> None:
    """Up to there offsets are those of small tensors, as often as large."""

    def packed(nelements: int) -> Packing:
        schedule = Schedule.unplanned(unit_chain(150, nelements))
        return pack(schedule, segment_nbytes=nelements << 12)

    small, large = packed(2**21), packed(2**41)
    assert large.nbytes == small.nbytes << 20
    assert large.offsets == {place: offset << 20 for place, offset in small.offsets.items()}
    with pytest.raises(GraphError, match="bytes in all; offsets can be found for 301 of them"):
        packed(2**42)


def test_nothing_to_place() -> None:
    assert pack(Schedule(TrainingGraph((), (), (), 0), (), (), ())) == Packing(0, {}, 0)
    graph = TrainingGraph((Op("a", "op", (), (0,), 1.0),), tensors(a=0), (0,), 1)
    assert pack(Schedule.unplanned(graph)) == Packing(0, {}, 0)


@examples(30)
@given(st.data())
def test_no_tensor_lies_across_segments(data: st.DataObject) -> None:
    schedule = data.draw(schedules(enlarged(data.draw(training_graphs(8)), 100)))
    sizes = [tensor.nbytes for tensor in schedule.graph.tensors]
    segment = ALIGNMENT * -(-max(sizes) // ALIGNMENT)
    packing = pack(schedule, segment_nbytes=segment)
    assert flaw(schedule, packing) is None
    for (_, tensor), offset in packing.offsets.items():
        end = offset + sizes[tensor]
        assert not sizes[tensor] or offset // segment == (end - 1) // segment


@taking(right=2, wrong=5)
@examples(200)
@given(packed(), st.data())
def test_a_tensor_that_is_moved_is_noticed(
    taken: Counter[str], case: tuple[Schedule, Packing], data: st.DataObject
) -> None:
    schedule, found = case
    check_packing(schedule, found)
    keys = [key for key in found.offsets if schedule.graph.tensors[key[1]].nbytes]
    if not keys:
        return
    moved = found.offsets[data.draw(st.sampled_from(keys))]
    place = data.draw(st.integers(-1, found.nbytes // ALIGNMENT)) * ALIGNMENT
    place += data.draw(st.sampled_from((0, 0, 0, 1)))
    offsets = {key: place if offset == moved else offset for key, offset in found.offsets.items()}
    other = dataclasses.replace(found, offsets=offsets)
    if flaw(schedule, other) is None:
        taken["right"] += 1
        check_packing(schedule, other)
    else:
        taken["wrong"] += 1
        with pytest.raises(ScheduleError, match="packing"):
            check_packing(schedule, other)


def test_a_packing_of_another_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="packing"):
        check_packing(crowded(3), pack(crowded(4)))


def test_more_work_never_ends_in_more_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to be within a budget is the packing that a plan gets."""

    def searched(_: Schedule, __: int, work: object, capacity_nbytes: int | None = None) -> Packing:
        within = {packing.ROUGH: 12, packing.THOROUGH: 11}
        fewest = {packing.QUICK: 13, packing.LONG: 14}
        nbytes = fewest if capacity_nbytes is None else within
        return Packing(nbytes.get(work, 15), {}, 8)  # type: ignore[call-overload]

    monkeypatch.setattr(packing, "_searched", searched)
    schedule = Schedule.unplanned(unit_chain(3))
    assert pack(schedule).nbytes == 13
    assert packing.nbytes_within(schedule, 14) == 13
    assert packing.nbytes_within(schedule, 9, roughly=True) == 12
    assert pack(schedule).nbytes == 12
    assert packing.nbytes_within(schedule, 9) == pack(schedule).nbytes == 11
    assert not pack(schedule).proved
