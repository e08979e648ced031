"""Choosing what to drop, in the base order and in one in which losses take turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from helpers.heads import heads
from memplan.search import choosing
from memplan.search.choosing import PATIENCE_ALONE, Choosing
from memplan.search.eviction import Evictions, Start
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.util.stop import Stop

ENDLESS = Stop(math.inf)


def _seconds(graph: TrainingGraph, budget_nbytes: int) -> float | None:
    rules = {"recompute_backward": False, "reorder": True, "seed": 0, "few": False}
    found = Choosing(graph, **rules).solve(budget_nbytes, ENDLESS)
    return None if found is None else found.seconds


def _bad(starts: Sequence[Start], *_: Any, **__: Any) -> Start:
    """What searches that compete are imagined to end with: far more is dropped than need be."""
    evictions = starts[-1].evictions
    fit = evictions.within(evictions.budget_nbytes - 16).fit((), ENDLESS)
    assert fit is not None
    return Start(evictions, fit)


def test_the_base_order_is_searched_by_itself_where_losses_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searches that compete may all begin with the other order, and end far from the best."""
    graph = heads(4, length=6)
    budget_nbytes = simulate(Schedule.unplanned(graph)).peak_nbytes - 8
    evictions = Evictions(graph, budget_nbytes, recompute_backward=False)
    monkeypatch.setattr(Evictions, "cheapest_online", lambda *_: None)
    fit = evictions.first(None, ENDLESS)
    assert fit is not None
    alone = evictions.improve_or_end(fit, ENDLESS, patience=PATIENCE_ALONE).schedule.seconds
    monkeypatch.setattr(choosing, "improve_best", _bad)
    assert _seconds(graph, budget_nbytes) == alone
