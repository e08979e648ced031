"""Settings of the whole suite."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from typing import Any

import mxnet as mx
import pytest
from hypothesis import HealthCheck, settings

from memplan.mxnet.realise.estimate import code_in_memory
from memplan.planning import known

pytest.register_assert_rewrite("helpers", "oracles")

MOST_UNCOUNTED_NBYTES = code_in_memory.MOST_UNCOUNTED_NBYTES

# A busy machine makes no example one that is drawn too slowly.
NO_CLOCK: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# make test tries the same examples in every run: a failure is a change's fault, never chance.
settings.register_profile("memplan", **NO_CLOCK, derandomize=True, max_examples=50)
# .ci/run tries more, and the same ones, too.
settings.register_profile("whole", **NO_CLOCK, derandomize=True, max_examples=200)
# make test-all looks for new ones, by --hypothesis-profile, and prints how to see a failure again.
settings.register_profile("random", **NO_CLOCK, max_examples=200, print_blob=True)
settings.load_profile("memplan")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The modules and tests that come now all stay: to look for garbage among them takes seconds.

    Nor do later looks pass over them, of which tests of what is let go ask for many.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_a_file_leaves_is_looked_at_once() -> Iterator[None]:
    """Looks for garbage, one for every planned block, do not pass over what earlier files keep.

    What is garbage goes before. A million objects that stay cost every later look a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would the processes that tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def _plans_are_made_here() -> Iterator[None]:
    """A child takes longer to start than the plans of the suite's small networks to make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplan.planning.apart.IN_A_CHILD", False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _searches_have_the_time_they_need() -> Iterator[None]:
    """On a busy machine a minute is not enough for some, where nothing else is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memplan.strategies.base.DEFAULT_SECONDS", 3600.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def _little_that_is_promised_is_code() -> Iterator[None]:
    """Budgets of the suite's networks, of a few hundred kB, are about what these hold.

    With what counts of a process's code, no plan would save a tenth of them: here 14 MB of it are
    left out, all that a small network takes. Tests of promises, and those of snippets, ask for
    ``code_counts``. Processes that tests start plan as users do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_in_memory, "MOST_UNCOUNTED_NBYTES", 14_000_000)
        yield


@pytest.fixture
def code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code counts as it does for users."""
    monkeypatch.setattr(code_in_memory, "MOST_UNCOUNTED_NBYTES", MOST_UNCOUNTED_NBYTES)


@pytest.fixture(autouse=True, scope="session")
def _onednn_is_enabled() -> None:
    """MXNet asks the environment once in a process: what it finds is no test's setting."""
    mx.nd.FullyConnected(mx.nd.ones((2, 2)), mx.nd.ones((2, 2)), num_hidden=2, no_bias=True)


@pytest.fixture(autouse=True)
def _names_begin_anew() -> Iterator[None]:
    """MXNet counts the names that it gives; a test sees the same ones in any order of tests."""
    with mx.name.NameManager():
        yield


@pytest.fixture(autouse=True)
def _no_plans_are_known() -> None:
    """A refusal knows of earlier plans of its process, which may be another test's."""
    known._KNOWN.clear()
