"""Monitors see in a planned step what they see in MXNet's."""

from __future__ import annotations

import dataclasses
import functools

import mxnet as mx
import numpy as np
import pytest

import memplan
import memplan.mxnet
from helpers.fitting import CLASSES, NETWORKS, batches, fit, planned
from helpers.networks import residual_net
from memplan.mxnet.executor import TrainExecutor
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule

# Gradients of data and labels are not wanted: what lies there is not computed, and packed steps do
# not show it.
UNLIKE = {"first_backward_output0", "softmax_backward_output1"}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 5)], ids=["equal", "smaller"])
def test_monitors(sizes: tuple[int, ...], realisation: str) -> None:
    """They see every op that MXNet runs without a plan, and nothing else."""
    network = NETWORKS["residual"]
    seen: list[list[tuple[int, str, str]]] = []

    class Monitor(mx.mon.Monitor):
        def toc_print(self) -> None:
            seen[-1].extend(self.toc())

    for make in (mx.mod.Module, functools.partial(planned, realisation=realisation)):
        seen.append([])
        fit(make, network, *sizes, monitor=Monitor(1))
    stock, ours = (sorted(row for row in rows if row[1] not in UNLIKE) for rows in seen)
    assert [row[:2] for row in stock] == [row[:2] for row in ours]
    assert any(name.endswith("relu_output") for _, name, _ in stock)
    assert any("bn_backward_output" in name for _, name, _ in stock)
    assert stock == ours


def _before(graph: TrainingGraph, op: int, again: set[int | None]) -> list[int]:
    source = graph.ops[op].differentiates
    return [source] if source is not None and source in again else []


def test_monitors_of_anchors() -> None:
    """An op that a plan adds has outputs of which no statistics can be taken."""
    body = mx.sym.Variable("data")
    for i in range(4):
        norm = mx.sym.LayerNorm(body, name=f"norm{i}")
        body = body + mx.sym.FullyConnected(mx.sym.relu(norm), num_hidden=12, name=f"fc{i}")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=CLASSES), name="softmax")
    plan = memplan.plan(net, realisation="explicit", strategy="store_all", data=(8, 12))
    # Its mean and deviation are recomputed, its main output is not needed again.
    graph = plan.trace.graph
    again = {next(op.differentiates for op in graph.ops if op.kind == "_backward_LayerNorm")}
    steps = [i for op in range(len(graph.ops)) for i in (*_before(graph, op, again), op)]
    schedule = Schedule.sequence(graph, steps)
    module = planned(net, plan=dataclasses.replace(plan, schedule=schedule))
    module.bind([("data", (8, 12))], [("softmax_label", (8,))])
    assert "anchor" in module._exec_group.execs[0].debug_str()
    module.init_params()
    dtypes = []
    monitor = mx.mon.Monitor(1, stat_func=lambda array: dtypes.append(array.dtype) or array)
    module.install_monitor(monitor)
    monitor.tic()
    module.forward_backward(batches((net, {"data": (8, 12)})).next())
    assert set(dtypes) == {np.float32}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_monitors_of_an_executor(realisation: str) -> None:
    """In a step and in inference they see what they see in MXNet's executor."""
    net, shapes = residual_net(batch=64)
    plan = memplan.plan(net, realisation=realisation, strategy="chen_sqrt", **shapes)
    assert plan.schedule.recomputed
    options = {"match_range": plan.match_range, "packing": plan.packing}
    seen = []
    for executor in (
        net.simple_bind(mx.cpu(), grad_req=dict(plan.trace.grad_req), **shapes),
        TrainExecutor(plan.trace, plan.schedule, ctx=mx.cpu(), **options),
    ):
        random = np.random.default_rng(0)
        for name, array in executor.arg_dict.items():
            array[:] = 0 if name == "softmax_label" else random.normal(size=array.shape)
        monitor = mx.mon.Monitor(1, sort=True)
        monitor.install(executor)
        for is_train in (True, False):
            monitor.tic()
            executor.forward(is_train=is_train)
            if is_train:
                executor.backward()
            seen.append([row[1:] for row in monitor.toc() if row[1] not in UNLIKE])
    assert len(seen[0]) > len(seen[1])
    assert seen[:2] == seen[2:]


def test_an_executor_says_which_arguments_have_no_gradient() -> None:
    net, shapes = residual_net()
    plan = memplan.plan(net, realisation="packed", strategy="store_all", **shapes)
    executor = TrainExecutor(plan.trace, plan.schedule)
    stock = net.simple_bind(mx.cpu(), grad_req=dict(plan.trace.grad_req), **shapes)
    missing = [name for name in stock.arg_dict if stock.grad_dict[name] is None]
    assert missing == ["data", "softmax_label"]
    assert [name for name in executor.arg_dict if executor.grad_dict[name] is None] == missing
    assert [*executor.grad_dict] == [name for name in stock.arg_dict if name not in missing]
