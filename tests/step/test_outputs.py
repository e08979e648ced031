"""An output is a step and a tensor's index: names and objects may be the same."""

from __future__ import annotations

from memplan.memory.packing import ALIGNMENT, pack
from memplan.step.graph import Op, Tensor, TrainingGraph
from memplan.step.liveness import lives
from memplan.step.schedule import Schedule


def twins(first: Tensor, second: Tensor) -> Schedule:
    """An op with two outputs, of which the second is read later."""
    ops = (
        Op("split", "op", (), (0, 1), 1.0),
        Op("near", "op", (0,), (2,), 1.0),
        Op("far", "op", (1, 2), (3,), 1.0),
    )
    rest = (Tensor("near", 256, 64), Tensor("far", 256, 64))
    return Schedule.unplanned(TrainingGraph(ops, (first, second, *rest), (3,), 3))


def test_outputs_of_one_name_have_an_offset_each() -> None:
    offsets = pack(twins(Tensor("half", 100, 25), Tensor("half", 300, 75))).offsets
    assert offsets.keys() == {(0, 0), (0, 1), (1, 2), (2, 3)}
    assert abs(offsets[0, 0] - offsets[0, 1]) >= ALIGNMENT


def test_outputs_that_are_one_object_have_a_life_each() -> None:
    half = Tensor("half", 100, 25)
    found = {(life.step, life.tensor): life.last for life in lives(twins(half, half))}
    assert found == {(0, 0): 1, (0, 1): 2, (1, 2): 2, (2, 3): 3}
