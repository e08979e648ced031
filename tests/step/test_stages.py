"""The first run of each op and the stage of each step, by their definitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.graphs import schedules, training_graphs, unit_chain
from memplan.step.schedule import Schedule


@examples(100)
@given(st.data())
def test_stages_end_with_first_runs(data: st.DataObject) -> None:
    schedule = data.draw(schedules(data.draw(training_graphs(8))))
    nops = len(schedule.graph.ops)
    assert schedule.first_run == tuple(schedule.ops.index(op) for op in range(nops))
    for step, stage in enumerate(schedule.stage):
        done = len(set(schedule.ops[:step]))
        assert stage == min(done, nops - 1)


def test_stages_of_a_recomputation() -> None:
    schedule = Schedule.sequence(unit_chain(3), [0, 1, 2, 3, 4, 1, 5, 6, 1])
    assert schedule.stage == (0, 1, 2, 3, 4, 5, 5, 6, 6)
    assert schedule.first_run == (0, 1, 2, 3, 4, 6, 7)
