"""Networks whose arrays are in layouts of oneDNN's, and plans in which copies of these decide."""

from __future__ import annotations

import mxnet as mx
import pytest

from memplan.mxnet.realise import explicit


def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of explicit plans no copies are counted, so that the least memory is one that recomputes."""
    monkeypatch.setattr(explicit, "rules", lambda graph, nodes: ())


def convolution(data: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
    """To as many filters as lie side by side with AVX-512: the result is in oneDNN's layout."""
    return mx.sym.Convolution(data, num_filter=16, kernel=(3, 3), pad=(1, 1), name=name)


def pooling(data: mx.sym.Symbol, kind: str) -> mx.sym.Symbol:
    return mx.sym.Pooling(data, kernel=(3, 3), pad=(1, 1), pool_type=kind, name="pool")
