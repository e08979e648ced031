"""What is known of MXNet's objects, whenever it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.held import held
from memplan.mxnet.train.arrays import array_memory

KNOWN = [
    array_memory._are_objects_known,
    array_memory._are_nodes_known,
    array_memory._nholders_of_gradients,
]


@pytest.mark.parametrize("ask", KNOWN, ids=[ask.__name__ for ask in KNOWN])
def test_what_is_known_of_objects_is_the_same_while_the_engine_has_arrays(
    ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once in a process, where the engine may get no core for a while."""
    expected = ask()
    assert expected
    with held(), monkeypatch.context() as patch:
        patch.setattr(mx.nd, "waitall", lambda: None)
        ask.cache_clear()  # type: ignore[attr-defined]
        found = ask()
        ask.cache_clear()  # type: ignore[attr-defined]
    assert found == expected
