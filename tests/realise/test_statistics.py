"""BatchNorm's moving statistics under a mirror plan: counted once per batch, on any device.

cuDNN, which updates them in every forward call, does not run here. The attribute cudnn_off keeps
a recomputed BatchNorm away from it; what that does on a GPU was read in MXNet's source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mxnet as mx
import pytest

import memplan
from helpers.networks import Network, dense, loss, var
from helpers.operator_runs import by_name, training_run
from helpers.special_networks import normalized_by_what_it_reads, statistics
from helpers.states_of_user_code import OF_AVERAGING, read_beside_user_code
from memplan.mxnet.realise.mirror import annotate, unread_ops
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.flags import without_flags
from memplan.planning.realisation import trace
from memplan.step.mirroring import flaggable

SHAPES = {"data": (4, 3, 5, 5)}

KINDS: dict[str, dict[str, Any]] = {
    "kept": {},
    "usual": {"momentum": 0.81},
    "default": {},
    "channels_last": {"axis": -1},
    "said": {"cudnn_off": False},
    "fixed": {"use_global_stats": True},
    "native": {"cudnn_off": True},
}


def network() -> mx.sym.Symbol:
    body = mx.sym.Variable("data")
    for name, options in KINDS.items():
        body = mx.sym.sin(mx.sym.BatchNorm(body, name=name, **options))
    return body


def flagged_but_kept(traced: Trace) -> frozenset[int]:
    return frozenset(flaggable(traced.graph)) - by_name(traced, "kept")


def values(symbol: mx.sym.Symbol, attribute: str, default: str) -> dict[str, str]:
    found = symbol.attr_dict()
    return {name: found.get(name, {}).get(attribute, default) for name in KINDS}


@pytest.mark.parametrize("cudnn", [False, True])
def test_a_plan_for_one_device_is_right_on_the_other(cudnn: bool) -> None:
    symbol = network()
    traced = trace(symbol, shapes=SHAPES)
    planned = annotate(traced, flagged_but_kept(traced), on_gpu=cudnn)
    assert values(planned, "momentum", "0.9") == values(symbol, "momentum", "0.9")
    assert values(planned, "cudnn_off", "False") == {
        "kept": "False",
        "usual": "True",
        "default": "True",
        "channels_last": "True",
        "said": "True",
        "fixed": "False",  # its statistics are never updated
        "native": "True",
    }
    assert training_run(planned, traced) == training_run(symbol, traced)


def test_a_saved_plan_is_planned_again_as_the_network_it_was() -> None:
    symbol = network()
    traced = trace(symbol, shapes=SHAPES)
    planned = annotate(traced, flagged_but_kept(traced), on_gpu=True)
    assert planned.tojson() != symbol.tojson()
    assert without_flags(mx.sym.load_json(planned.tojson())).tojson() == symbol.tojson()


def test_a_batch_norm_that_has_no_backward_op_is_not_recomputed() -> None:
    """cuDNN would update its statistics in forward, MXNet's own kernels never do."""
    body = mx.sym.BatchNorm(mx.sym.Variable("data"), name="frozen")
    body = mx.sym.FullyConnected(mx.sym.sin(body), num_hidden=3, name="trained")
    requests = {"trained_weight": "write"}
    graph = trace(body, shapes=SHAPES, grad_req=requests).graph
    assert {op.name: op.recomputable for op in graph.ops[: graph.nforward]}["frozen"] is False
    graph = trace(body, shapes=SHAPES, grad_req=requests | {"frozen_beta": "write"}).graph
    assert {op.name: op.recomputable for op in graph.ops[: graph.nforward]}["frozen"] is True


def test_a_planned_symbol_keeps_every_momentum_on_a_gpu() -> None:
    net = mx.sym.Variable("data")
    for i in range(6):
        net = mx.sym.Convolution(net, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{i}")
        net = mx.sym.BatchNorm(net, momentum=0.81, name=f"norm{i}")
        net = mx.sym.Activation(net, act_type="relu", name=f"relu{i}")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3), name="softmax")
    plan = memplan.plan(
        net, strategy="memonger", costs="roofline:v100", ctx=mx.gpu(0), data=(8, 3, 16, 16)
    )
    norms = [n for n in json.loads(plan.symbol.tojson())["nodes"] if n["op"] == "BatchNorm"]
    flags = [n["attrs"].get("__force_mirroring__") == "True" for n in norms]
    assert len(norms) == 6
    assert any(flags)
    assert all(float(norm["attrs"]["momentum"]) == 0.81 for norm in norms)
    assert [norm["attrs"].get("cudnn_off") == "True" for norm in norms] == flags


def test_a_recomputed_batch_norm_needs_no_reader() -> None:
    """MXNet's own kernel writes whatever is asked of it; cuDNN's does not know kNullOp."""
    traced = trace(network(), shapes=SHAPES)
    assert not unread_ops(traced, by_name(traced, "usual"), on_gpu=True)


