"""A network to plan."""

from __future__ import annotations

import mxnet as mx
import pytest

from helpers.networks import residual_net


@pytest.fixture(scope="module")
def network() -> tuple[mx.sym.Symbol, dict[str, tuple[int, ...]]]:
    return residual_net(batch=16, size=32, units=6, filters=16)


@pytest.fixture
def little_time_to_look_for_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.least.SEARCH_SECONDS", 0.5)
