"""Arrays without memory that parameters are lent for gradients between the halves of a step."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from memplan.mxnet.gluon import planned
from memplan.mxnet.train.arrays import held


@pytest.fixture
def net() -> Any:
    mx.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(6, activation="tanh", in_units=6), nn.Dense(5, in_units=6))
    net.initialize(mx.init.Xavier())
    return planned(net, strategy="chen_sqrt", realisation="packed")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Those of the arrays that are made."""
    found: list[tuple[int, ...]] = []
    make = held.without_memory

    def noting(like: Any) -> Any:
        found.append(like.shape)
        return make(like)

    monkeypatch.setattr(held, "without_memory", noting)
    return found


def step(net: Any, *, reads: bool = False, penalty: float = 0) -> tuple[Any, list[Any]]:
    """What a script that ``reads`` the first weight has recorded, and gradients after the step."""
    with autograd.record():
        loss = net(mx.nd.ones((2, 6))).sum()
        square = (net[0].weight.data() ** 2).sum() if reads or penalty else None
        if penalty:
            loss = loss + penalty * square
    loss.backward()
    return square, [p.grad().asnumpy() for p in net.collect_params().values()]


def test_those_that_nobody_used_are_lent_again(
    net: Any, shapes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "is_unused", lambda _: True)  # the engine may have them a while
    step(net)
    assert len(shapes) == 4
    for _ in range(3):
        step(net)
    assert len(shapes) == 4


def test_one_into_which_a_graph_would_write_is_not(net: Any, shapes: list[Any]) -> None:
    square, plain = step(net, reads=True)
    del shapes[:]
    assert all(map(np.array_equal, step(net)[1], plain))
    assert (6, 6) in shapes
    assert square is not None


def test_one_that_was_written_is_not(net: Any, shapes: list[Any]) -> None:
    plain = step(net)[1]
    found = step(net, penalty=0.5)[1]
    assert np.allclose(found[0], plain[0] + net[0].weight.data().asnumpy())
    assert all(map(np.array_equal, found[1:], plain[1:]))
    del shapes[:]
    assert all(map(np.array_equal, step(net)[1], plain))
    assert (6, 6) in shapes
