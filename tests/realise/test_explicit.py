"""Explicit steps: what is in the Symbol, what it allocates, and the executor that runs it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet.base import _LIB, check_call

import memplan
from helpers.cases import CASES
from helpers.executors import ops
from helpers.explicit import explicit, identical, op, repeated_before
from helpers.networks import Network, dropout_net, residual_net, two_headed_net, unrolled_lstm, var
from helpers.schedules import random_schedule
from helpers.sparse import sparse_dot, sparse_embedding
from helpers.special_networks import group_norm_net, layer_norm_net
from helpers.training_runs import (
    bound,
    expected_ops,
    random_values,
)
from memplan.errors import ArgumentError, ScheduleError
from memplan.memory.blocks import allocate
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise.explicit import step_attrs, training_symbol
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.trace.environment import match_range
from memplan.mxnet.trace.nnvm import EntryInfo, Infos, Node
from memplan.mxnet.trace.operators import is_random
from memplan.mxnet.trace.probe import allocated_mib
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.step.simulate import simulate


@pytest.mark.parametrize("network", [layer_norm_net, group_norm_net])
def test_an_anchor_reads_the_output_that_nobody_else_reads(network: Callable[[], Network]) -> None:
    traced = explicit(network())
    schedule = repeated_before(traced, ["norm1"], "norm1_backward")
    names = [name for _, name in ops(bound(traced, schedule, random_values(traced)).debug_str())]
    place = names.index("norm1_again1")
    assert names[place : place + 3] == ["norm1_again1", "norm1_anchor", "norm1_backward"]
    assert identical(traced, schedule)


def test_a_copy_that_nobody_reads_is_not_emitted() -> None:
    traced = CASES["embedding"].trace()
    last = traced.graph.ops[-1].name
    schedule = repeated_before(traced, ["embedding", "picked"], last)
    values = random_values(traced, CASES["embedding"].integers)
    kinds = [kind for kind, _ in ops(bound(traced, schedule, values).debug_str())]
    assert kinds.count("Embedding") == kinds.count("pick") == 1


def test_a_copy_of_batch_norm_leaves_the_statistics_alone() -> None:
    traced = explicit(residual_net())
    schedule = repeated_before(traced, ["unit0_a_bn"], "unit0_a_bn_backward")
    data = json.loads(training_symbol(traced, schedule).tojson())
    momenta = {
        node["name"]: node.get("attrs", {}).get("momentum", "0.9")
        for node in data["nodes"]
        if "BatchNorm" in node["op"]
    }
    assert momenta.pop("unit0_a_bn_again1") == "1"
    assert set(momenta.values()) == {"0.9"}
    assert "_backward_BatchNorm" in {node["op"] for node in data["nodes"]}
    assert identical(traced, schedule)


def test_random_ops_run_once_and_in_order() -> None:
    traced = explicit(dropout_net())
    drops = [op(traced, f"dropout{i}") for i in range(3)]
    assert not any(traced.graph.ops[i].recomputable for i in drops)
    assert [
        drops[0] in traced.graph.ops[drops[1]].after,
        drops[1] in traced.graph.ops[drops[2]].after,
    ]


@pytest.mark.parametrize("size", [{}, {"size": "(4, 6)"}])
def test_a_gamma_distribution_keeps_its_shape(size: dict[str, str]) -> None:
    """Of others without inputs the attribute is the shape of the output."""
    infos = Infos((), (EntryInfo((4, 6), "float32", 4),))
    for kind, expected in (("_npi_gamma", "2.0"), ("_zeros", "(4, 6)")):
        node = Node(kind, "drawn", {"shape": "2.0", **size}, infos=infos)
        assert step_attrs(node, is_copy=False)["shape"] == expected


@pytest.mark.parametrize(
    ("name", "random"),
    [
        *((name, True) for name in "_npi_powerd _npi_gamma _random_normal_like _shuffle".split()),
        ("_contrib_dgl_csr_neighbor_uniform_sample", True),
        *((name, False) for name in "_npi_power _random_pdf_normal gamma BilinearSampler".split()),
    ],
)
def test_random_ops_are_known(name: str, random: bool) -> None:
    """NumPy's power() is no random op, but its random.power() is."""
    assert name in _operators()
    assert is_random(Node(name, "op")) == random


