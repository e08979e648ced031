"""Named tuples whose classes a script makes anew in every step."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from memplan.mxnet.gluon import TrainStep, planned

L2 = gluon.loss.L2Loss()
QUICKLY: dict[str, Any] = {"strategy": "chen_sqrt", "realisation": "packed"}


class Handing(nn.HybridBlock):  # type: ignore[misc]
    """Returns what it gets, in a tuple of the same class."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.dense = nn.Dense(6, in_units=6)

    def hybrid_forward(self, F: Any, pair: Any) -> Any:  # noqa: N803
        return pair._replace(x=self.dense(pair.x) + pair.y)


class Summing(nn.HybridBlock):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(prefix="sum_")
        with self.name_scope():
            self.dense = nn.Dense(6, in_units=6)

    def hybrid_forward(self, F: Any, pair: Any) -> Any:  # noqa: N803
        return self.dense(pair[0]) + pair[1]


def network(kind: Any) -> Any:
    mx.random.seed(3)
    net = kind()
    net.initialize(mx.init.Xavier())
    return net


@pytest.mark.parametrize("way", ["planned", "TrainStep"])
def test_a_class_that_is_made_in_every_step_is_planned_once(way: str) -> None:
    results = []
    for is_planned in (False, True):
        net = network(Handing)
        step = TrainStep(net, **QUICKLY) if is_planned and way == "TrainStep" else None
        if is_planned and way == "planned":
            step = planned(net, **QUICKLY).planned_step
        for scale in (1, 2, 3):
            pair = namedtuple("pair", "x y")(mx.nd.ones((2, 6)) * scale, mx.nd.ones((2, 6)))
            # A tuple that is the only input would be several.
            run = functools.partial(step.forward, (pair,)) if way == "TrainStep" and step else None
            with autograd.record():
                outputs = run() if run else net(pair)
                loss = outputs.x.sum()
            assert type(outputs) is type(pair)
            (step.backward if run and step else mx.autograd.backward)(loss)
            results.append([outputs.x.asnumpy(), net.dense.weight.grad().asnumpy()])
        assert step is None or len(step.plans) == len(step._plans.made) == 1
    for plain, by_plan in zip(results[:3], results[3:], strict=True):
        assert all(map(np.array_equal, plain, by_plan))


def test_a_block_tells_named_tuples_of_other_fields_apart() -> None:
    kinds = [namedtuple("pair", names) for names in ("x y", "x z", "x y")]
    net = planned(network(Handing), **QUICKLY)
    net.hybrid_forward = lambda _, pair: net.dense(pair.x) * (2 if hasattr(pair, "y") else 3)
    values = []
    for kind in kinds:
        with autograd.record():
            output = net(kind(mx.nd.ones((2, 6)), mx.nd.ones((2, 6))))
        output.backward()
        values.append(output.asnumpy() / (3 if kind is kinds[1] else 2))
    assert np.allclose(values, values[0])
    assert len(net.planned_step._plans.made) == 2


def test_a_loss_gets_labels_of_the_class_of_now() -> None:
    kinds: list[Any] = []

    def loss(output: Any, pair: Any) -> Any:
        return L2(output, pair.x) * (2 if isinstance(pair, kinds[-1]) else 3)

    net = network(lambda: nn.Dense(6, in_units=6, prefix="net_"))
    step = TrainStep(net, loss, **QUICKLY)
    x, y = mx.nd.ones((2, 6)), mx.nd.zeros((2, 6))
    for _ in range(3):
        kinds.append(namedtuple("pair", "x y"))
        assert np.array_equal(step(x, kinds[-1](y, y)).asnumpy(), 2 * L2(net(x), y).asnumpy())
    assert len(step._plans.made) == 1


def test_a_list_with_fields_is_no_named_tuple() -> None:
    kind = type("Pair", (list,), {"_fields": ["x", "y"]})
    net = planned(network(Summing), **QUICKLY)
    outputs = []
    for pair in ([mx.nd.ones((2, 6))] * 2, kind([mx.nd.ones((2, 6))] * 2)):
        with autograd.record():
            loss = net(pair).sum()
        loss.backward()
        outputs.append(loss)
    assert outputs[0] == outputs[1]
