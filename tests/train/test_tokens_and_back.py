"""Pictures that are tokens between two convolutions: MXNet's executors fail at them with oneDNN."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.blocks import CPU
from helpers.training_runs import differences
from memplan.mxnet.gluon import planned


class TokensAndBack(gluon.HybridBlock):
    """As a vision transformer takes pictures apart, and gives pictures back."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.patches = nn.Conv2D(16, 4, 4, in_channels=3)
            self.head = nn.Conv2D(16, 1, in_channels=16)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        tokens = F.transpose(F.reshape(self.patches(x), (0, 0, -1)), (0, 2, 1))
        return self.head(F.reshape(F.transpose(tokens, (0, 2, 1)), (0, 0, 4, 4)))


def test_packed_steps_train_it() -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(3)
        net = TokensAndBack()
        net.initialize(ctx=CPU)
        if plan:
            net.hybridize()
            planned(net, realisation="packed", strategy="chen_sqrt")
        x = mx.nd.random.normal(shape=(2, 3, 16, 16), ctx=CPU)
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        results.append(gradients(net))
    assert not differences(results[:1], results[1:])
