"""Inputs of several shapes lie in one memory, and each is a whole array to MXNet."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from memplan.mxnet import Module
from memplan.mxnet.gluon import TrainStep
from memplan.mxnet.realise.placed_arrays import address_of
from memplan.mxnet.train.arrays.input_memory import InputMemory

LARGE, SMALL, FEWER = (4, 16, 8, 8), (4, 16, 5, 5), (3, 16, 8, 8)
REALISATIONS = pytest.mark.parametrize("realisation", ["packed", "explicit"])
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def pictures(shape: tuple[int, ...]) -> Any:
    return mx.nd.array(np.random.default_rng(sum(shape)).normal(size=shape))


def labels(shape: tuple[int, ...]) -> Any:
    return mx.nd.arange(shape[0])


def test_one_memory_for_all_shapes() -> None:
    memory = InputMemory()

    def array(*shape: int, name: str = "data", dtype: str = "float32") -> Any:
        return memory.array(name, shape, dtype, mx.cpu())

    arrays = [array(6, 4), array(5, 3), array(24), array(6, 4)]
    assert [a.shape for a in arrays] == [(6, 4), (5, 3), (24,), (6, 4)]
    assert len({address_of(a) for a in arrays}) == 1
    arrays[1][:] = 1
    assert arrays[0].asnumpy().sum() == 15
    larger = array(5, 5)
    others = [array(6, 4, name="label"), array(6, 4, dtype="int32"), larger]
    assert not any(a.asnumpy().any() for a in others)
    assert {a.dtype for a in others} == {np.float32, np.int32}
    assert address_of(array(6, 4)) == address_of(larger) != address_of(arrays[0])


@pytest.mark.parametrize("ctx", [mx.cpu(), mx.cpu(1)])
def test_a_smaller_array_is_no_view(ctx: mx.Context) -> None:
    """Of which oneDNN does not take means."""
    memory = InputMemory()
    memory.array("data", LARGE, "float32", ctx)
    array = memory.array("data", SMALL, "float32", ctx)
    values = pictures(SMALL).as_in_context(ctx)
    array[:] = values
    assert array.context == ctx
    found = [mx.nd.Pooling(a, global_pool=True, pool_type="avg") for a in (array, values)]
    assert np.array_equal(*(a.asnumpy() for a in found))


class Means(gluon.HybridBlock):  # type: ignore[misc]
    """Weighs channels by their means, which a pooling takes of the input itself."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.pool, self.dense = gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(4, in_units=16)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        means = F.broadcast_mul(x, self.pool(x)).mean(axis=(2, 3))
        return self.dense(means)


def block_gradients(shapes: list[tuple[int, ...]], **options: Any) -> list[np.ndarray]:
    """Losses and gradients of a block in steps of these shapes; planned with ``options``."""
    mx.random.seed(3)
    block = Means()
    block.initialize(mx.init.Xavier())
    block.hybridize()
    step = TrainStep(block, LOSS, **options) if options else None
    found = []
    for shape in shapes:
        if step is not None:
            loss = step(pictures(shape), labels(shape))
        else:
            with autograd.record():
                loss = LOSS(block(pictures(shape)), labels(shape))
            loss.backward()
        found += [loss.asnumpy(), block.dense.weight.grad().asnumpy()]
    return found


@REALISATIONS
def test_a_pooling_reads_a_smaller_batch_of_a_block(realisation: str) -> None:
    shapes = [LARGE, SMALL, FEWER, LARGE]
    ours = block_gradients(shapes, realisation=realisation, strategy="store_all")
    assert all(map(np.array_equal, block_gradients(shapes), ours))


def pooled(kind: str) -> mx.sym.Symbol:
    """A classifier whose first operator is a pooling of its data."""
    data = mx.sym.Variable("data")
    options = {"kernel": (3, 3), "pad": (1, 1), "stride": (2, 2), "name": "pool"}
    values = mx.sym.Pooling(data, pool_type=kind, **options)
    values = mx.sym.Convolution(values, kernel=(2, 2), num_filter=8, no_bias=True, name="conv")
    values = mx.sym.mean(values, axis=(2, 3))
    return mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(values, num_hidden=4, name="fc"), name="softmax"
    )


def module_steps(
    module: Any, bound_to: tuple[int, ...], shapes: list[tuple[int, ...]], **options: Any
) -> list[np.ndarray]:
    """Outputs, in training and inference, and gradients in steps of these shapes."""
    module.bind([("data", bound_to)], [("softmax_label", bound_to[:1])], **options)
    mx.random.seed(3)
    module.init_params(mx.init.Xavier())
    found = []
    for shape in shapes:
        batch = mx.io.DataBatch([pictures(shape)], [labels(shape)])
        module.forward_backward(batch)
        found += [module.get_outputs()[0].asnumpy()]
        if options:
            found += [grad.asnumpy() for grad in module.get_input_grads()]
        else:
            found += [grads[0].asnumpy() for grads in module._exec_group.grad_arrays]
        module.forward(batch, is_train=False)
        found += [module.get_outputs()[0].asnumpy()]
    return found


@REALISATIONS
@pytest.mark.parametrize("smaller", [SMALL, FEWER])
def test_the_gradient_of_an_input_that_a_max_pooling_reads(
    smaller: tuple[int, ...], realisation: str
) -> None:
    """As of a Module that is bound to that shape at once."""
    planned = Module(pooled("max"), realisation=realisation, strategy="store_all")
    ours = module_steps(planned, LARGE, [LARGE, smaller], inputs_need_grad=True)
    stock = mx.mod.Module(pooled("max"))
    at_once = module_steps(stock, smaller, [smaller], inputs_need_grad=True)
    assert all(map(np.array_equal, ours[3:], at_once))


@REALISATIONS
def test_a_pooling_reads_a_smaller_batch_of_a_module(realisation: str) -> None:
    """MXNet's Module has a view of the batch that it was bound to, and an array of a larger one."""
    shapes = [SMALL, LARGE, FEWER, SMALL]
    planned = Module(pooled("avg"), realisation=realisation, strategy="store_all")
    ours = module_steps(planned, FEWER, shapes)
    assert all(map(np.array_equal, module_steps(mx.mod.Module(pooled("avg")), FEWER, shapes), ours))