def _operators() -> list[str]:
    count, names = ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(count), ctypes.byref(names)))
    return [names[i].decode() for i in range(count.value)]


@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_allocator_model_is_exact(seed: int, width: int) -> None:
    normed = layer_norm_net()[0], {"data": (65536, 12)}
    for network in (residual_net(64, 64), normed, unrolled_lstm(batch=512, hidden=64)):
        traced = explicit(network)
        schedule = random_schedule(traced.graph, seed)
        total = allocate(lower(traced, schedule).schedule, match_range=width).reported_nbytes >> 20
        assert total >= 20, "too small to tell"
        with match_range(width):
            description = TrainExecutor(traced, schedule).debug_str()
        assert allocated_mib(description) == total


def test_gradients_are_counted_once() -> None:
    symbol, shapes = residual_net()
    stock = trace(symbol, shapes=shapes)
    traced = explicit((symbol, shapes))
    grads = [stock.shapes[n] for n, request in stock.grad_req.items() if request == "write"]
    nbytes = sum(4 * int(np.prod(shape)) for shape in grads)
    assert traced.graph.fixed_nbytes == stock.graph.fixed_nbytes - nbytes
    held = [traced.graph.tensors[t].nbytes for t in traced.graph.heads[1:]]
    assert sum(held) == nbytes


def test_a_schedule_of_another_graph_is_refused() -> None:
    symbol, shapes = residual_net()
    stock = trace(symbol, shapes=shapes)
    with pytest.raises(ScheduleError, match="another graph"):
        training_symbol(stock, Schedule.unplanned(stock.graph))
    with pytest.raises(ArgumentError, match="there is no realisation 'implicit'"):
        trace(symbol, shapes=shapes, realisation="implicit")


def test_inference_is_that_of_mxnet() -> None:
    traced = explicit(residual_net())
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    stock = traced.symbol.simple_bind(mx.cpu(), data=traced.shapes["data"])
    arrays = {name: mx.nd.array(value) for name, value in values.items()}
    stock.copy_params_from(
        {n: arrays[n] for n in stock.arg_dict}, {n: arrays[n] for n in stock.aux_dict}
    )
    executor.forward(is_train=True)
    outputs = executor.forward(data=arrays["data"] * 2)
    stock.forward(is_train=True)
    stock.backward()
    mx.nd.waitall()  # MXNet lets moving statistics be read before they are written
    stock.forward(is_train=False, data=arrays["data"] * 2)
    assert np.array_equal(outputs[0].asnumpy(), stock.outputs[0].asnumpy())


def test_gradients_go_into_the_arrays_given() -> None:
    traced = explicit(residual_net(), grad_req={"first_weight": "add", "scores_weight": "write"})
    values = random_values(traced)
    mine = {n: mx.nd.ones(traced.shapes[n]) for n in ("first_weight", "scores_weight")}
    args = {n: mx.nd.array(values[n]) for n in traced.symbol.list_arguments()}
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph), args=args, args_grad=mine)
    plain = TrainExecutor(traced, Schedule.unplanned(traced.graph), args=args)
    for each in (executor, plain, executor):
        each.forward(is_train=True)
    once = plain.grad_dict["first_weight"]
    assert executor.grad_dict["first_weight"] is mine["first_weight"]
    assert np.array_equal(mine["first_weight"].asnumpy(), (1 + once + once).asnumpy())
    assert np.array_equal(
        mine["scores_weight"].asnumpy(), plain.grad_dict["scores_weight"].asnumpy()
    )


def test_gradients_of_outputs_without_a_loss_are_given_before_the_step() -> None:
    traced = explicit(two_headed_net())
    executor = TrainExecutor(traced, Schedule.unplanned(traced.graph))
    with pytest.raises(ArgumentError, match="put the gradients of the outputs into head_grads"):
        executor.backward([mx.nd.zeros(1)])
    executor.backward([])


