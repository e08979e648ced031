"""``realisation="auto"``: the best that a network allows, and what it is, is said."""

from __future__ import annotations

import logging

import mxnet as mx
import numpy as np
import pytest

import memplan
import memplan.mxnet
from helpers.fitting import NETWORKS, TWO
from memplan.errors import ArgumentError, MemplanError, TraceError
from memplan.mxnet.gluon import TrainStep

QUICK = {"strategy": "store_all"}


def regularised(op: str = "IdentityAttachKLSparseReg") -> mx.sym.Symbol:
    """A network with an op that keeps something from step to step, which packed steps refuse."""
    body = mx.sym.Activation(mx.sym.Variable("data"), act_type="sigmoid")
    body = mx.sym.FullyConnected(getattr(mx.sym, op)(body), num_hidden=4)
    return mx.sym.SoftmaxOutput(body, name="softmax")


def bound(net: mx.sym.Symbol, shape: tuple[int, ...], **options: object) -> memplan.mxnet.Module:
    module = memplan.mxnet.Module(net, **QUICK, **options)
    module.bind([("data", shape)], [("softmax_label", shape[:1])])
    return module


def test_steps_are_packed_where_that_is_possible(caplog: pytest.LogCaptureFixture) -> None:
    net, shapes = NETWORKS["residual"]
    assert bound(net, (8, *shapes["data"][1:])).plan.realisation == "packed"
    assert not caplog.records


def test_the_log_says_why_steps_are_explicit(caplog: pytest.LogCaptureFixture) -> None:
    module = bound(regularised(), (8, 6))
    assert module.plan.realisation == "explicit"
    assert "explicit" in str(module.plan)
    module.reshape([("data", (4, 6))], [("softmax_label", (4,))])
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "IdentityAttachKLSparseReg" in record.getMessage()
    assert "Use realisation" not in record.getMessage()  # which is what is done
    with pytest.raises(TraceError, match="IdentityAttachKLSparseReg"):
        bound(regularised(), (8, 6), realisation="packed")


def test_contexts_train_by_plans_of_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    net, shapes = NETWORKS["residual"]
    module = bound(net, (8, *shapes["data"][1:]), context=[mx.cpu(0), mx.cpu(1)])
    assert module.plan.realisation == "explicit"
    [record] = caplog.records
    assert record.getMessage().endswith("not on cpu(1)")  # and advises nothing


def test_the_log_of_a_train_step_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    block = mx.gluon.nn.Dense(3)
    contexts = [mx.cpu(0), mx.cpu(1)]
    block.initialize(ctx=contexts)
    step = TrainStep(block, lambda outputs: outputs.sum(), **QUICK)
    for rows in (4, 6, 8):
        step(mx.gluon.utils.split_and_load(mx.nd.ones((rows, 5)), contexts))
    assert {plan.realisation for plan in step.plans.values()} == {"explicit"}
    assert ["cpu(1)" in record.getMessage() for record in caplog.records] == [True]


def test_train_step_takes_the_best() -> None:
    block = mx.gluon.nn.HybridSequential()
    block.add(mx.gluon.nn.Dense(4, activation="relu"), mx.gluon.nn.Dense(3))
    block.initialize()
    x, y = mx.nd.ones((2, 5)), mx.nd.zeros(2)
    step = TrainStep(block, mx.gluon.loss.SoftmaxCrossEntropyLoss(), **QUICK)
    step(x, y)
    assert [plan.realisation for plan in step.plans.values()] == ["packed"]


def test_a_network_that_nothing_can_train_is_refused_by_its_own_reason() -> None:
    with pytest.raises(ArgumentError, match="no argument wants a gradient"):
        memplan.plan(mx.sym.Variable("data") * 2, realisation="auto", data=(2, 3))
    with pytest.raises(ArgumentError, match="no realisation 'best'"):
        memplan.plan(regularised(), realisation="best", data=(2, 3))


def test_a_refusal_recommends_nothing_that_is_refused_as_well() -> None:
    """Sums of sparse gradients are explicit only, user code is packed only."""
    data, weight = mx.sym.Variable("data"), mx.sym.Variable("weight")
    options = {"input_dim": 9, "output_dim": 4, "sparse_grad": True}
    words = mx.sym.Embedding(data, weight, name="words", **options)
    words = words + mx.sym.Embedding(data + 1, weight, name="again", **options)
    net = mx.sym.Custom(words, op_type="a_square", name="square")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    with pytest.raises(
        TraceError, match=r"'(words|again)'.*nor can explicit steps.*'square'"
    ) as refusal:
        memplan.plan(net, realisation="auto", data=(2, 3))
    assert "realisation=" not in str(refusal.value)
    # What it recommends instead.
    assert memplan.plan(net, time_limit=1, data=(2, 3)).realisation == "mirror"


@pytest.mark.parametrize(
    ("realisation", "error"), [("auto", TraceError), ("packed", ArgumentError)]
)
def test_a_refusal_on_two_contexts_recommends_what_runs_there(
    realisation: str, error: type[MemplanError]
) -> None:
    """User code cannot be explicit, and packed memory is on the first of them."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
    net = mx.sym.Custom(net, op_type="a_square", name="square")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    shapes = [("data", (8, 4))], [("softmax_label", (8,))]
    with pytest.raises(error, match=r"mx\.mod\.Module .*memplan\.search_plan"):
        memplan.mxnet.Module(net, context=TWO, realisation=realisation, **QUICK).bind(*shapes)
    symbol = memplan.search_plan(net, time_limit=1, data=(4, 4))
    mx.mod.Module(symbol, context=TWO).bind(*shapes)


class Square(mx.operator.CustomOp):
    pass


@mx.operator.register("a_square")
class SquareProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx: object, shapes: object, dtypes: object) -> Square:
        return Square()


def test_inference_beside_packed_steps_has_their_parameters() -> None:
    net, shapes = NETWORKS["noisy"]
    shape = (8, *shapes["data"][1:])
    train = bound(net, shape)
    train.init_params(mx.init.Xavier())
    infer = memplan.mxnet.Module(net)
    infer.bind([("data", shape)], for_training=False, shared_module=train)
    batch = mx.io.DataBatch([mx.nd.random.normal(shape=shape)], [mx.nd.zeros(8)])
    found = []
    for module in (train, infer):
        module.forward(batch, is_train=False)
        found.append(module.get_outputs()[0].asnumpy())
    assert len(np.unique(found[0])) > 1
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("realisation", ["packed", "updating"])
def test_no_plan_is_made_for_a_context_that_cannot_run_it(realisation: str) -> None:
    net, shapes = NETWORKS["residual"]
    shapes = {name: (8, *shape[1:]) for name, shape in shapes.items()}
    with pytest.raises(ArgumentError, match=r"not on cpu\(5\); use realisation='explicit'"):
        memplan.plan(net, realisation=realisation, ctx=mx.cpu(5), strategy="store_all", **shapes)
