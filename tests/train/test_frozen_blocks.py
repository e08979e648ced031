"""Blocks with frozen layers and BlockGrad: MXNet keeps for them what its executor writes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from memplan.memory.blocks import best_allocation
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.measure import reported_mib

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
OPTIONS = {"strategy": "store_all", "time_limit": 1}


class Net(gluon.nn.HybridBlock):
    """A BatchNorm, whose sums are rounded by the layout of what ``sin`` leaves."""

    def __init__(self, *, blocked: str = "") -> None:
        super().__init__(prefix="net_")
        self.blocked = blocked
        with self.name_scope():
            self.conv = gluon.nn.Conv2D(16, 3, padding=1, in_channels=3)
            self.norm = gluon.nn.BatchNorm(in_channels=16)
            self.dense = gluon.nn.Dense(5, in_units=16 * 64)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.conv(x)
        x = F.sin(F.BlockGrad(x) if self.blocked == "before" else x)
        x = F.BlockGrad(x) if self.blocked == "behind" else x
        return self.dense(self.norm(x))


def _net(what: str) -> Net:
    mx.random.seed(1)
    net = Net(blocked=what)
    net.initialize(mx.init.Normal(0.3))
    net.hybridize()
    if what == "frozen":
        net.conv.collect_params().setattr("grad_req", "null")
    return net


def _batch() -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    x = np.random.RandomState(2).uniform(-1, 1, (4, 3, 8, 8))
    return mx.nd.array(x), mx.nd.array([0, 1, 2, 3])


def _losses(net: Net, block: gluon.HybridBlock) -> list[bytes]:
    """Of steps with the layer frozen, or not, thawed, and in inference between them."""
    x, y = _batch()
    result = []
    for request in (net.conv.weight.grad_req, "write", "null"):
        net.conv.collect_params().setattr("grad_req", request)
        with autograd.record():
            loss = LOSS(block(x), y)
        loss.backward()
        result += [loss.asnumpy().tobytes(), block(x).asnumpy().tobytes()]
    return result


@pytest.mark.parametrize("what", ["frozen", "before", "behind"])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_planned_block_has_the_bits_of_the_block(what: str, realisation: str) -> None:
    without, net = _net(what), _net(what)
    block = planned(net, realisation=realisation, **OPTIONS)
    assert _losses(net, block) == _losses(without, without)


@pytest.mark.parametrize("what", ["frozen", "before", "behind"])
def test_a_train_step_has_the_bits_of_the_block(what: str) -> None:
    without, step = _net(what), TrainStep(_net(what), LOSS, **OPTIONS)
    x, y = _batch()
    with autograd.record():
        expected = LOSS(without(x), y)
    assert step(x, y).asnumpy().tobytes() == expected.asnumpy().tobytes()


def test_explicit_blocks_take_what_is_promised_where_less_is_written_over() -> None:
    step = TrainStep(_net("frozen"), LOSS, realisation="explicit", **OPTIONS)
    x, y = (mx.nd.concat(*[array] * 64, dim=0) for array in _batch())  # a MiB for each array
    plan = step.plan(x, y)
    lowered = lower(plan.trace, plan.schedule)
    assert [node.name for node in lowered.nodes if node.op == "slice"] == ["net_conv0_fwd_reader0"]
    replayed = best_allocation(lowered.schedule)
    mib = reported_mib(plan.symbol, plan.trace, replayed.match_range)
    assert plan.allocated_nbytes == replayed.nbytes
    assert mib << 20 <= replayed.reported_nbytes < mib + 1 << 20


class Rows(gluon.nn.HybridBlock):
    """A BatchNorm of ``read`` of a frozen convolution, which MXNet keeps nevertheless."""

    def __init__(self, read: Callable[[Any, Any], Any]) -> None:
        super().__init__(prefix="rows_")
        self.read = read
        with self.name_scope():
            self.conv = gluon.nn.Conv2D(16, 3, padding=1, in_channels=3)
            self.norm = gluon.nn.BatchNorm(in_channels=16)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.norm(self.read(F, self.conv(x)))


def _outputs(read: Callable[[Any, Any], Any], realisation: str | None) -> bytes:
    mx.random.seed(1)
    net = Rows(read)
    net.initialize(mx.init.Normal(0.3))
    net.hybridize()
    net.conv.collect_params().setattr("grad_req", "null")
    block = net if realisation is None else planned(net, realisation=realisation, **OPTIONS)
    with autograd.record():
        out = block(_batch()[0])
    out.backward()
    return out.asnumpy().tobytes()


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_sum_is_not_written_over_what_the_block_keeps_in_the_usual_layout(
    realisation: str,
) -> None:
    def read(F: Any, x: Any) -> Any:  # noqa: N803
        return F.L2Normalization(x, mode="instance") + x

    assert _outputs(read, realisation) == _outputs(read, None)


def test_no_explicit_sum_is_written_over_what_the_block_keeps_behind_reshapes() -> None:
    def read(F: Any, x: Any) -> Any:  # noqa: N803
        rows = F.np.reshape(x.as_np_ndarray(), (-1, 16, 64)).as_nd_ndarray()
        return F.np.reshape(F.tanh(rows).as_np_ndarray(), (-1, 16, 8, 8)).as_nd_ndarray() + x

    assert _outputs(read, "explicit") == _outputs(read, None)


def test_explicit_steps_slice_nothing_of_six_dimensions() -> None:
    def read(F: Any, x: Any) -> Any:  # noqa: N803
        more = F.broadcast_add(x, F.ones((1, 1, 1, 16, 1, 1)))
        return F.reshape(F.sin(more), (-1, 16, 8, 8))

    planned_out, out = (np.frombuffer(_outputs(read, r), "f4") for r in ("explicit", None))
    np.testing.assert_allclose(planned_out, out, atol=1e-5)
