"""Which arrays a trial makes before it looks at the memory of its process, and what it times."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.networks import residual_net
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.train import trial
from memplan.mxnet.train.random_run import zero_gradients
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

ADDED = "first_weight"


def _request(traced: Trace, results: Path | None = None) -> dict[str, Any]:
    return {
        "schedule": Schedule.unplanned(traced.graph).to_json(),
        "ctx": ["cpu", 0],
        "packing": None,
        "match_range": None,
        "optimizer": "sgd",
        "steps": 5,
        "results": None if results is None else str(results),
    }


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
    monkeypatch.setattr(trial, "LEAST_SECONDS", 0.0)
    trial._trained(_request(traced), traced)
    trained = [name for name in symbol.list_arguments() if requests[name] != "null"]
    assert made == (trained if realisation == "mirror" else [ADDED])


def test_short_steps_are_timed_more_often_than_those_of_which_the_results_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three slow ones of five are not their median, and further steps change no results."""
    symbol, shapes = residual_net(units=1)
    traced = trace(symbol, shapes=shapes, realisation="packed")
    seconds, results = [], []
    for least in (0.0, 1.0):
        took = itertools.chain((0.2, 0.2, 0.01, 0.2, 0.01), itertools.repeat(0.01))
        now = itertools.chain.from_iterable((0.0, each) for each in took)
        monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=now.__next__))
        monkeypatch.setattr(trial, "LEAST_SECONDS", least)
        path = tmp_path / f"{least}.npz"
        seconds.append(trial._trained(_request(traced, path), traced).seconds)
        with np.load(path) as arrays:
            results.append({name: arrays[name].tobytes() for name in arrays.files})
    assert seconds == [0.2, 0.01]
    assert results[0] == results[1]
