"""What it takes for an explicit graph to be right: a test for each of the known pitfalls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from executors import ops
from memplan.allocator import allocate
from memplan.errors import ArgumentError, ScheduleError, TraceError
from memplan.mxnet.environment import match_range
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.explicit import training_symbol
from memplan.mxnet.lowering import lower
from memplan.mxnet.probe import allocated_mib
from memplan.mxnet.trace import Trace, trace
from memplan.schedule import Schedule
from networks import Network, dropout_net, residual_net, unrolled_lstm
from schedules import random_schedule
from test_explicit import (
    CASES,
    conv,
    dense,
    fused_rnn,
    gathered,
    group_norm_net,
    layer_norm_net,
    loss,
    many_terms,
    repeated_heads,
    shared_deconvolution,
    unet,
    var,
)
from training import bound, differences, planned_steps, random_values, stock_steps


def explicit(network: Network, **options: Any) -> Trace:
    symbol, shapes = network
    return trace(symbol, shapes=shapes, realisation="explicit", **options)


def op(traced: Trace, name: str) -> int:
    return next(i for i, call in enumerate(traced.graph.ops) if call.name == name)


def repeated_before(traced: Trace, names: list[str], place: str) -> Schedule:
    """The unplanned order, with ``names`` once more before ``place``."""
    steps = list(range(len(traced.graph.ops)))
    at = steps.index(op(traced, place))
    steps[at:at] = [op(traced, name) for name in names]
    return Schedule.sequence(traced.graph, steps)


def identical(traced: Trace, schedule: Schedule, **integers: int) -> bool:
    values = random_values(traced, integers)
    stock = stock_steps(traced, values)
    return not differences(stock, planned_steps(bound(traced, schedule, values)))


def test_1_the_latest_forward_call_comes_first_among_what_a_backward_op_waits_for() -> None:
    traced = explicit(residual_net())
    schedule = repeated_before(traced, ["first", "unit0_a_bn"], "unit0_a_bn_backward")
    data = json.loads(training_symbol(traced, schedule).tojson())
    nodes = {node["name"]: node for node in data["nodes"]}
    for name, forward in (
        ("unit0_a_bn_backward", "unit0_a_bn_again1"),
        ("first_backward", "first_again1"),
        ("unit0_conv1_backward", "unit0_conv1"),
    ):
        first = nodes[name]["control_deps"][0]
        assert data["nodes"][first]["name"] == forward


def test_2_copies_are_not_merged() -> None:
    traced = explicit(residual_net())
    schedule = repeated_before(
        traced, ["unit0_a_bn", "unit0_a_bn", "unit0_a_relu"], "unit0_conv1_backward"
    )
    # The first of the two copies is read by nobody, and so not emitted.
    names = [name for _, name in ops(bound(traced, schedule, random_values(traced)).debug_str())]
    assert [n for n in names if n.startswith("unit0_a_bn")][:2] == [
        "unit0_a_bn",
        "unit0_a_bn_again1",
    ]
    assert identical(traced, schedule)


def test_3_nothing_is_rewritten_and_nothing_leaks() -> None:
    traced = explicit(residual_net())
    before = dict(os.environ)
    executor = bound(traced, Schedule.unplanned(traced.graph), random_values(traced))
    executor.forward(is_train=False)
    assert dict(os.environ) == before
    assert all(array.context == mx.cpu(0) for array in executor.outputs)
    ordinary = mx.sym.relu(conv(var(), "conv")).simple_bind(
        mx.cpu(), grad_req="null", data=traced.shapes["data"]
    )
    assert "_sg_mkldnn_conv" in ordinary.debug_str()


@pytest.mark.parametrize("count", [2, 3, 5, 6, 8])
def test_4_sums_are_taken_early_and_safely(count: int) -> None:
    traced = explicit(many_terms(count - 1)())
    sums = [call for call in traced.graph.ops if call.name.startswith("sum_grad")]
    kinds = {call.kind for call in sums}
    # As many gradients of the tensor as of the weight, and one more.
    assert kinds == {2: {"add_n"}, 3: {"add_n"}, 5: {"add_n", "elemwise_add"}}.get(
        count, {"elemwise_add"} if count < 8 else {"elemwise_add", "_grad_add", "_copy"}
    )
    readers = traced.graph.readers
    for call in sums:
        if call.kind == "_grad_add":
            assert len(readers[call.inputs[0]]) == 1


def test_4_a_sum_does_not_add_into_a_tensor_that_others_read() -> None:
    """The first of twelve terms is the gradient of a sum, which its other branch reads too."""
    traced = explicit(many_terms(12)())
    for seed in range(10):
        assert identical(traced, random_schedule(traced.graph, seed))


def test_4_an_unrolled_lstm_takes_no_more_memory_than_in_mxnet() -> None:
    symbol, shapes = unrolled_lstm(steps=100, batch=32, features=64, hidden=128)
    totals = []
    for realisation in ("mirror", "explicit"):
        traced = trace(symbol, shapes=shapes, realisation=realisation)
        held = allocate(Schedule.unplanned(traced.graph)).nbytes
        totals.append(held + traced.graph.fixed_nbytes)
    assert totals[1] <= 1.1 * totals[0]


def test_5_what_a_fused_rnn_reads_is_kept_with_known_shapes() -> None:
    traced = explicit(fused_rnn())
    graph = traced.graph
    for index, node in enumerate(traced.nodes):
        if node.op == "RNN":
            assert not graph.ops[index].recomputable
            assert not any(
                graph.ops[graph.producer[t]].recomputable for t in graph.ops[index].inputs
            )
    data = json.loads(training_symbol(traced, Schedule.unplanned(graph)).tojson())
    zeros = [node["attrs"]["shape"] for node in data["nodes"] if node["op"] == "_zeros"]
    assert set(zeros) == {"(2, 3, 8)"}


def test_6_ops_that_count_as_backward_are_held_by_gates() -> None:
    traced = explicit(gathered())
    steps = lower(traced, Schedule.unplanned(traced.graph)).schedule
    names = [steps.graph.ops[i].name for i in steps.ops]
    for name in ("gathered", "scattered", "looked_up"):
        assert names.index(f"{name}_gate") == names.index(name) - 1
    assert "scattered_backward_gate" not in names
    sizes = {t.name: t.nbytes for t in steps.graph.tensors}
    # The gate of what reads variables only copies the smaller one, the places.
    assert sizes["looked_up_gate[0]"] == 2 * 9 * 4


@mx.operator.register("memplan_test_explicit")
class _Prop(mx.operator.CustomOpProp):
    def create_operator(self, *_: Any) -> Any:
        raise AssertionError("refused before anything runs")


def custom() -> Network:
    return loss(mx.sym.Custom(dense(var()), op_type="memplan_test_explicit", name="mine")), {
        "data": (4, 7)
    }


def foreach() -> Network:
    outputs, _ = mx.sym.contrib.foreach(
        lambda item, state: (mx.sym.tanh(item + state), item), var(), var("begin")
    )
    return mx.sym.MakeLoss(mx.sym.sum(outputs)), {"data": (5, 4), "begin": (4,)}


@pytest.mark.parametrize(("network", "name"), [(custom, "mine"), (foreach, "_foreach")])
def test_6_user_code_and_loops_are_refused(network: Callable[[], Network], name: str) -> None:
    with pytest.raises(TraceError, match=f"op '{name}.*cannot be trained by an explicit plan"):
        explicit(network(), grad_req="write")


def test_7_the_last_gradient_of_a_head_listed_twice_counts() -> None:
    traced = explicit(repeated_heads(), grad_req="write")
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    stock = traced.symbol.simple_bind(mx.cpu(), data=(4, 7))
    grads = [mx.nd.full(o.shape, i + 1.0) for i, o in enumerate(stock.outputs)]
    assert list(executor.head_grads) == ["_head_grad_2", "_head_grad_3"]
    for name, array in executor.head_grads.items():
        grads[int(name[-1])].copyto(array)
    stock.copy_params_from({n: mx.nd.array(values[n]) for n in stock.arg_dict})
    stock.forward(is_train=True)
    stock.backward(grads)
    executor.forward(is_train=True)
    for name, grad in executor.grad_dict.items():
        assert np.array_equal(grad.asnumpy(), stock.grad_dict[name].asnumpy())


def test_8_deconvolution_with_a_shared_weight() -> None:
    """MXNet's own executor aborts on it; two weights with equal values tell the right sum."""
    traced = explicit(shared_deconvolution())
    assert "_backward_Deconvolution" not in {call.kind for call in traced.graph.ops}
    values = random_values(traced)
    executor = bound(traced, random_schedule(traced.graph, 1), values)
    executor.forward(is_train=True)
    body = var()
    for i in range(2):
        body = mx.sym.Deconvolution(
            body, num_filter=4, kernel=(2, 2), stride=(2, 2), name=f"deconv{i}"
        )
        body = mx.sym.tanh(body)
    stock = mx.sym.MakeLoss(mx.sym.sum(body)).simple_bind(mx.cpu(), data=(2, 4, 5, 5))
    for name, array in stock.arg_dict.items():
        array[:] = values["weight" if name.endswith("weight") else name]
    stock.forward(is_train=True)
    stock.backward()
    parts = [stock.grad_dict[f"deconv{i}_weight"] for i in range(2)]
    assert np.array_equal(executor.grad_dict["weight"].asnumpy(), (parts[0] + parts[1]).asnumpy())


