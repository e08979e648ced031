"""Blocks whose recurrent cells keep something from call to call."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.errors import UsageError
from memplan.mxnet.gluon import planned

CELLS = {
    "variational": lambda cell: gluon.contrib.rnn.VariationalDropoutCell(cell, 0.3, 0.3, 0.3),
    "zoneout of outputs": lambda cell: gluon.rnn.ZoneoutCell(cell, 0.3),
    "zoneout": lambda cell: gluon.rnn.ZoneoutCell(cell, 0.3, 0.3),
}


class Stepped(gluon.HybridBlock):
    """Calls its cell step by step, and resets it at the beginning or not."""

    def __init__(self, cell: str, resets: bool, prefix: str = "net_") -> None:
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.cell = CELLS[cell](gluon.rnn.RNNCell(6, prefix="cell_"))
            self.out = nn.Dense(3)
        self.resets = resets

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        if self.resets:
            self.cell.reset()
        outputs, states = [], [F.zeros_like(F.tile(F.slice_axis(x, axis=1, begin=0, end=1), 6))]
        for step in range(3):
            output, states = self.cell(F.slice_axis(x, axis=1, begin=step, end=step + 1), states)
            outputs.append(output)
        return self.out(F.concat(*outputs, dim=1))


def losses(net: Any, *, plan: bool) -> list[Any]:
    mx.random.seed(3)
    net.initialize()
    net.hybridize()
    net(mx.nd.ones((2, 3)))
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    if plan:
        planned(net, realisation="packed", strategy="chen_sqrt")
    left = []
    for rows in (2, 2, 3, 2):
        x = mx.nd.arange(3 * rows).reshape((rows, 3)) / 7
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(rows)
        left += [loss.asnumpy(), net(x).asnumpy()]
    return left


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_hybridized_block_begins_anew(cell: str, resets: bool) -> None:
    stock, by_plan = (losses(Stepped(cell, resets), plan=plan) for plan in (False, True))
    for one, other in zip(stock, by_plan, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_cell_that_is_hybridized_itself_begins_anew_in_every_call() -> None:
    """MXNet's graph of a ZoneoutCell has zeros for its last output."""

    class CellAlone(Stepped):
        def hybridize(self, active: bool = True, **options: Any) -> None:
            self.cell.hybridize(active, **options)

    stock, by_plan = (
        losses(CellAlone("zoneout of outputs", False), plan=plan) for plan in (False, True)
    )
    for one, other in zip(stock, by_plan, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:block 'net' is not hybridized")
@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_that_was_not_reset(cell: str, infers: bool) -> None:
    """A block that is not hybridized uses the masks of the first batch for all others."""
    net = Stepped(cell, resets=False)
    net.initialize()
    x = mx.nd.ones((2, 3))
    planned(net, realisation="packed", strategy="chen_sqrt")

    def step() -> None:
        with autograd.record():
            (net(x) ** 2).sum().backward()

    step()
    message = r"Cell 'net_.*' of the planned block 'net' .* reset\(\) was not called .* hybridize"
    with pytest.raises(UsageError, match=message):
        net(x) if infers else step()
    net.resets = True
    step()
    net(x)
    net.resets = False
    net.cell.reset()
    net.hybridize()
    step()
    net(x)


@pytest.mark.filterwarnings("ignore:block 'beside' is not hybridized")
def test_a_cell_in_a_graph_is_left_alone_beside_one_that_is_in_none() -> None:
    """MXNet's graph of it begins anew, and is made in inference where that comes first."""

    class Beside(gluon.HybridBlock):
        def __init__(self) -> None:
            super().__init__(prefix="beside_")
            with self.name_scope():
                self.in_graph = Stepped("zoneout of outputs", False, "hybridized_")
                self.in_none = Stepped("zoneout", True)

        def hybridize(self, active: bool = True, **options: Any) -> None:
            self.in_graph.hybridize(active, **options)

        def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
            return self.in_graph(x) + self.in_none(x)

    def run(plan: bool) -> Any:
        mx.random.seed(3)
        net, x = Beside(), mx.nd.ones((2, 3))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        net(x)
        if plan:
            planned(net, realisation="packed", strategy="chen_sqrt")
        with autograd.record():
            (net(x) ** 2).sum().backward()
        net.hybridize()
        return net(x).asnumpy()

    np.testing.assert_array_equal(run(False), run(True))
