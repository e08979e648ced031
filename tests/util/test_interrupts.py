"""Signals that end a process leave it time to clean up."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from memplan.util.interrupts import leaving_in_order

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _by_default() -> Iterator[None]:
    """The signals end a process: whoever started the tests may have set otherwise."""
    before = [signal.signal(number, signal.SIG_DFL) for number in ENDINGS]
    yield
    for number, handler in zip(ENDINGS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDINGS)
def test_a_process_that_is_ended_cleans_up_whatever_follows(number: signal.Signals) -> None:
    """A shell that goes sends SIGHUP as well as the kernel does."""
    steps = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            steps.append("begun")
            for again in ENDINGS:
                signal.raise_signal(again)
            steps.append("done")

    with pytest.raises(SystemExit) as caught, leaving_in_order():
        work()
    assert caught.value.code == 128 + number
    assert steps == ["begun", "done"]
    assert all(signal.getsignal(number) is signal.SIG_DFL for number in ENDINGS)


@pytest.mark.parametrize("number", ENDINGS)
def test_what_is_decided_of_a_signal_stays(number: signal.Signals) -> None:
    """As by nohup, under which a closed terminal ends nothing."""
    signal.signal(number, signal.SIG_IGN)
    with leaving_in_order():
        signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_IGN
