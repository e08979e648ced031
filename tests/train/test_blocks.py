"""Blocks of every kind that MXNet hybridizes train through TrainStep, with equal bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from helpers.block_runs import by_autograd, by_plan, train, train_step
from helpers.blocks import CPU, SOFTMAX, Case, accumulate, vectors
from helpers.halves import by_halves
from helpers.odd_blocks import (
    BLOCKS,
    AddedCond,
    Cond,
    CondInCond,
    CondInForeach,
    Counted,
    UnevenCond,
    words,
)
from helpers.training_runs import differences
from memplan.errors import ArgumentError, TraceError
from memplan.mxnet import Module
from memplan.mxnet.plan_file import plan_text

# User code and loops; a sum of sparse gradients.
CALLED = set(
    """while_loop foreach foreach_layers foreach_twice foreach_random user_code counted
    own_loss_only sparse_user_code""".split()
)
SPARSE_SUM = "two_sparse"
REFUSED = {"explicit": CALLED, "packed": {SPARSE_SUM}}


def initialised(name: str) -> Any:
    net = BLOCKS[name].block()
    net.initialize(BLOCKS[name].initializer, ctx=CPU)
    return net


@pytest.mark.parametrize("name", BLOCKS)
def test_equal_bits(name: str) -> None:
    """By both realisations, if neither refuses the block."""
    case = BLOCKS[name]
    expected = train(case, by_autograd(case))
    for realisation in ("packed", "explicit"):
        if name not in REFUSED[realisation]:
            by = dataclasses.replace(case, options={"realisation": realisation})
            assert not differences(expected, train(by, by_plan(by, []))), realisation


@pytest.mark.parametrize("block", [Cond, AddedCond])
def test_branches_compute_what_they_compute_where_they_are_not_hybridized(block: Any) -> None:
    """A hybridized block leaves gradients of the other branch as memory was before."""
    case = Case(block, vectors)

    def plainly(net: Any, batch: Any, contexts: Any) -> Any:
        with autograd.record():
            loss = SOFTMAX(net(batch[0]), batch[1])
        loss.backward()
        return loss

    assert not differences(train(case, plainly), train(case, by_plan(case, [])))


class UntilLarge(mx.gluon.HybridBlock):
    """The condition reads a state that needs a gradient."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.weight = self.params.get("weight", shape=(12, 12), init=mx.init.Uniform(1))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        def step(size: Any, s: Any) -> Any:
            s = s * 1.5 + F.tanh(F.dot(s, weight))
            size = F.maximum(size, F.abs(s).sum())
            return s * 2, (size, s)

        begin = F.zeros((1,)), x
        return F.contrib.while_loop(lambda size, s: size < 90, step, begin, max_iterations=9)[1][1]


class UntilSmall(mx.gluon.HybridBlock):
    """The condition reads a state that is computed of itself, and whose gradient is wanted."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.dense = mx.gluon.nn.Dense(12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def step(s: Any) -> Any:
            return s * 2, [s * 0.5]

        begin = [self.dense(x)]
        return F.contrib.while_loop(lambda s: s.sum() > 1, step, begin, max_iterations=9)[1][0]


class LoopOverData(mx.gluon.HybridBlock):
    """A state of the loop begins with data, whose gradient nobody wants."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        self.weight = self.params.get("weight", shape=(5, 5), init=mx.init.Uniform(1))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        def step(i: Any, s: Any) -> Any:
            return s * 2, (i + 1, F.tanh(F.dot(s, weight)))

        begin = F.zeros((1,)), x
        found, (_, last) = F.contrib.while_loop(lambda i, s: i < 3, step, begin, max_iterations=3)
        return found.sum(axis=0) + last


def test_loops_over_data_compute_what_they_compute_where_they_are_not_hybridized() -> None:
    """A hybridized block adds gradients of what the loop reads to memory as it was before."""
    gradients = []
    for is_planned in (False, True):
        mx.random.seed(0)
        net = LoopOverData()
        net.initialize()
        x, y = mx.nd.random.normal(shape=(4, 5)), mx.nd.random.normal(shape=(4, 5))
        garbage = [mx.nd.full((5, 5), 1e9) for _ in range(100)]
        mx.nd.waitall()
        del garbage
        loss = mx.gluon.loss.L2Loss()
        if is_planned:
            train_step(net, loss, realisation="packed")(x, y)
        else:
            with autograd.record():
                losses = loss(net(x), y)
            losses.backward()
        gradients.append(net.weight.grad().asnumpy())
    np.testing.assert_allclose(*gradients, rtol=1e-5)


