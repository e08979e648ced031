"""A planned block that is planned again."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest

from helpers.blocks import CPU, conv_net, images
from memplan.errors import ArgumentError
from memplan.mxnet.gluon import planned

QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


def started() -> tuple[Any, Any]:
    mx.random.seed(3)
    net = conv_net()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    batch = images(8)
    net(batch[0])
    return net, batch


def test_a_block_may_be_planned_again_as_it_is() -> None:
    """As in a notebook whose cell runs again; by other options it says what to do."""
    net, (x, _) = started()
    assert planned(net, **QUICKLY) is net
    step = net.planned_step
    with mx.autograd.record():
        net(x).sum().backward()
    assert planned(net, **dict(reversed(QUICKLY.items()))) is net
    assert net.planned_step is step
    for options in ({}, QUICKLY | {"budget": "1GiB"}):
        with pytest.raises(ArgumentError, match=r"chen_sqrt.*make the block anew"):
            planned(net, **options)
    assert net.planned_step is step
