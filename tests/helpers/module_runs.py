"""Steps of a Module over batches of several sizes."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from helpers.networks import residual_net


def batch(size: int) -> tuple[Any, Any]:
    random = np.random.default_rng(size)
    data = mx.nd.array(random.normal(size=(size, 3, 16, 16)))
    return data, mx.nd.array(random.integers(0, 10, size))


def module_steps(make: Any, sizes: tuple[int, ...], after: Any) -> list[dict[str, np.ndarray]]:
    """Outputs and weights after each step, with an inference at the first size in between."""
    module = make(residual_net()[0])
    module.bind([("data", (16, 3, 16, 16))], [("softmax_label", (16,))])
    mx.random.seed(3)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 0.05, "momentum": 0.9})
    result = []
    for size in sizes:
        data, label = batch(size)
        module.forward_backward(mx.io.DataBatch([data], [label]))
        values = {"output": module.get_outputs()[0].asnumpy()}
        module.update()
        mx.nd.waitall()
        after(module)
        data, label = batch(16)
        module.forward(mx.io.DataBatch([data], [label]), is_train=False)
        values["inferred"] = module.get_outputs()[0].asnumpy()
        after(module)
        arguments, states = module.get_params()
        values |= {name: array.asnumpy() for name, array in {**arguments, **states}.items()}
        result.append(values)
    return result
