"""How many threads an operator has on a CPU: what MXNet was seen to run."""

from __future__ import annotations

import os

import pytest

from memplan.mxnet.realise.estimate.openmp import threads

VARIABLES = ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS", "OMP_THREAD_LIMIT")


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 32 processors is imagined, on six of which this process may run."""
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_half_of_the_processors_on_which_the_process_may_run_have_threads() -> None:
    assert threads() == 3


def test_one_processor_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7})
    assert threads() == 1


# By the tasks of a process that called one convolution: OMP_NUM_THREADS, MXNET_OMP_MAX_THREADS,
# OMP_THREAD_LIMIT.
@pytest.mark.parametrize(
    ("told", "seen"),
    [
        (("8", "", ""), 8),
        (("", "", ""), 3),
        (("0", "", ""), 6),
        (("-3", "", ""), 6),
        (("", "8", ""), 6),
        (("", "2", ""), 2),
        (("", "0", ""), 6),
        (("8", "2", ""), 8),
        (("", "", "1"), 1),
        (("8", "", "5"), 5),
        (("8", "", "0"), 8),
    ],
)
def test_mxnet_and_openmp_may_be_told_otherwise(
    told: tuple[str, str, str], seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in zip(VARIABLES, told, strict=True):
        monkeypatch.setenv(name, text)
    assert threads() == seen
