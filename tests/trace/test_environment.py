"""The match range that a thread sees, whatever another thread binds under meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

import memplan
from memplan.errors import ArgumentError
from memplan.mxnet.trace.build import trace
from memplan.mxnet.trace.environment import (
    MATCH_RANGE,
    current_match_range,
    match_range,
    onednn_is_enabled,
)

NET = mx.sym.relu(mx.sym.Variable("a"))


def while_another_probes(ask: Callable[[], Any]) -> Any:
    """What ``ask`` gives in a thread that starts while this one binds under match range 0."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    with match_range(0):
        thread.start()
        thread.join(0.2)
        early = list(answers)
    thread.join()
    assert not early, f"an answer while another value was set: {early}"
    return answers[0]


@pytest.mark.parametrize(("value", "expected"), [(None, 16), ("", 16), ("5", 5)])
def test_the_match_range_of_a_probe_is_no_other_threads(
    value: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv(MATCH_RANGE, raising=False)
    else:
        monkeypatch.setenv(MATCH_RANGE, value)
    assert while_another_probes(current_match_range) == expected


def test_a_graph_remembers_the_match_range_of_its_own_thread() -> None:
    def ask() -> int:
        return trace(NET, shapes={"a": (2, 3)}, grad_req="write").graph.match_range

    ask()  # MXNet's answers are kept: the next trace binds nothing, and so waits for nobody
    assert while_another_probes(ask) == current_match_range()


def test_inference_is_not_bound_under_the_match_range_of_a_probe() -> None:
    def ask() -> str:
        module = memplan.mxnet.Module(NET, data_names=["a"], label_names=None)
        module.bind([("a", (2, 3))], for_training=False)
        return "bound"

    assert while_another_probes(ask) == "bound"


@pytest.mark.parametrize("value", ["-1", "abc", "4.5", str(2**31)])
def test_a_match_range_that_mxnet_cannot_use_is_named(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs under the first of these, and fails under the others."""
    monkeypatch.setenv(MATCH_RANGE, value)
    with pytest.raises(ArgumentError, match=f"{MATCH_RANGE}.*{value!r}"):
        memplan.plan(NET, a=(2, 3), grad_req="write")


@pytest.mark.parametrize(
    ("value", "enabled"), [("1", True), ("true", True), ("0", False), ("False", False)]
)
def test_onednn_is_off_where_mxnet_takes_it_to_be(
    value: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", value)
    assert onednn_is_enabled() is enabled


def test_an_empty_limit_of_terms_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    data = mx.sym.Variable("a")
    net = mx.sym.MakeLoss(mx.sym.sin(data) + mx.sym.cos(data))
    expected = trace(net, shapes={"a": (2, 3)}, grad_req="write").graph
    monkeypatch.setenv("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "")
    assert trace(net, shapes={"a": (2, 3)}, grad_req="write").graph == expected
