"""What is derived once."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from dataclasses import dataclass

import pytest

from helpers.graphs import unit_chain
from memplan.memory.blocks import allocate
from memplan.memory.packing import pack
from memplan.step import simulate as simulation
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.garbage import no_collections
from memplan.util.remember import forget, remembered


@dataclass(frozen=True)
class Owner:
    value: int


def test_derived_once_and_anew_for_a_copy() -> None:
    made: list[int] = []

    def derived(owner: Owner) -> int:
        return remembered(owner, "twice", lambda: made.append(owner.value) or 2 * owner.value)

    owner = Owner(3)
    assert [derived(owner), derived(owner)] == [6, 6]
    assert derived(dataclasses.replace(owner, value=4)) == 8
    assert made == [3, 4]
    assert owner == Owner(3)


def test_a_schedule_is_replayed_once_for_each_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule.unplanned(unit_chain(5))
    figures = simulate(schedule), allocate(schedule), allocate(schedule, match_range=1)
    packing = pack(schedule)

    def replayed(*_: object) -> None:
        raise AssertionError

    for module in ("memplan.step.simulate", "memplan.memory.blocks", "memplan.memory.packing"):
        monkeypatch.setattr(f"{module}.replay", replayed)
    assert simulation.simulate(schedule) is figures[0]
    assert allocate(schedule) is figures[1]
    assert allocate(schedule, match_range=1) is figures[2]
    assert pack(schedule) is packing


def test_other_costs_are_another_graph() -> None:
    graph = unit_chain(5)
    unplanned = Schedule.unplanned(graph)
    other = graph.with_seconds([2.0] * len(graph.ops))
    assert Schedule.unplanned(graph) is unplanned
    assert Schedule.unplanned(other).seconds == 2.0 * len(graph.ops)


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_go_on_where_they_did(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(KeyboardInterrupt), no_collections():
            assert not gc.isenabled()
            raise KeyboardInterrupt
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_graph_goes_without_a_look_for_garbage_once_its_schedules_are_forgotten() -> None:
    graph = unit_chain(3)
    Schedule.unplanned(graph)
    forget(graph)
    forget(graph)  # there may be nothing to forget
    reference = weakref.ref(graph)
    with no_collections():
        del graph
        assert reference() is None
