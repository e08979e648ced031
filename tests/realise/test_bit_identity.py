"""Networks of real size train by tight plans, and by random schedules, as in MXNet: bit for bit.

A plan is made for the sizes at which a network is used, where activations are most of the memory,
and carried out on small inputs: the ops are the same ones in the same order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

from helpers.amounts import long_except
from helpers.networks import Network, unrolled_lstm
from helpers.schedules import random_schedule
from helpers.special_networks import (
    fused_rnn,
    group_norm_net,
    layer_norm_net,
    multi_head,
    shared_weights,
    transformer,
    unet,
)
from helpers.training_runs import Values, differences_by_turns, random_values
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.costs import with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate
from memplan.strategies.base import Problem
from memplan.strategies.checkmate import Checkmate
from memplan.strategies.evict import Evict

# Sides of the pictures on which the networks are trained here: enough for all their layers.
ZOO = {
    **{f"resnet{depth}_v{v}": 40 for v in (1, 2) for depth in (18, 34, 50, 101, 152)},
    **{f"vgg{depth}{bn}": 32 for bn in ("", "_bn") for depth in (11, 13, 16, 19)},
    "alexnet": 64,
    **{f"densenet{depth}": 48 for depth in (121, 161, 169, 201)},
    **{f"squeezenet{version}": 48 for version in ("1.0", "1.1")},
    "inceptionv3": 96,
    **{f"mobilenet{width}": 40 for width in ("1.0", "0.75", "0.5", "0.25")},
    **{f"mobilenetv2_{width}": 40 for width in ("1.0", "0.75", "0.5", "0.25")},
}


def zoo_network(name: str) -> mx.sym.Symbol:
    net = vision.get_model(name, classes=10)
    layers = [*net.features]
    if isinstance(net.output, nn.HybridSequential):
        layers += net.output
    for layer in layers:
        if isinstance(layer, nn.AvgPool2D):
            # Its window is as large as the picture at this place, if that has the usual size.
            layer._kwargs["global_pool"] = True
    return mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax")


def explicit(symbol: mx.sym.Symbol, **shapes: tuple[int, ...]) -> Trace:
    return trace(symbol, shapes=shapes, realisation="explicit")


def he_values(traced: Trace) -> Values:
    """Uniform weights under which activations neither grow nor fade, and inputs from 0 to 1."""
    values = {}
    for name, shape in traced.shapes.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        value = rng.random(shape, dtype=np.float32)
        if name.endswith("weight"):
            value = (value - 0.5) * math.sqrt(24.0 / math.prod(shape[1:]))
        values[name] = value
    return values


def tight(graph: TrainingGraph) -> Schedule:
    """A schedule in about the least memory that at most twice the time can buy."""
    peak = simulate(Schedule.unplanned(graph)).peak_nbytes
    for percent in (10, 20, 30, 40, 50, 60, 97):
        schedule = Evict(patience=0).solve(Problem(graph, peak * percent // 100)).schedule
        if schedule is not None and schedule.seconds <= 2 * graph.seconds:
            return schedule
    raise AssertionError("no budget below the unplanned peak can be met")


def on(traced: Trace, planned: Schedule) -> Schedule:
    """The same steps, for other sizes of the network's inputs."""
    names = [op.name for op in traced.graph.ops]
    assert names == [op.name for op in planned.graph.ops]
    return Schedule(traced.graph, planned.ops, planned.reads, planned.heads)


def test_the_whole_zoo_is_here() -> None:
    with pytest.raises(ValueError, match="not supported") as refused:
        vision.get_model("?")
    assert sorted(ZOO) == str(refused.value).split("\n\t")[1:]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", long_except(ZOO, ["mobilenetv2_0.25", "resnet18_v2", "squeezenet1.1"])
)
def test_model_zoo(name: str) -> None:
    symbol = zoo_network(name)
    size = 299 if name == "inceptionv3" else 224
    usual = explicit(symbol, data=(32, 3, size, size))
    planned = tight(with_costs(usual.graph, "roofline:v100"))
    assert planned.recomputed
    traced = explicit(symbol, data=(2, 3, ZOO[name], ZOO[name]))
    schedules = [on(traced, planned), random_schedule(traced.graph, 1)]
    assert not differences_by_turns(traced, schedules, he_values(traced))


@dataclass(frozen=True)
class Case:
    """A network, what bounds its integer inputs, and how many times larger it is planned."""

    network: Callable[[], Network]
    integers: Mapping[str, int] = field(default_factory=dict)
    times: int = 64


BY_HAND = {
    "unet": Case(unet),
    "unrolled_lstm": Case(unrolled_lstm),
    "fused_lstm": Case(fused_rnn),
    "bert_block": Case(
        lambda: transformer(hidden=768, nheads=12, wide=3072), {"data": 30}, times=200
    ),
    "multi_head": Case(multi_head),
    "layer_norm": Case(layer_norm_net),
    "group_norm": Case(group_norm_net),
    "shared_weights": Case(shared_weights),
}
SLOW = {"bert_block", "unet", "layer_norm", "shared_weights"}


@pytest.mark.parametrize("name", long_except(BY_HAND, BY_HAND.keys() - SLOW))
def test_by_hand(name: str) -> None:
    """Beside the tight plan, Checkmate's for the same memory, where the network is small."""
    case = BY_HAND[name]
    symbol, shapes = case.network()
    usual = {name: (case.times * shape[0], *shape[1:]) for name, shape in shapes.items()}
    graph = with_costs(explicit(symbol, **usual).graph, "roofline:v100")
    plans = [tight(graph)]
    if len(graph.ops) < 200:
        budget = simulate(plans[0]).peak_nbytes
        # Whatever is found by then will do: what it begins with, at least.
        outcome = Checkmate(time_limit=0.5, start=plans[0]).solve(Problem(graph, budget))
        assert outcome.schedule is not None
        plans.append(outcome.schedule)
    assert all(plan.recomputed for plan in plans)
    traced = explicit(symbol, **shapes)
    schedules = [on(traced, plan) for plan in plans]
    schedules += [random_schedule(traced.graph, seed) for seed in (1, 2)]
    assert not differences_by_turns(traced, schedules, random_values(traced, case.integers))
