"""States of a Module: one array for all that run in its memory, as in MXNet."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.fitting import seed
from memplan.errors import ArgumentError
from memplan.mxnet import BucketingModule, Module

REALISATIONS = pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
SIZE, HIDDEN = 2, 4
LABEL = [("softmax_label", (SIZE,))]


def network(length: int) -> tuple[mx.sym.Symbol, tuple[str], tuple[str]]:
    """The mean over a series, and a state; the next state is an output."""
    data = mx.sym.FullyConnected(
        mx.sym.Variable("data"), num_hidden=HIDDEN, name="fc", flatten=False
    )
    scores = mx.sym.mean(data, axis=1) + mx.sym.Variable("state")
    outputs = [mx.sym.SoftmaxOutput(scores, name="softmax"), mx.sym.BlockGrad(mx.sym.tanh(scores))]
    return mx.sym.Group(outputs), ("data",), ("softmax_label",)


def batch(length: int) -> mx.io.DataBatch:
    series = np.random.default_rng(length).normal(size=(SIZE, length, 3))
    return mx.io.DataBatch(
        [mx.nd.array(series)],
        [mx.nd.arange(SIZE)],
        bucket_key=length,
        provide_data=[("data", series.shape)],
        provide_label=LABEL,
    )


def options(realisation: str) -> dict[str, Any]:
    return {"realisation": realisation, "strategy": "store_all"}


def handed_on(module: Any) -> list[np.ndarray]:
    """The outputs where the states of each bucket are what the one before has left."""
    module.bind(batch(6).provide_data, LABEL)
    seed()
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    module.set_states(value=0.5)
    found = []
    for length in (6, 4, 6, 2):
        module.forward_backward(batch(length))
        module.update()
        found += [output.asnumpy() for output in module.get_outputs()]
        module.set_states(states=[[module.get_outputs()[1].copy()]])
    module.forward(batch(3), is_train=False)  # a bucket that is not trained
    return [*found, *(output.asnumpy() for output in module.get_outputs())]


@REALISATIONS
def test_buckets_have_the_same_states(realisation: str) -> None:
    make = {"default_bucket_key": 6, "state_names": ["state"]}
    stock = handed_on(mx.mod.BucketingModule(network, **make))
    ours = handed_on(BucketingModule(network, **make, **options(realisation)))
    assert all(map(np.array_equal, stock, ours))


def of_two(make: Any, trains: bool, **given: Any) -> list[np.ndarray]:
    """What two modules see that share their memory and set their states by turns.

    The second takes longer series, for which the data of the first are too small, and ``trains``.
    """
    first, second = (make(network(size)[0], state_names=["state"], **given) for size in (4, 5))
    first.bind(batch(4).provide_data, LABEL)
    seed()
    first.init_params(mx.init.Xavier())
    first.init_optimizer()
    second.bind(batch(5).provide_data, LABEL, trains, shared_module=first)
    if trains:
        second.borrow_optimizer(first)
    first.set_states(value=0.0)
    second.set_states(value=2.0)
    first.forward_backward(batch(4))
    first.update()
    found = [first.get_outputs()[1].asnumpy()]
    first.set_states(value=-1.0)
    second.forward(batch(5), is_train=False)
    return [*found, second.get_outputs()[1].asnumpy(), second.get_states(False)[0][0].asnumpy()]


@REALISATIONS
@pytest.mark.parametrize("trains", [True, False])
def test_a_shared_module_has_the_same_states(trains: bool, realisation: str) -> None:
    """Be it one that only infers, which MXNet binds."""
    stock = of_two(mx.mod.Module, trains)
    ours = of_two(Module, trains, **options(realisation))
    assert all(map(np.array_equal, stock, ours))
    assert np.all(ours[2] == -1)


def test_of_a_state_without_a_shape_the_error_says_where_a_module_is_given_one() -> None:
    def module(state: mx.sym.Symbol) -> Module:
        scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
        net = mx.sym.MakeLoss(mx.sym.broadcast_mul(scores, state))
        return Module(net, label_names=None, state_names=["h"])

    with pytest.raises(ArgumentError, match=r"of a Module: mx\.sym\.Variable\('h', shape="):
        module(mx.sym.Variable("h")).bind([("data", (4, 5))])
    module(mx.sym.Variable("h", shape=(4, 3))).bind([("data", (4, 5))])
