"""Ops whose main output nobody reads in explicit steps, as where a network writes a layer twice.

MXNet's own executor asks them for no such output, and has garbage, or aborts: packed steps, where
every output is written, tell what is right.
"""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.explicit import explicit
from helpers.networks import Network, var
from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

Layer = Callable[[], mx.sym.Symbol]


def layer_norm() -> Layer:
    inputs = [var("data"), var("gamma"), var("beta")]
    return lambda: mx.sym.LayerNorm(*inputs)


def group_norm() -> Layer:
    inputs = [var("data"), var("gamma"), var("beta")]
    return lambda: mx.sym.GroupNorm(*inputs, num_groups=2)


def instance_norm() -> Layer:
    inputs = [var("data"), var("gamma"), var("beta")]
    return lambda: mx.sym.InstanceNorm(*inputs)


def embedding() -> Layer:
    inputs = [var("data"), var("table")]
    return lambda: mx.sym.Embedding(*inputs, input_dim=9, output_dim=5)


def take() -> Layer:
    inputs = [var("table", shape=(9, 5)), var("data")]
    return lambda: mx.sym.take(*inputs)


def assert_as_packed(network: Network, **integers: int) -> None:
    """Explicit steps by several schedules compute what packed ones do."""
    symbol, shapes = network
    traced = explicit(network)
    in_one_array = trace(symbol, shapes=shapes, realisation="packed")
    values = random_values(traced, integers)
    packed = bound(in_one_array, Schedule.unplanned(in_one_array.graph), values)
    expected = planned_steps(packed)
    schedules = [random_schedule(traced.graph, seed) for seed in range(3)]
    for schedule in (Schedule.unplanned(traced.graph), *schedules):
        assert not differences(expected, planned_steps(bound(traced, schedule, values)))


@pytest.mark.parametrize("make", [layer_norm, group_norm, instance_norm, embedding, take])
def test_a_layer_written_twice_of_which_the_later_copy_is_an_output(
    make: Callable[[], Layer],
) -> None:
    """MXNet has the outputs read one of the two, and differentiates both."""
    with mx.name.NameManager():
        layer = make()
        net = mx.sym.Group([mx.sym.tanh(layer()), layer()])
    if make in (embedding, take):
        assert_as_packed((net, {"data": (3, 4)}), data=9)
    else:
        assert_as_packed((net, {"data": (3, 4, 5, 5)}))


def test_the_mean_of_a_norm_whose_main_output_nobody_reads() -> None:
    with mx.name.NameManager():
        body = mx.sym.FullyConnected(var(), num_hidden=6)
        norm = mx.sym.LayerNorm(body, var("gamma"), var("beta"), output_mean_var=True)
    assert_as_packed((mx.sym.tanh(norm[1]), {"data": (3, 5)}))
