"""What it takes for an explicit graph to be right: a test for each of the known pitfalls."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.executors import ops
from helpers.explicit import explicit, identical, repeated_before
from helpers.networks import Network, conv, dense, loss, residual_net, unrolled_lstm, var
from helpers.paths import ROOT
from helpers.schedules import random_schedule
from helpers.script import printed_by
from helpers.special_networks import (
    fused_rnn,
    gathered,
    many_terms,
    repeated_heads,
    shared_deconvolution,
    unet,
)
from helpers.training_runs import (
    bound,
    differences,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan.errors import TraceError
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.realise.explicit import training_symbol
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.measure import executor_description
from memplan.mxnet.trace.probe import allocated_mib
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule


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
    # Chains of sums of two are made of add_n, but those by which MXNet has its ops add in place.
    assert kinds == ({"add_n"} if count < 8 else {"add_n", "elemwise_add", "_copy"})


def test_4_a_sum_does_not_add_into_a_tensor_that_others_read() -> None:
    """The first of twelve terms is the gradient of a sum, which its other branch reads too."""
    traced = explicit(many_terms(12)())
    for seed in range(10):
        assert identical(traced, random_schedule(traced.graph, seed))


@pytest.mark.long
def test_4_an_unrolled_lstm_takes_no_more_memory_than_in_mxnet() -> None:
    """By MXNet's own word; gradients are outputs here, and arrays beside its executor."""
    network = unrolled_lstm(steps=100, batch=32, features=64, hidden=128)
    stock, traced = trace(network[0], shapes=network[1]), explicit(network)
    own = allocated_mib(executor_description(stock.symbol, stock))
    planned = TrainExecutor(traced, Schedule.unplanned(traced.graph))
    gradients = (stock.graph.fixed_nbytes - traced.graph.fixed_nbytes) >> 20
    assert own > 20, "too small to tell"
    assert allocated_mib(planned.debug_str()) <= 1.1 * (own + gradients)


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


def cond() -> Network:
    body = dense(var())
    return mx.sym.contrib.cond(mx.sym.sum(body) < 5, lambda: body * 3, lambda: body * 2), {
        "data": (4, 7)
    }


@pytest.mark.parametrize(
    ("network", "name"), [(custom, "mine"), (foreach, "_foreach"), (cond, "_cond")]
)
def test_6_user_code_and_loops_are_refused(network: Callable[[], Network], name: str) -> None:
    with pytest.raises(TraceError, match=f"op '{name}.*cannot be trained by an explicit plan"):
        explicit(network(), grad_req="write")


@mx.operator.register("memplan_test_counted")
class _CountedProp(mx.operator.CustomOpProp):
    def create_operator(self, *_: Any) -> Any:
        return _Counted()