def test_errors_of_the_executor() -> None:
    traced = explicit(residual_net())
    schedule = Schedule.unplanned(traced.graph)
    with pytest.raises(ArgumentError, match="args must be a dictionary of arrays by their names"):
        TrainExecutor(traced, schedule, args=[mx.nd.zeros(1)])
    with pytest.raises(ArgumentError, match="args has an array for 'dta', which needs none"):
        TrainExecutor(traced, schedule, args={"dta": mx.nd.zeros(1)})
    with pytest.raises(
        ArgumentError, match=r"args\['data'\] is \(1,\) float32 on cpu\(0\); it must"
    ):
        TrainExecutor(traced, schedule, args={"data": mx.nd.zeros(1)})
    executor = TrainExecutor(traced, schedule)
    with pytest.raises(ArgumentError, match="'dta' is no argument"):
        executor.forward(dta=1)
    one = executor.arg_dict["data"][:1]
    with pytest.raises(ArgumentError, match=r"'data' has the shape \(1, .*; it must be \("):
        executor.forward(is_train=True, data=one)


def test_a_plan_runs_in_the_order_of_its_schedule() -> None:
    symbol, shapes = residual_net(batch=64)
    before = dict(os.environ)
    plan = memplan.plan(symbol, realisation="explicit", strategy="chen_sqrt", **shapes)
    assert plan.schedule.recomputed
    executor = TrainExecutor(plan.trace, plan.schedule)
    assert ops(executor.debug_str()) == expected_ops(plan.schedule)
    assert dict(os.environ) == before
    gradients = [n for n in symbol.list_arguments() if plan.trace.grad_req[n] == "write"]
    assert len(plan.symbol.list_outputs()) == 1 + len(gradients)
    assert list(executor.grad_dict) == gradients


def test_half_precision_is_counted_by_its_true_size() -> None:
    body = mx.sym.tanh(mx.sym.broadcast_mul(var(), var("scale")))
    shapes = {"data": (64, 7), "scale": (1, 7)}
    peaks, fixed = [], []
    for dtype in ("float16", "float32"):
        traced = explicit(
            (mx.sym.MakeLoss(body), shapes),
            type_dict=dict.fromkeys(shapes, dtype),
            grad_req="write",
        )
        peaks.append(simulate(Schedule.unplanned(traced.graph)).peak_nbytes)
        fixed.append(traced.graph.fixed_nbytes)
    assert 2 * peaks[0] == peaks[1] >= 2 * 64 * 7 * 4
    assert 2 * fixed[0] == fixed[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [("embedding", {}), ("unet", {"type_dict": {"data": "float64"}})],
)
def test_added_gradients_are_sums_of_written_ones(name: str, options: dict[str, Any]) -> None:
    """Some kernels of MXNet's add term by term, so that their sums differ in the last bit."""
    case = CASES[name]
    network, results = case.network(), []
    wanted = [n for n in network[0].list_arguments() if n not in case.integers]
    for request in ("write", "add"):
        traced = explicit(network, grad_req=dict.fromkeys(wanted, request), **options)
        executor = bound(
            traced, random_schedule(traced.graph, 1), random_values(traced, case.integers)
        )
        for _ in range(2):
            executor.forward(is_train=True)
        results.append({n: grad.asnumpy() for n, grad in executor.grad_dict.items()})
    for argument, written in results[0].items():
        assert np.array_equal(results[1][argument], written + written)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("network", [sparse_embedding, sparse_dot])
def test_row_sparse_gradients(network: Callable[[], Network], seed: int) -> None:
    symbol, shapes = network()
    wanted = ("weight", "scores_weight", "scores_bias")
    traced = explicit((symbol, shapes), grad_req=dict.fromkeys(wanted, "write"))
    stock = symbol.simple_bind(mx.cpu(), grad_req=dict(traced.grad_req), **shapes)
    values = random_values(traced, {"data": 29} if network is sparse_embedding else {})
    for name, array in stock.arg_dict.items():
        mx.nd.array(values[name]).tostype(array.stype).copyto(array)
    args = {name: array.copy() for name, array in stock.arg_dict.items()}
    executor = TrainExecutor(traced, random_schedule(traced.graph, seed), args=args)
    assert stock.grad_dict["weight"].stype == "row_sparse"
    for _ in range(3):
        for each in (stock, executor):
            each.forward(is_train=True)
            each.backward()
        for name in wanted:
            assert executor.grad_dict[name].stype == stock.grad_dict[name].stype
            mine, expected = executor.grad_dict[name].asnumpy(), stock.grad_dict[name].asnumpy()
            assert np.array_equal(mine, expected)
        for each in (stock, executor):
            update = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.1))
            for i, name in enumerate(wanted):
                update(i, each.grad_dict[name], each.arg_dict[name])
