"""The older sparse embedding of MXNet's, the gradient of whose table is always row_sparse."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.fitting import seed
from memplan.mxnet import Module
from memplan.planning.realisation import trace
from memplan.step.mirroring import flaggable


def network() -> mx.sym.Symbol:
    with mx.name.NameManager():
        words, table = mx.sym.Variable("data"), mx.sym.Variable("table_weight")
        found = mx.sym.contrib.SparseEmbedding(words, table, input_dim=10, output_dim=6)
        scores = mx.sym.FullyConnected(mx.sym.tanh(mx.sym.mean(found, axis=1)), num_hidden=4)
        return mx.sym.SoftmaxOutput(scores, name="softmax")


def trained(make: Any, **options: Any) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    words = draw.integers(0, 10, (16, 5)).astype(np.float32)
    labels = draw.integers(0, 4, 16).astype(np.float32)
    batches = mx.io.NDArrayIter(words, labels, 8)
    module = make(network(), **options)
    module.bind(batches.provide_data, batches.provide_label)
    seed()
    module.init_params(mx.init.Uniform(0.5))
    module.init_optimizer(optimizer_params={"learning_rate": 0.5})
    for batch in batches:
        module.forward_backward(batch)
        module.update()
    return {name: array.asnumpy() for name, array in module.get_params()[0].items()}


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_a_module_trains_as_mxnet_does(realisation: str) -> None:
    stock = trained(mx.mod.Module)
    planned = trained(Module, realisation=realisation, strategy="store_all")
    assert all(np.array_equal(stock[name], planned[name]) for name in stock)


def test_it_is_never_mirrored() -> None:
    graph = trace(network(), shapes={"data": (8, 5)}).graph
    kinds = {graph.ops[op].kind for op in flaggable(graph)}
    assert "mean" in kinds
    assert "_contrib_SparseEmbedding" not in kinds
