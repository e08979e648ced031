"""Which arrays a trial makes before it looks at the memory of its process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mxnet as mx
import pytest

from helpers.networks import residual_net
from memplan.mxnet.train import trial
from memplan.mxnet.train.random_run import zero_gradients
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

ADDED = "first_weight"


@pytest.mark.parametrize("realisation", ["packed", "explicit", "mirror"])
def test_only_gradients_that_stay_are_made_before(
    realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbol, shapes = residual_net(units=1)
    requests = {
        name: "null" if name in shapes else "add" if name == ADDED else "write"
        for name in symbol.list_arguments()
    }
    traced = trace(symbol, shapes=shapes, realisation=realisation, grad_req=requests)
    made: list[str] = []

    def recorded(traced: Any, ctx: mx.Context, names: Iterable[str]) -> Any:
        made.extend(names)
        return zero_gradients(traced, ctx, names)

    monkeypatch.setattr(trial, "zero_gradients", recorded)
    request = {
        "schedule": Schedule.unplanned(traced.graph).to_json(),
        "ctx": ["cpu", 0],
        "packing": None,
        "match_range": None,
        "optimizer": "sgd",
        "steps": 1,
        "results": None,
    }
    trial._trained(request, traced)
    trained = [name for name in symbol.list_arguments() if requests[name] != "null"]
    assert made == (trained if realisation == "mirror" else [ADDED])
