"""What a step draws before a parameter is initialised matters if both are of one generator."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import planned


class Between(gluon.HybridBlock):
    """Draws between two layers: a ``mask`` as Dropout does, or rows by another operator."""

    def __init__(self, mask: bool) -> None:
        super().__init__()
        with self.name_scope():
            self.first, self.last = nn.Dense(12), nn.Dense(10)
        self.mask = mask

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.first(x)
        is_numpy = mx.util.is_np_array()
        if self.mask:
            return self.last(F.npx.dropout(x, p=0.5) if is_numpy else F.Dropout(x, p=0.5))
        if is_numpy:
            return self.last(x + F.np.random.normal(0.0, 1.0, size=(8, 12)))
        rows = F.sample_multinomial(F.softmax(x), dtype="float32").expand_dims(1)
        return self.last(F.broadcast_add(x, rows))


def left_by(mask: bool, init: Any, plan: bool) -> list[Any]:
    """The losses and parameters that a first step leaves."""
    mx.random.seed(3)
    net = Between(mask)
    net.initialize(init)
    x = (mx.np if mx.util.is_np_array() else mx.nd).ones((8, 10))
    called = planned(net, strategy="store_all", realisation="packed") if plan else net
    with autograd.record():
        loss = called(x)
    return [loss.asnumpy(), *(p.data().asnumpy() for p in net.collect_params().values())]


@pytest.mark.parametrize(
    ("numpy", "init", "mask", "expected"),
    [
        (False, "xavier", True, True),
        (False, "xavier", False, False),
        (False, mx.init.Orthogonal(), True, True),
        (True, "xavier", True, False),
        (True, mx.init.Normal(), False, True),
        (True, mx.init.Orthogonal(), True, True),  # draws as mx.nd does
    ],
)
def test_a_warning_tells_of_parameters_behind_draws_of_their_generator(
    numpy: bool, init: Any, mask: bool, expected: bool
) -> None:
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        losses = left_by(mask, init, False)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            same = all(map(np.array_equal, losses, left_by(mask, init, True)))
    texts = [str(w.message) for w in found if "initialises parameters before" in str(w.message)]
    assert same is not expected
    assert len(texts) == expected