class Unrolled(mx.gluon.HybridBlock):
    """A cell in a loop or a branch (``kind``), with states of its own or those that are passed."""

    def __init__(self, kind: str, is_passed: bool) -> None:
        super().__init__(prefix="net_")
        self.kind, self.is_passed = kind, is_passed
        with self.name_scope():
            self.cell = mx.gluon.rnn.GRUCell(12, input_size=12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def unrolled(part: Any) -> Any:
            states = [F.zeros_like(part)] if self.is_passed else None
            return self.cell.unroll(1, [part], begin_state=states)[0][0]

        if self.kind == "cond":
            return F.contrib.cond(F.sum(x) > 0, lambda: unrolled(x), lambda: F.tanh(unrolled(x)))
        parts = F.stack(x, F.tanh(x))
        if self.kind == "foreach":
            found, _ = F.contrib.foreach(lambda part, s: (unrolled(part), F.tanh(s)), parts, x)
        else:
            found, _ = F.contrib.foreach(
                lambda part, s: (
                    F.contrib.foreach(lambda x, s: (unrolled(x), F.tanh(s)), parts, part)[0],
                    F.tanh(s),
                ),
                parts,
                x,
            )
        return F.sum(F.reshape(found, shape=(-1, 64, 12)), axis=0)


@pytest.mark.parametrize("kind", ["foreach", "nested", "cond"])
def test_states_of_unknown_shape_within_are_refused(kind: str) -> None:
    """MXNet trains such a block where it is not hybridized, and ends in an error where it is."""
    x, y = vectors()
    for is_passed in (False, True):
        net = Unrolled(kind, is_passed)
        net.initialize(ctx=CPU)
        step = train_step(net, realisation="packed")
        if is_passed:
            step(x, y)
        else:
            with pytest.raises(TraceError, match=r"'net_.*begin_state.*\(0, 12\).*begin_state=sta"):
                step(x, y)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (UnevenCond, r"shape of 'net__cond0' \(_cond\) is not known"),
        (
            CondInForeach,
            r"shape of 'net__cond0' \(_cond\), which 'net__foreach0' \(_foreach\) runs",
        ),
        (CondInCond, r"'net__cond\d' \(_cond\) has a cond within.*F\.where"),
        (UntilLarge, r"_while_loop.*condition that reads a state.*count iterations"),
        (UntilSmall, r"_while_loop.*state whose gradient is wanted.*behind BlockGrad"),
    ],
)
def test_branches_that_are_refused(block: Any, message: str) -> None:
    net = block()
    net.initialize(ctx=CPU)
    with pytest.raises(TraceError, match=message):
        train_step(net, realisation="packed")(*vectors())


def test_a_loop_has_room_for_all_its_iterations() -> None:
    step = train_step(initialised("while_loop"), BLOCKS["while_loop"].loss)
    graph = step.plan((64, 12), (64,)).trace.graph
    [loop] = [op for op in graph.ops if op.kind == "_while_loop"]
    assert [graph.tensors[a].nelements for a in loop.outputs] == [5 * 64, 1, 64]


@pytest.mark.parametrize("name", sorted(CALLED | {SPARSE_SUM}))
def test_one_realisation_is_chosen_that_does_not_refuse(name: str) -> None:
    step = train_step(initialised(name), BLOCKS[name].loss)
    step(*BLOCKS[name].batch())
    [plan] = step.plans.values()
    assert name not in REFUSED[plan.trace.form.name]


@pytest.mark.parametrize(
    "name", "branches nested foreach user_code sparse_embedding sparse_user_code".split()
)
def test_equal_bits_in_halves(name: str) -> None:
    case = BLOCKS[name]
    assert not differences(train(case, by_autograd(case)), train(case, by_halves(case, [])))


@pytest.mark.parametrize("name", sorted(CALLED))
def test_explicit_plans_refuse_what_is_called(name: str) -> None:
    step = train_step(initialised(name), BLOCKS[name].loss, realisation="explicit")
    with pytest.raises(TraceError, match=r"op 'net_.*Use realisation='packed'"):
        step(*BLOCKS[name].batch())


def test_packed_plans_refuse_sums_of_sparse_gradients() -> None:
    step = train_step(initialised(SPARSE_SUM), realisation="packed")
    with pytest.raises(TraceError, match=r"'net_embedding.*Use realisation='explicit'"):
        step(*words())


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_sparse_gradients_stay_sparse(realisation: str) -> None:
    net = initialised("sparse_embedding")
    train_step(net, realisation=realisation)(*words())
    gradient = net[0].weight.grad()
    assert gradient.stype == "row_sparse"
    assert gradient.indices.size < 50


def test_sparse_gradients_are_not_added_to() -> None:
    net = initialised("sparse_embedding")
    accumulate(net)
    with pytest.raises(ArgumentError, match=r"'net_embedding0_weight' is sparse.*'write'"):
        train_step(net)(*words())


def test_user_code_is_made_for_every_step_as_in_a_block() -> None:
    """Its first call adds 1 to the output, its second 2."""
    net = initialised("counted")
    step, batch = train_step(net), vectors()
    first = step(*batch)
    Counted.made = 0
    second = step(*batch)
    assert Counted.made == 1
    assert np.array_equal(first.asnumpy(), second.asnumpy())


def test_user_code_is_made_once_by_a_module_as_by_an_executor() -> None:
    body = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=10, name="scores")
    net = mx.sym.SoftmaxOutput(mx.sym.Custom(body, op_type="odd_counted"), name="softmax")
    random = np.random.default_rng(0)
    data = mx.io.NDArrayIter(random.normal(size=(16, 12)), random.integers(0, 10, 16), 8)

    def outputs(module: Any) -> list[Any]:
        module.bind(data.provide_data, data.provide_label)
        mx.random.seed(3)
        module.init_params(mx.init.Xavier())
        result = []
        for _ in range(3):
            module.forward_backward(mx.io.DataBatch([vectors()[0][:8]], [mx.nd.zeros(8)]))
            result.append(module.get_outputs()[0].asnumpy())
        return result

    mx.random.seed(5)
    stock = outputs(mx.mod.Module(net))
    mx.random.seed(5)
    ours = outputs(Module(net, realisation="packed", strategy="chen_sqrt"))
    assert all(map(np.array_equal, stock, ours))


def test_a_plan_with_a_loop_can_be_written() -> None:
    step = train_step(initialised("foreach"))
    assert plan_text(step.plan((64, 12), (64,)))
