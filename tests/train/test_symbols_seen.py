"""What of a script sees Symbols in a planned step, where it would see arrays: a warning says so."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU, SOFTMAX, vectors
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Keeping(gluon.HybridBlock):
    """Scores, and what a penalty is computed of, which it keeps in an attribute ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(prefix="net_")
        self.kind, self.kept = kind, None
        self.everything: list[Any] = []
        with self.name_scope():
            self.body, self.scores = nn.Dense(12, activation="tanh"), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.body(x)
        if self.kind == "kept":
            self.kept = x
        elif self.kind == "everything":
            self.everything.append({"x": (x,)})
        return self.scores(x)


def trained(net: Any, x: Any, y: Any) -> None:
    with autograd.record():
        loss = SOFTMAX(net(x), y)
    loss.backward()


@pytest.mark.parametrize("kind", ["kept", "everything"])
def test_an_attribute_that_a_loss_may_read(kind: str) -> None:
    net = Keeping(kind)
    net.initialize(ctx=CPU)
    with pytest.warns(UserWarning, match=rf"block 'net_?' keeps what it has computed \({kind}\)"):
        trained(planned(net, **OPTIONS), *vectors())


def test_a_hook_of_a_layer() -> None:
    net = Keeping("nothing")
    net.body.register_forward_hook(lambda block, inputs, outputs: None)
    net.initialize(ctx=CPU)
    with pytest.warns(UserWarning, match="hooks of block 'net_dense0' get no arrays"):
        trained(planned(net, **OPTIONS), *vectors())


class OfArrays(Keeping):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return super().hybrid_forward(F, x / 2 if F is mx.nd else x)


class OfClass(Keeping):
    def forward(self, x: Any) -> Any:
        return super().forward(x / 2 if isinstance(x, mx.nd.NDArray) else x)


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize(("kind", "name"), [(OfArrays, "hybrid_forward"), (OfClass, "forward")])
def test_a_block_that_asks_for_arrays(kind: Any, name: str, hybridized: bool) -> None:
    """It computes something else in a plan, unless MXNet makes its graph of the same."""
    net = kind("nothing")
    net.initialize(ctx=CPU)
    net.hybridize(hybridized)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(planned(net, **OPTIONS), *vectors())
    expected = [] if kind is OfArrays and hybridized else [f"{name} of block 'net' asks whether"]
    found = [str(w.message) for w in said if "asks whether" in str(w.message)]
    assert [text[: len(begin)] for text, begin in zip(found, expected, strict=True)] == expected


@pytest.mark.parametrize("way", ["a hybridized block", "a loss in the plan", "hooks of the block"])
def test_what_sees_what_it_saw_is_not_warned_of(way: str) -> None:
    net = Keeping("nothing" if way == "hooks of the block" else "kept")
    net.initialize(ctx=CPU)
    x, y = vectors()
    if way == "hooks of the block":
        net.register_forward_hook(lambda block, inputs, outputs: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "a loss in the plan":
            TrainStep(net, lambda scores, y: [SOFTMAX(scores, y), net.kept], **OPTIONS)(x, y)
            return
        if way == "a hybridized block":
            net.hybridize()
        trained(planned(net, **OPTIONS), x, y)