def test_8_on_a_gpu_deconvolution_stays() -> None:
    kinds = [call.kind for call in explicit(unet(), device_type="gpu").graph.ops]
    assert kinds.count("_backward_Deconvolution") == 2
    assert kinds.count("Convolution") == 6


def test_9_without_onednn() -> None:
    code = (
        "import test_explicit as t\n"
        "for name in ('residual', 'unet_no_bias', 'terms5', 'lstm'):\n"
        "    t.test_identical_to_mxnet(name)\n"
    )
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "MXNET_MKLDNN_ENABLED": "0",
        "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests"))),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_10_a_step_does_not_walk_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = explicit(residual_net())
    executor = bound(traced, Schedule.unplanned(traced.graph), random_values(traced))
    for method in ("list_arguments", "list_outputs", "list_auxiliary_states", "tojson"):
        monkeypatch.delattr(mx.sym.Symbol, method)
    executor.forward(is_train=True)
    executor.backward()


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


def test_random_ops_run_once_and_in_order() -> None:
    traced = explicit(dropout_net())
    drops = [op(traced, f"dropout{i}") for i in range(3)]
    assert not any(traced.graph.ops[i].recomputable for i in drops)
    assert [
        drops[0] in traced.graph.ops[drops[1]].after,
        drops[1] in traced.graph.ops[drops[2]].after,
    ]


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
    mx.nd.waitall()
    stock.forward(is_train=True)
    stock.backward()
    outputs = executor.forward(data=arrays["data"] * 2)
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


def test_errors_of_the_executor() -> None:
    traced = explicit(residual_net())
    schedule = Schedule.unplanned(traced.graph)
    with pytest.raises(ArgumentError, match="args has an array for 'dta', which needs none"):
        TrainExecutor(traced, schedule, args={"dta": mx.nd.zeros(1)})
    with pytest.raises(
        ArgumentError, match=r"args\['data'\] is \(1,\) float32 on cpu\(0\); it must"
    ):
        TrainExecutor(traced, schedule, args={"data": mx.nd.zeros(1)})
    executor = TrainExecutor(traced, schedule)
    with pytest.raises(ArgumentError, match="put the gradients of the outputs into head_grads"):
        executor.backward([mx.nd.zeros(1)])
    with pytest.raises(ArgumentError, match="'dta' is no argument"):
        executor.forward(dta=1)
