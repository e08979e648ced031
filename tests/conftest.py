"""Settings of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import mxnet as mx
import pytest
from hypothesis import settings

# Every run tries the same examples: a failure is a change's fault, never chance.
settings.register_profile("memplan", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("memplan")


@pytest.fixture(autouse=True)
def _names_begin_anew() -> Iterator[None]:
    """MXNet counts the names that it gives; a test sees the same ones in any order of tests."""
    with mx.name.NameManager():
        yield
