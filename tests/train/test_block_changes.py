"""Blocks whose attributes change from step to step: read at every call, or never again."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import differences, gradients
from helpers.blocks import CPU, SOFTMAX, vectors
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Scaled(gluon.HybridBlock):
    """Scores at a temperature, with as many layers before them as a list says."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.temperature: Any = 1.0
        self.widths = {"used": [True, True, True]}
        with self.name_scope():
            self.body = nn.HybridSequential(prefix="body_")
            with self.body.name_scope():
                self.body.add(*(nn.Dense(12, activation="tanh") for _ in range(3)), nn.Dropout(0.1))
            self.scores = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        for layer, is_used in zip(self.body, [*self.widths["used"], True], strict=True):
            y = layer(x)
            x = y if is_used else x + 0 * y
        return self.scores(x) / self.temperature


def change(net: Scaled, step: int) -> None:
    """What a schedule of the script does before this ``step``."""
    if step == 1:
        net.temperature = 0.5
    elif step == 2:
        net.widths["used"][1] = False
    elif step == 3:
        net.body[-1]._rate = 0.6
    elif step == 4:
        net.note = "for the log"  # which nobody reads


def left_by(way: str, *, hybridized: bool) -> tuple[list[Any], list[Any]]:
    """Losses and gradients of steps between which attributes change, and the plans."""
    mx.random.seed(3)
    net = Scaled()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    x, y = vectors()
    net(x)
    if hybridized:
        net.hybridize()
    whole = TrainStep(net, SOFTMAX, **OPTIONS) if way == "TrainStep" else None
    net = planned(net, **OPTIONS) if way == "planned" else net
    found, plans = [], []
    for number in range(6):
        change(net, number)
        if whole is not None:
            loss = whole(x, y)
        else:
            with autograd.record():
                loss = SOFTMAX(net(x), y)
            loss.backward()
        found.append({"loss": loss.asnumpy(), **gradients(net)})
        if way != "autograd":
            plans += (whole or net.planned_step).plans.values()
    return found, plans


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_attributes_are_read_when_mxnet_reads_them(way: str, hybridized: bool) -> None:
    """In every step, or once where the block is hybridized: MXNet keeps its graph there."""
    expected, _ = left_by("autograd", hybridized=hybridized)
    found, plans = left_by(way, hybridized=hybridized)
    assert not differences(expected, found)
    assert len(set(map(id, plans))) == (1 if hybridized else 4)
