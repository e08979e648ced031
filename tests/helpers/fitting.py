"""Scripts that train a Module, and all that they see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx
import numpy as np

import memplan
import memplan.mxnet
from helpers.networks import Network, residual_net
from helpers.training_runs import differences

Make = Callable[..., Any]
Result = dict[str, np.ndarray]
CLASSES = 10
MIB = 1 << 20
TWO = [mx.cpu(0), mx.cpu(1)]
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}


def planned(net: mx.sym.Symbol, **options: Any) -> memplan.mxnet.Module:
    """A Module whose plans are the least memory that a quick strategy finds."""
    return memplan.mxnet.Module(net, **{"strategy": "chen_greedy:linear", **options})


class Batches(mx.io.DataIter):
    """The same random numbers in every pass, in batches of these sizes; the first is announced."""

    def __init__(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__(sizes[0])
        random = np.random.default_rng(5)
        self.data = [random.normal(size=(size, *shape[1:])).astype("float32") for size in sizes]
        self.labels = [random.integers(0, CLASSES, size).astype("float32") for size in sizes]
        self.provide_data = [mx.io.DataDesc("data", (sizes[0], *shape[1:]))]
        self.provide_label = [mx.io.DataDesc("softmax_label", (sizes[0],))]
        self.reset()

    def reset(self) -> None:
        self.position = 0

    def next(self) -> mx.io.DataBatch:
        if self.position == len(self.data):
            raise StopIteration
        data, label = self.data[self.position], self.labels[self.position]
        self.position += 1
        return mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)], pad=0)


def batches(network: Network, *sizes: int) -> Batches:
    return Batches(network[1]["data"], sizes or (8, 8))


def seed() -> None:
    mx.random.seed(3)
    np.random.seed(3)


def wait(_: Any = None) -> None:
    """Until all is computed: MXNet lets moving statistics be read before they are written."""
    mx.nd.waitall()


def state(module: mx.mod.Module) -> Result:
    """Weights and auxiliary states."""
    wait()
    arguments, states = module.get_params()
    return {name: array.asnumpy() for name, array in {**arguments, **states}.items()}


def differing(one: Result, other: Result) -> list[str]:
    return differences([one], [other])


def fit(make: Make, network: Network, *sizes: int, **options: Any) -> tuple[Any, Result]:
    """The module that a script trains, and all that the script sees."""
    fitting = {"kvstore", "monitor", "epoch_end_callback"}
    module = make(network[0], **{k: v for k, v in options.items() if k not in fitting})
    data = batches(network, *sizes)
    metrics: list[float] = []

    def note(parameters: Any) -> None:
        wait()
        metrics.extend(value for _, value in parameters.eval_metric.get_name_value())

    seed()
    module.fit(
        data,
        eval_data=batches(network, 6, 6),
        eval_metric=["acc", "ce"],
        num_epoch=2,
        initializer=mx.init.Xavier(),
        optimizer_params=SGD,
        batch_end_callback=note,
        eval_batch_end_callback=note,
        **{k: v for k, v in options.items() if k in fitting},
    )
    score = [value for _, value in module.score(data, ["acc", "ce"])]
    result = state(module) | {"metrics": np.array(metrics + score)}
    result["predicted"] = module.predict(batches(network, 8)).asnumpy()
    return module, result


def assert_same(network: Network, *sizes: int, **options: Any) -> memplan.mxnet.Module:
    """Both modules see the same in the same script, and ours recomputes."""
    _, stock = fit(mx.mod.Module, network, *sizes, **options)
    module, ours = fit(planned, network, *sizes, **options)
    assert not differing(stock, ours)
    assert module.plan is not None
    assert module.plan.schedule.recomputed
    return module


def noisy_net(layers: int = 6) -> Network:
    """Dropout between layers that are worth recomputing."""
    body = mx.sym.Variable("data")
    for i in range(layers):
        body = mx.sym.FullyConnected(body, num_hidden=8, name=f"fc{i}")
        for _ in range(3):
            body = mx.sym.tanh(body * 2)
        body = mx.sym.Dropout(body, p=0.3, name=f"dropout{i}")
    scores = mx.sym.FullyConnected(body, num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 20)}


NETWORKS = {"residual": residual_net(units=2), "noisy": noisy_net()}


def steps(module: Any, network: Network, *sizes: int, **options: Any) -> Iterator[Any]:
    """Bound, initialised and trained batch by batch."""
    data = batches(network, *sizes)
    module.bind(data.provide_data, data.provide_label, **options)
    seed()
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params=SGD)
    for batch in data:
        module.forward_backward(batch)
        module.update()
        yield batch
