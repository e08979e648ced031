"""Gradients of a Module that a script has taken once, and reads in steps of all shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.planning import NEVER_SECONDS
from helpers.training_runs import differences
from memplan.errors import UsageError
from memplan.mxnet import BucketingModule, Module

S = mx.sym
SIZES = (4, 2, 4, 8, 4)
STRATEGY: dict[str, Any] = {"strategy": "chen_greedy", "time_limit": NEVER_SECONDS}


def network(pixels: int = 6) -> mx.sym.Symbol:
    """With a parameter that no network for other pictures has."""
    x = S.Convolution(S.Variable("data"), num_filter=4, kernel=(3, 3), pad=(1, 1), name="conv0")
    x = S.relu(S.BatchNorm(x, fix_gamma=False, name="norm"))
    x = S.relu(S.Convolution(x, num_filter=4, kernel=(3, 3), pad=(1, 1), name="conv1"))
    x = S.mean(x, axis=(2, 3))
    if pixels == 6:
        x = S.FullyConnected(x, num_hidden=4, name="own")
    return S.SoftmaxOutput(S.FullyConnected(x, num_hidden=3, name="scores"), name="softmax")


def batch(size: int, pixels: int = 6) -> Any:
    random = np.random.default_rng(size)
    data = mx.nd.array(random.normal(size=(size, 2, pixels, pixels)))
    result = mx.io.DataBatch([data], [mx.nd.array(random.integers(0, 3, size))], bucket_key=pixels)
    result.provide_data, result.provide_label = [("data", data.shape)], [("softmax_label", (size,))]
    return result


def bound(module: Any, **options: Any) -> Any:
    module.bind([("data", (4, 2, 6, 6))], [("softmax_label", (4,))], **options)
    mx.random.seed(2)
    module.init_params(mx.init.Uniform(0.3))
    module.init_optimizer(optimizer_params={"learning_rate": 0.3})
    return module


def gradients_of(module: Any) -> list[Any]:
    inner = getattr(module, "_curr_module", module)
    return [gradient for [gradient] in inner._exec_group.grad_arrays]


def clipped_steps(module: Any, *batches: Any) -> list[dict[str, Any]]:
    """Norms of all gradients, taken before the first step, and weights, after steps that clip."""
    gradients, result = gradients_of(bound(module)), []
    for one in batches:
        module.forward_backward(one)
        mx.nd.waitall()
        norm = mx.gluon.utils.clip_global_norm(gradients, 0.05)
        module.update()
        mx.nd.waitall()
        weights = {name: array.asnumpy() for name, array in module.get_params()[0].items()}
        result.append({"norm": np.array(norm)} | weights)
    return result


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_arrays_that_were_taken_once_are_the_gradients_of_all_shapes(realisation: str) -> None:
    batches = list(map(batch, SIZES))
    ours = clipped_steps(Module(network(), realisation=realisation, **STRATEGY), *batches)
    assert not differences(clipped_steps(mx.mod.Module(network()), *batches), ours)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_so_they_are_of_all_buckets(realisation: str) -> None:
    """Of which one has a parameter of its own: its gradient stays, and is clipped again."""
    batches = [batch(4, pixels) for pixels in (6, 5, 5, 6, 5)]

    def generated(pixels: int) -> Any:
        return network(pixels), ["data"], ["softmax_label"]

    stock = clipped_steps(mx.mod.BucketingModule(generated, 6), *batches)
    planned = BucketingModule(generated, 6, realisation=realisation, **STRATEGY)
    assert not differences(stock, clipped_steps(planned, *batches))


def test_what_executors_have_are_these_arrays() -> None:
    module = bound(Module(network(), realisation="packed", **STRATEGY))
    gradients = gradients_of(module)
    for size in SIZES:
        module.forward_backward(batch(size))
        [executor] = module._exec_group.execs
        found = [array for array in executor.grad_arrays if array is not None]
        pairs = zip(gradients_of(module), found, executor._written.values(), strict=True)
        for taken, (collected, array, computed) in zip(gradients, pairs, strict=True):
            assert taken is collected is array
            assert np.array_equal(taken.asnumpy(), computed.asnumpy())
        taken = (array for array in executor.grad_dict.values() if array is not None)
        assert all(one is other for one, other in zip(taken, gradients, strict=True))
        module.update()


def test_gradients_wait_for_their_update_while_others_are_bound() -> None:
    """Modules that share the memory begin to use it when they train."""

    def run(make: Callable[..., Any]) -> list[dict[str, Any]]:
        module, other = bound(make(network())), make(network())
        module.forward_backward(batch(4))
        shapes = [("data", (2, 2, 6, 6))], [("softmax_label", (2,))]
        other.bind(*shapes, shared_module=module)
        mx.nd.waitall()
        module.update()
        return [{name: array.asnumpy() for name, array in module.get_params()[0].items()}]

    def planned(net: mx.sym.Symbol) -> Module:
        return Module(net, realisation="packed", **STRATEGY)

    assert not differences(run(mx.mod.Module), run(planned))


def test_gradients_of_which_the_memory_was_freed() -> None:
    """They are not held beside the budget, and nobody reads what lies in memory."""
    module = bound(Module(network(), realisation="packed", **STRATEGY))
    gradients = gradients_of(module)
    module.forward_backward(batch(4))
    shapes = [("data", (8, 2, 6, 6))], [("softmax_label", (8,))]
    Module(network(), realisation="packed", **STRATEGY).bind(*shapes, shared_module=module)
    for read in (lambda array: array.asnumpy(), lambda array: array + 1):
        with pytest.raises(UsageError, match=r"'conv0_weight' is not there.*behind the training"):
            read(gradients[0])
    with pytest.raises(UsageError, match=r"there are no gradients.*has used their memory"):
        module.update()
    gradients[1][:] = 0  # as a script may do before every step
    module.forward_backward(batch(4))
    [executor] = module._exec_group.execs
    pairs = zip(gradients, executor._written.values(), strict=True)
    assert all(np.array_equal(one.asnumpy(), other.asnumpy()) for one, other in pairs)
    module.update()


def test_gradients_of_inputs_have_the_shape_of_the_batch() -> None:
    module = bound(Module(network(), realisation="packed", **STRATEGY), inputs_need_grad=True)
    found = {}
    for size in SIZES:
        module.forward_backward(batch(size))
        [gradient] = module.get_input_grads()
        assert gradient.shape[0] == size
        assert found.setdefault(size, gradient) is gradient
        assert gradient.asnumpy().any()
    with pytest.raises(UsageError, match="the gradient of 'data' is not there"):
        found[8].asnumpy()
