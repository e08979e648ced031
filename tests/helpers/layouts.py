"""Plans of networks so small that copies in other layouts decide which takes the least memory."""

from __future__ import annotations

import pytest

from memplan.mxnet.realise import explicit


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of explicit plans no copies are counted, so that the least memory is one that recomputes."""
    monkeypatch.setattr(explicit, "rules", lambda graph, nodes: ())