class _Counted(mx.operator.CustomOp):
    """Its output tells how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.runs += 1
        self.assign(out_data[0], req[0], in_data[0] * self.runs)


def custom_without_gradient() -> Network:
    body = mx.sym.tanh(dense(var(), name="first"))
    mine = mx.sym.Custom(mx.sym.BlockGrad(body), op_type="memplan_test_counted", name="mine")
    return loss(body + mx.sym.BlockGrad(mx.sym.tanh(mine))), {"data": (4, 7)}


def foreach_without_gradient() -> Network:
    body = mx.sym.tanh(dense(var(), name="first"))
    items, _ = mx.sym.contrib.foreach(
        lambda item, state: (mx.sym.Dropout(item + state), item),
        mx.sym.BlockGrad(body),
        var("begin"),
    )
    return loss(body + mx.sym.BlockGrad(items)), {"data": (4, 7), "begin": (16,)}


@pytest.mark.parametrize("network", [custom_without_gradient, foreach_without_gradient])
def test_6_user_code_and_loops_without_gradient_are_kept(network: Callable[[], Network]) -> None:
    traced = explicit(network())
    kept = {
        call.kind for call in traced.graph.ops[: traced.graph.nforward] if not call.recomputable
    }
    assert kept & {"Custom", "_foreach"}
    assert identical(traced, random_schedule(traced.graph, 1, repeated=1.0))


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


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_8_deconvolution_with_a_shared_weight(realisation: str) -> None:
    """MXNet's own executor aborts on it; two weights with equal values tell the right sum."""
    symbol, shapes = shared_deconvolution()
    traced = trace(symbol, shapes=shapes, realisation=realisation)
    kinds = {call.kind for call in traced.graph.ops}
    assert ("_backward_Deconvolution" in kinds) is (realisation == "packed")
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


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 16, 7), {"kernel": (4,), "stride": (2,), "pad": (1,)}),
        ((2, 16, 5, 4), {"kernel": (3, 4), "stride": (2, 2), "num_group": 4, "adj": (1, 0)}),
        ((2, 16, 5, 4), {"kernel": (3, 3), "dilate": (2, 2), "no_bias": False}),
        ((2, 8, 5, 4), {"kernel": (2, 2), "stride": (2, 2), "num_filter": 3}),
        ((2, 4, 3, 3, 3), {"kernel": (2, 2, 2), "stride": (2, 2, 2), "num_filter": 4}),
    ],
    ids=["1D", "grouped", "dilated", "few channels", "3D"],
)
@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_8_deconvolution_of_every_kind(
    realisation: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Explicit steps are equal but for rounding: oneDNN may work in other layouts there."""
    body = mx.sym.Deconvolution(var(), name="deconv", **{"num_filter": 16, **options})
    traced = trace(
        mx.sym.MakeLoss(mx.sym.sum(mx.sym.tanh(body))),
        shapes={"data": shape},
        grad_req="write",
        realisation=realisation,
    )
    values = random_values(traced)
    expected = stock_steps(traced, values, 1)
    found = planned_steps(bound(traced, random_schedule(traced.graph, 1), values), 1)
    assert realisation == "explicit" or not differences(expected, found)
    for name, value in expected[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("layers", ["rows", "volumes", "pictures by row"])
def test_8_deconvolution_before_a_norm_of_anything_but_pictures(layers: str) -> None:
    """As a generator begins: MXNet's backward op of that BatchNorm makes a view of its gradient."""
    options = {"kernel": (4, 4), "stride": (2, 2), "pad": (1, 1), "num_filter": 8, "name": "deconv"}
    if layers == "rows":
        body = mx.sym.relu(mx.sym.BatchNorm(dense(var(), 32, name="dense"), name="norm"))
        body = mx.sym.Deconvolution(mx.sym.reshape(body, (-1, 8, 2, 2)), **options)
    else:
        ndim, axis = (3, 1) if layers == "volumes" else (2, 2)
        options |= {"kernel": (2,) * ndim, "stride": (2,) * ndim, "pad": (0,) * ndim}
        body = mx.sym.BatchNorm(var() * 2, axis=axis, name="norm")
        body = mx.sym.Deconvolution(body, **options)
    net = mx.sym.MakeLoss(mx.sym.sum(mx.sym.tanh(body)))
    shapes = {"data": (4, 6) if layers == "rows" else (2, 8) + (3,) * ndim}
    traced = trace(net, shapes=shapes, grad_req="write", realisation="explicit")
    values = random_values(traced)
    expected = stock_steps(traced, values, 1)
    found = planned_steps(bound(traced, random_schedule(traced.graph, 1), values), 1)
    assert not differences(expected, found)


def test_8_on_a_gpu_deconvolution_stays() -> None:
    kinds = [call.kind for call in explicit(unet(), device_type="gpu").graph.ops]
    assert kinds.count("_backward_Deconvolution") == 2
    assert kinds.count("Convolution") == 6


@pytest.mark.long
@pytest.mark.parametrize(
    "variables",
    [
        {"MXNET_MKLDNN_ENABLED": "0", "MXNET_STORAGE_FALLBACK_LOG_VERBOSE": "0"},
        {
            "MXNET_SUBGRAPH_BACKEND": "MKLDNN",
            "MXNET_BACKWARD_DO_MIRROR": "1",
            "MXNET_EXEC_BULK_EXEC_TRAIN": "0",
            "NNVM_EXEC_NUM_TEMP": "4",
        },
    ],
    ids=["without oneDNN", "a user's own"],
)
def test_9_under_other_settings(variables: dict[str, str]) -> None:
    code = (
        "from helpers.cases import assert_identical_to_mxnet\n"
        "for name in ('residual', 'unet_no_bias', 'terms5', 'lstm', 'dropout'):\n"
        "    assert_identical_to_mxnet(name, explicit=4)\n"
    )
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    printed_by("-c", code, **variables, PYTHONPATH=path)


def test_10_a_step_does_not_walk_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = explicit(residual_net())
    executor = bound(traced, Schedule.unplanned(traced.graph), random_values(traced))
    for method in ("list_arguments", "list_outputs", "list_auxiliary_states", "tojson"):
        monkeypatch.delattr(mx.sym.Symbol, method)
    executor.forward(is_train=True)
    executor.backward()
