"""Gluon blocks under MXNet's automatic mixed precision."""

from __future__ import annotations

import os
import sys

import pytest

from helpers.script import printed_by

AMP = """
import mxnet as mx
from mxnet.contrib import amp
amp.init("float16")
from helpers import block_runs, blocks
from helpers.training_runs import differences
from mxnet import autograd, gluon
from mxnet.gluon import nn

class Net(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.factor = self.params.get("factor", shape=(1, 3, 1, 1), init="ones")
            self.norm, self.half = nn.BatchNorm(), nn.BatchNorm()

    def hybrid_forward(self, F, x, factor):
        x = F.relu(self.norm(F.broadcast_mul(x, factor)))
        x = F.relu(self.half(F.cast(F.tanh(x) * 2, dtype="float16")))
        return F.mean(F.cast(x, dtype="float32"), axis=3)

def by_autograd(net, trainer, x, y):
    with autograd.record():
        loss = blocks.first_of_rows(net(x), y)
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)

steps = {}

def by_plan(net, trainer, x, y):
    with amp.scale_loss(1.0, trainer) as scale:
        steps.setdefault(net, block_runs.train_step(net, blocks.first_of_rows))(x, y, scale=scale)

def by_halves(net, trainer, x, y):
    step = steps.setdefault(net, block_runs.train_step(net, None))
    with autograd.record():
        loss = blocks.first_of_rows(step.forward(x), y)
        with amp.scale_loss(loss, trainer) as scaled:
            step.backward(scaled)

def run(way):
    mx.random.seed(1)
    net = Net()
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer)
    trainer._amp_loss_scaler._loss_scale = trainer._amp_loss_scaler._next_loss_scale = 8.0
    result = []
    for _ in range(3):
        way(net, trainer, *blocks.pictures())
        result.append(block_runs.gradients(net))
        trainer.step(4)
    return result

one = run(by_autograd)
assert any(grad.any() for grad in one[0].values())
for way in (by_plan, by_halves):
    steps.clear()
    other = run(way)
    (plan,) = next(iter(steps.values())).plans.values()
    assert "amp_multicast" in {op.kind for op in plan.schedule.graph.ops}
    assert not differences(one, other), differences(one, other)
"""


EQUAL_DTYPES = """
import mxnet as mx
from mxnet.contrib import amp
amp.init("float16")
from helpers.block_runs import assert_identical_to_autograd, by_plan
from helpers.blocks import Case, vectors
from mxnet import gluon

class Terms(gluon.HybridBlock):
    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(1, 12))
            self.shift = self.params.get("shift", shape=(64, 12))

    def hybrid_forward(self, F, x, scale, shift):
        return F.elemwise_add(x, F.exp(shift)) + F.broadcast_mul(F.sin(x), F.tanh(scale))

case = Case(Terms, vectors, options={"strategy": "store_all"}, recomputes=False)
assert_identical_to_autograd(case, by_plan)
"""


BFLOAT16 = """
from mxnet.contrib import amp
amp.init("bfloat16")
from helpers.block_runs import trained
from memplan.errors import TraceError
try:
    trained()
except TraceError as error:
    assert "bfloat16" in str(error)
else:
    raise AssertionError
"""


# AMP scales the gradients of losses that are called with arrays, by the names of their functions,
# and those of Symbols not.
LOSSES = """
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.contrib import amp
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned
amp.init("float16")

class Regression(gluon.HybridBlock):
    def hybrid_forward(self, F, x, y):
        return F.LinearRegressionOutput(F.Flatten(x) * 2, y)

class Unscaled(gluon.HybridBlock):
    def hybrid_forward(self, F, x, y):
        F.SoftmaxOutput(F.Flatten(x), F.max(y, axis=1))  # no gradient comes from there
        return F.Softmax(F.Flatten(x) * 2, F.max(y, axis=1))  # AMP wraps one name of the operator

class Stopped(gluon.HybridBlock):
    def hybrid_forward(self, F, x, y):
        scores = F.Flatten(x) * 2
        return scores + F.SoftmaxOutput(F.BlockGrad(scores), F.max(y, axis=1))

def net_of(is_hybridized, loss=Regression):
    net = gluon.nn.HybridSequential(prefix="")  # as long as none of its names says whose it is
    net.add(gluon.nn.BatchNorm(in_channels=3))
    whole = Whole(net, loss())
    net.initialize()
    net.hybridize()
    whole.loss.hybridize(is_hybridized)
    return whole

class Whole(gluon.HybridBlock):
    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss
    def hybrid_forward(self, F, x, y):
        return self.loss(self.net(x), y)

def gradient(whole):
    with autograd.record():
        loss = whole(mx.nd.ones((4, 3)), mx.nd.ones((4, 3)))
    loss.backward()
    return whole.net[0].beta.grad().asnumpy()

def is_refused(train):
    try:
        train()
    except TraceError as error:
        return "AMP multiplies its gradient by the loss scale" in str(error)

def called_in_a_loss():
    loss = lambda out, y: mx.sym.MAERegressionOutput(out, y)
    TrainStep(net_of(False).net, loss)(mx.nd.ones((4, 3)), mx.nd.ones((4, 3)))

assert is_refused(lambda: gradient(planned(net_of(False), strategy="store_all")))
assert is_refused(called_in_a_loss)
for arguments in ((True,), (False, Unscaled), (False, Stopped)):
    mx.random.seed(1)
    expected = gradient(net_of(*arguments))
    mx.random.seed(1)
    by_plan = gradient(planned(net_of(*arguments), strategy="store_all"))
    assert (by_plan == expected).all() and expected.any()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    [AMP, EQUAL_DTYPES, BFLOAT16, LOSSES],
    ids=[
        "scaled loss",
        "terms of equal dtypes",
        "bfloat16 is refused",
        "losses that AMP scales are refused",
    ],
)
def test_amp(script: str) -> None:
    """In a process of its own: AMP changes MXNet's operators for good."""
    printed_by("-c", script, PYTHONPATH=os.pathsep.join(sys.path))
