"""Measured costs of a network with a sum of several terms, whose gradients have no names."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import mxnet as mx
import pytest

import memplan
from helpers.amounts import long_unless
from memplan.mxnet.profile import profile
from memplan.planning.realisation import trace
from memplan.step.costs import with_costs


@pytest.mark.parametrize(
    ("add", "realisation"),
    long_unless(
        product([mx.sym.add_n, mx.sym.ElementWiseSum], ["mirror", "explicit", "packed"]),
        lambda case: case[0] is mx.sym.add_n or case[1] == "explicit",
    ),
)
def test_gradients_without_names_are_measured(
    add: Callable[..., mx.sym.Symbol], realisation: str
) -> None:
    with mx.name.NameManager():
        data = mx.sym.Variable("data")
        terms = [mx.sym.tanh(mx.sym.FullyConnected(data, num_hidden=8)) for _ in range(3)]
        net = mx.sym.SoftmaxOutput(add(*terms), name="softmax")
    options = {"ctx": mx.cpu(), "realisation": realisation}
    table = profile(net, repeats=1, warmup=0, data=(4, 5), **options)
    graph = with_costs(trace(net, shapes={"data": (4, 5)}, realisation=realisation).graph, table)
    seconds = {op.kind: op.seconds for op in graph.ops}
    assert {"_copy", "add_n"} <= seconds.keys()
    assert min(seconds.values()) > 0
    plan = memplan.plan(net, strategy="chen_greedy", costs=table, data=(4, 5), **options)
    assert plan.costs == f"measured on {table.device}"
