"""Gradients of an array that eight ops read: explicit steps sum them as a block does, bit for bit.

From eight terms on MXNet's executor has ops add theirs to the sum, which many do not. A hybridized
block adds them up by ops of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.memory.blocks import best_allocation
from memplan.mxnet.gluon import planned
from memplan.mxnet.realise.explicit import training_symbol
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.measure import reported_mib
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

Reader = Callable[[Any, Any], Any]


def of_numpy(name: str, **options: int) -> Reader:
    def reader(op: Any, whole: Any) -> Any:
        call = getattr(mx.np if op is mx.nd else op.np, name)
        return call(whole.as_np_ndarray(), **options).as_nd_ndarray()

    return reader


ON_MATRICES: dict[str, Reader] = {
    "overwrites": lambda op, whole: op.clip(whole, -0.3, 0.3),
    "overwrites, in parts": lambda op, whole: op.split_v2(whole, 2, axis=1)[0],
    "scales": lambda op, whole: op.mean(whole, axis=1),
    "multiplies": lambda op, whole: op.linalg_gemm2(whole, op.sin(whole), transpose_b=True),
    "accumulates": lambda op, whole: op.cumsum(whole, axis=0),
    "leaves it": lambda op, whole: op.linalg_inverse(whole),
    "np.diff": of_numpy("diff"),
    "np.flip": of_numpy("flip", axis=0),
    "adds": lambda op, whole: op.softmax(whole),
}
# An op that adds, and yet not to an array in a layout of oneDNN's.
ON_IMAGES: dict[str, Reader] = {
    "clip": lambda op, whole: op.clip(whole, -0.3, 0.3),
    "slice_axis": lambda op, whole: op.slice_axis(whole, axis=1, begin=0, end=2),
    "concat": lambda op, whole: op.concat(whole, op.cos(whole), dim=1),
    "adds": lambda op, whole: op.relu(whole),
}


class EightReaders(gluon.HybridBlock):
    """Of an array that a layer computes: ``reader``, and others before and after it."""

    def __init__(self, reader: Reader, *, of_images: bool) -> None:
        super().__init__(prefix="net_")
        self.reader, self.of_images = reader, of_images
        with self.name_scope():
            self.first = nn.Conv2D(16, 3, padding=1) if of_images else nn.Dense(6)
            self.others = [nn.Conv2D(16, 1) for _ in range(7 if of_images else 0)]
            for other in self.others:
                self.register_child(other)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        whole = self.first(x)
        names = "sin cos tanh square sigmoid arctan erf"
        others = self.others or [getattr(F, name) for name in names.split()]
        found = [F.sum(F.square(other(whole))) for other in others]
        found.insert(3, F.sum(F.sin(self.reader(F, whole))))
        return F.add_n(*found)


def gradients(net: EightReaders, realisation: str | None, shape: tuple[int, ...]) -> Any:
    mx.random.seed(1)
    x = mx.nd.random.normal(shape=shape)
    net.initialize(mx.init.Normal(0.3))
    net.hybridize()
    run = planned(net, realisation=realisation, strategy="store_all") if realisation else net
    with autograd.record():
        loss = run(x)
    loss.backward()
    return {name: p.grad().asnumpy() for name, p in net.collect_params().items()}


CASES = [
    *((reader, False, (6, 6)) for reader in ON_MATRICES.values()),
    *((reader, True, (2, 16, 8, 8)) for reader in ON_IMAGES.values()),
]


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize(
    ("reader", "of_images", "shape"),
    CASES,
    ids=[*ON_MATRICES, *(f"images, {n}" for n in ON_IMAGES)],
)
def test_as_in_the_block(
    reader: Reader, of_images: bool, shape: tuple[int, ...], realisation: str
) -> None:
    expected, found = (
        gradients(EightReaders(reader, of_images=of_images), how, shape)
        for how in (None, realisation)
    )
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)


def test_the_sums_take_what_mxnet_allocates() -> None:
    net = EightReaders(ON_MATRICES["scales"], of_images=False)
    traced = trace(
        net(mx.sym.Variable("data")), shapes={"data": (99_999, 9)}, realisation="explicit"
    )
    schedule = Schedule.unplanned(traced.graph)
    allocation = best_allocation(lower(traced, schedule).schedule)
    symbol = training_symbol(traced, schedule)
    mib = reported_mib(symbol, traced, allocation.match_range)
    assert mib == allocation.reported_nbytes >> 20
    assert mib > 0
