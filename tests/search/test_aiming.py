"""Aiming lower where other bytes count than those that a search counts."""

from __future__ import annotations

from helpers.graphs import unit_chain
from memplan.search.aiming import aim_lower
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

UNPLANNED = Schedule.unplanned(unit_chain(4))
OTHER = Schedule.unplanned(unit_chain(5))


def test_a_schedule_that_fits_a_slightly_lower_aim_again_is_left_behind() -> None:
    """It is a byte over the budget of 1000, and in the search's own bytes has 900."""
    aims = []

    def solve(aim: int, until: Stop) -> Schedule:
        del until
        aims.append(aim)
        return UNPLANNED if aim >= 950 else OTHER

    schedule = aim_lower(
        solve, 1000, lambda s, _, **__: 1 if s is UNPLANNED else 0, Stop.after(1e6)
    )
    assert schedule is OTHER
    assert aims[:4] == [1000, 999, 998, 993]


def test_nothing_in_the_first_aim_is_nothing_at_all() -> None:
    assert aim_lower(lambda *_: None, 10, lambda *_, **__: 0, Stop.after(1e6)) is None


def test_only_the_last_try_is_counted_closely() -> None:
    counted = []

    def excess(schedule: Schedule, budget_nbytes: int, *, roughly: bool = False) -> int:
        counted.append(roughly)
        return int(roughly)

    assert aim_lower(lambda *_: UNPLANNED, 1000, excess, Stop.after(1e6)) is UNPLANNED
    assert counted == [True] * (len(counted) - 1) + [False]