def test_what_reads_statistics_is_not_recomputed_when_they_have_been_updated() -> None:
    symbol, shapes = normalized_by_what_it_reads()
    for realisation in ("mirror", "explicit", "packed"):
        graph = trace(symbol, shapes=shapes, realisation=realisation).graph
        again = {op.name for op in graph.ops if op.recomputable}
        assert "wave" in again
        assert "reader" not in again


def read_beside_synchronized() -> Network:
    states = statistics("norm")
    body = mx.sym.broadcast_add(var(), states["moving_mean"], name="reader")
    norm = mx.sym.contrib.SyncBatchNorm(mx.sym.sin(body, name="wave0"), **states, key="alone")
    return loss(norm), {"data": (5, 7)}


@pytest.mark.parametrize(
    ("network", "realisations"),
    [
        (read_beside_user_code, ("mirror", "packed", "updating")),
        (read_beside_synchronized, ("mirror", "explicit")),
    ],
)
def test_what_reads_a_state_of_user_code_or_of_a_synchronized_norm_is_not_recomputed(
    network: Callable[[], Network], realisations: tuple[str, ...]
) -> None:
    symbol, shapes = network()
    for realisation in realisations:
        graph = trace(symbol, shapes=shapes, realisation=realisation).graph
        again = {op.name for op in graph.ops if op.recomputable}
        assert any(name.startswith("wave") for name in again)
        assert "reader" not in again


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_reads_and_writes_a_state_of_user_code_keeps_the_order(when: str) -> None:
    symbol, shapes = read_beside_user_code(when)
    ops = trace(symbol, shapes=shapes, realisation="packed").graph.ops
    order = [i for i, op in enumerate(ops) if op.name in ("reader", "writer", "writer_backward")]
    assert [ops[i].kind for i in order[2:]] == ["_backward_Custom"]
    for before, op in pairwise(order):
        assert before in ops[op].after


def test_a_sum_that_reads_a_state_waits_for_what_writes_it() -> None:
    """Other sums are computed as early as possible, where steps are spelled out."""
    states = statistics("norm")
    data = var(shape=(7,))
    wave = mx.sym.sin(mx.sym.sin(data))
    norm = mx.sym.BatchNorm(mx.sym.reshape(wave, (1, 7)), name="norm", **states)
    summed = mx.sym.elemwise_add(wave, states["moving_mean"], name="sum")
    symbol = mx.sym.Group([loss(norm), mx.sym.MakeLoss(mx.sym.square(summed))])
    for realisation in ("explicit", "packed", "updating"):
        graph = trace(symbol, shapes={"data": (7,)}, realisation=realisation).graph
        names = [op.name for op in graph.ops]
        assert names.index("norm") < names.index("sum")


def test_user_code_keeps_its_order_in_the_backward_pass() -> None:
    """It may draw random numbers there, too."""

    def custom(data: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
        state = var(f"{name}_mean")
        return mx.sym.Custom(data, state, op_type="memplan_averaging", name=name, **OF_AVERAGING)

    body = var()
    for i in range(2):
        weight = custom(var(f"weight{i}", shape=(7, 7)), f"of_weight{i}")
        body = custom(dense(body, 7, weight=weight), f"of_body{i}")
    orders = set()
    for realisation in ("mirror", "packed", "updating"):
        graph = trace(loss(body), shapes={"data": (5, 7)}, realisation=realisation).graph
        order = [i for i, op in enumerate(graph.ops) if op.kind == "_backward_Custom"]
        orders.add(tuple(graph.ops[i].name for i in order))
        if realisation != "mirror":
            assert all(before in graph.ops[i].after for before, i in pairwise(order))
    assert len(orders) == 1


def test_layers_that_share_statistics_update_them_in_the_same_order_in_any_step() -> None:
    states = statistics("norm")
    gamma = var("gamma")
    one, other = (
        mx.sym.BatchNorm(var(f"data{i}"), gamma, var(f"beta{i}"), **states, name=f"norm{i}")
        for i in range(2)
    )
    symbol = loss(mx.sym.concat(mx.sym.tanh(mx.sym.sin(one)), other, dim=1))
    requests = dict.fromkeys(("beta0", "beta1", "scores_weight"), "write")
    shapes = {"data0": (5, 7), "data1": (5, 7)}
    orders = {
        realisation: [
            op.name
            for op in trace(
                symbol, shapes=shapes, grad_req=requests, realisation=realisation
            ).graph.ops
            if op.kind == "_backward_BatchNorm"
        ]
        for realisation in ("mirror", "explicit", "packed", "updating")
    }
    assert set(map(tuple, orders.values())) == {tuple(orders["mirror"])}
