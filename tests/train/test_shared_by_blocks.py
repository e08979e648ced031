"""Gradients of what planned blocks share: where MXNet adds them up otherwise is said."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.mxnet.gluon import planned

# How many blocks are planned, and of how many; how often each calls the encoder.
SHARED = [
    (2, 2, "write", 1),
    (2, 3, "write", 1),
    (3, 3, "write", 1),
    (2, 2, "add", 1),
    (2, 2, "write", 2),
]


class Head(gluon.HybridBlock):
    """An encoder, which others have, too, called so many times, and a layer of its own."""

    def __init__(self, encoder: Any, times: int, place: int) -> None:
        super().__init__(prefix=f"head{place}_")
        self.times = times
        with self.name_scope():
            self.encoder, self.layer = encoder, nn.Dense(place + 1, in_units=8)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.layer(sum(F.tanh(self.encoder(x * (n + 1))) for n in range(self.times)))


def trained(nplanned: int, nblocks: int, hybrid: bool, req: str, times: int) -> tuple[Any, bool]:
    """The encoder's gradients in some steps, and whether a warning speaks of the last bits."""
    mx.random.seed(3)
    encoder = nn.Dense(8, in_units=6, prefix="encoder_")
    blocks = [Head(encoder, times, place) for place in range(nblocks)]
    for place, block in enumerate(blocks):
        block.initialize(mx.init.Xavier(), ctx=CPU)
        if hybrid:
            block.hybridize(inline_limit=0)
        if place < nplanned:
            planned(block, realisation="packed", strategy="store_all")
    encoder.weight.grad_req = req
    gradients = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            inputs = [mx.nd.random.normal(shape=(4, 6), ctx=CPU) for _ in blocks]
            with autograd.record():
                squares = [(b(x) ** 2).sum() for b, x in zip(blocks, inputs, strict=True)]
                loss = sum(squares[::-1])
            loss.backward()
            gradients.append(encoder.weight.grad().asnumpy())
    said = [str(w.message) for w in caught if "planned blocks share encoder" in str(w.message)]
    assert len(said) <= 1
    return np.array(gradients), bool(said)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("nplanned", "nblocks", "req", "times"), SHARED)
def test_last_bits_differ_where_it_is_said(
    nplanned: int, nblocks: int, hybrid: bool, req: str, times: int
) -> None:
    expected, _ = trained(0, nblocks, hybrid, req, times)
    found, said = trained(nplanned, nblocks, hybrid, req, times)
    assert said != np.array_equal(expected, found)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
