"""Profiling that is stopped: Python only prints what a callback of C raises."""

from __future__ import annotations

import signal
import sys
from typing import Any

import mxnet as mx
import pytest

from helpers.networks import dropout_net
from memplan.errors import CostError
from memplan.mxnet.profile import profile
from memplan.mxnet.realise.stopwatch import Stopwatch


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, shapes = dropout_net()
    waitall = mx.nd.waitall

    def interrupted() -> None:
        waitall()
        if sys._getframe(1).f_code.co_name == "_computed":
            raise KeyboardInterrupt

    monkeypatch.setattr(mx.nd, "waitall", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile(net, **shapes)


def test_nor_is_one_as_a_callback_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    net, shapes = dropout_net()
    computed = Stopwatch._computed
    stopwatches = []

    def interrupted(stopwatch: Stopwatch, *arguments: Any) -> None:
        if stopwatch not in stopwatches:
            stopwatches.append(stopwatch)
            signal.raise_signal(signal.SIGINT)
        computed(stopwatch, *arguments)

    monkeypatch.setattr(Stopwatch, "_computed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile(net, **shapes)
    assert len(stopwatches) == 1


def test_a_step_of_which_a_callback_is_lost_is_not_taken_for_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as by a handler of SIGALRM that raises: the seconds would be those of other ops."""
    net, shapes = dropout_net()
    computed = Stopwatch._computed
    names = []

    def lossy(stopwatch: Stopwatch, name: bytes, handle: int) -> None:
        if not name.startswith(b"_plusscalar"):  # of the smallest ops, of which one is enough
            names.append(name)
        if len(names) != 3:
            computed(stopwatch, name, handle)

    monkeypatch.setattr(Stopwatch, "_computed", lossy)
    with pytest.raises(CostError, match="did not call back for every output"):
        profile(net, warmup=0, **shapes)
