"""Measured costs of every op of a step."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.networks import (
    Network,
    dropout_net,
    hinted_resnet,
    residual_net,
    two_headed_net,
    unrolled_lstm,
)
from memplan.errors import ArgumentError, CostError
from memplan.memory.blocks import allocate
from memplan.mxnet.profile import (
    _measure,
    _timed_calls,
    frugal_schedule,
    profile,
    profile_inputs,
)
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.stopwatch import call_seconds
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.device import device_name
from memplan.planning.job import Job
from memplan.planning.realisation import trace
from memplan.step.costs import CostTable, with_costs
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies.spaces.flags import Flags

# So long that no busy machine makes another op look as slow.
FORWARD_SECONDS, BACKWARD_SECONDS = 0.2, 0.4


class _Slow(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        time.sleep(FORWARD_SECONDS)
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        time.sleep(BACKWARD_SECONDS)
        self.assign(in_grad[0], req[0], out_grad[0])


class _Broken(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        raise RuntimeError("this op is broken")


@mx.operator.register("memplan_slow")
class _SlowProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return _Slow()


@mx.operator.register("memplan_broken")
class _BrokenProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return _Broken()


def upward_net() -> Network:
    """A Deconvolution, whose weight gradient is rewritten, and a gradient of many terms."""
    with mx.name.NameManager():
        body = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=4, kernel=(1, 1))
        body = mx.sym.Deconvolution(body, num_filter=4, kernel=(2, 2), stride=(2, 2))
        body = sum((mx.sym.tanh(body * (i + 2.0)) for i in range(5)), body)
        return mx.sym.MakeLoss(mx.sym.sum(body)), {"data": (2, 3, 8, 8)}


def costed(network: Network, **options: object) -> TrainingGraph:
    net, shapes = network
    table = profile(net, **{"repeats": 2, "warmup": 1, **options}, **shapes)
    return with_costs(trace(net, shapes=shapes).graph, table)


@pytest.mark.parametrize(
    "network", [residual_net, hinted_resnet, dropout_net, two_headed_net], ids=lambda f: f.__name__
)
def test_every_op_has_a_positive_cost(network: Callable[[], Network]) -> None:
    assert min(op.seconds for op in costed(network()).ops) > 0


@pytest.mark.parametrize(
    "network", [residual_net, unrolled_lstm, two_headed_net, upward_net], ids=lambda f: f.__name__
)
def test_a_table_for_explicit_plans(network: Callable[..., Network]) -> None:
    """It has the ops of both graphs: figures of the unplanned step are those of MXNet's own."""
    net, shapes = network(steps=4) if network is unrolled_lstm else network()
    options = {"ctx": mx.cpu(), "realisation": "explicit"}
    table = profile(net, repeats=1, warmup=0, **options, **shapes)
    explicit = trace(net, shapes=shapes, realisation="explicit").graph
    stock = trace(net, shapes=shapes).graph
    if network is upward_net:
        assert {op.signature for op in explicit.ops} - {op.signature for op in stock.ops}
    free = [op.kind for op in with_costs(explicit, table).ops if op.seconds == 0]
    assert set(free) <= {"_grad_add"}
    plan = memplan.plan(net, strategy="chen_greedy", costs=table, **options, **shapes)
    assert plan.schedule.graph.seconds > 0
    assert plan.unplanned.seconds > 0
    assert plan.costs == f"measured on {table.device}"


def test_explicit_ops_are_timed_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first execution of an op counts, and never what the realisation adds."""
    measured = []

    def noted(traced: Trace, *arguments: object) -> tuple[list[str], list[list[float]]]:
        names, passes = _measure(traced, *arguments)
        measured.append(traced.form.name)
        extra = ["_again" in name or "_anchor" in name for name in names]
        assert any(extra) is (traced.form.name == "explicit")
        slow = [[9.0 if x else s for x, s in zip(extra, row, strict=True)] for row in passes]
        return names, slow

    monkeypatch.setattr("memplan.mxnet.profile._measure", noted)
    net, shapes = residual_net(units=8)
    table = profile(net, repeats=1, warmup=1, realisation="explicit", **shapes)
    assert measured == ["mirror", "explicit"]
    assert max(table.seconds.values()) < 1


def test_packed_calls_are_timed_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first execution of an op counts."""
    nrepeats = []

    def noted(traced: Trace, schedule: Schedule, *arguments: Any) -> list[list[float]]:
        [row] = _timed_calls(traced, schedule, *arguments)
        ops = lower(traced, schedule).schedule.ops
        assert len(row) == len(ops)
        assert min(row) >= 0
        repeats = [op in ops[:step] for step, op in enumerate(ops)]
        nrepeats.append(sum(repeats))
        # A step's own seconds may all be less than a wait, on a busy machine.
        return [[9.0 if x else 0.5 + 0.001 * step for step, x in enumerate(repeats)]]

    monkeypatch.setattr("memplan.mxnet.profile._timed_calls", noted)
    # In a process of its own, which takes longer than all else here.
    monkeypatch.setattr("memplan.mxnet.profile._workspace_nbytes", lambda *_: 0)
    net, shapes = residual_net(units=8)
    table = profile(net, repeats=1, warmup=1, realisation="packed", **shapes)
    assert nrepeats[0] > 0
    assert 0 < min(table.seconds.values()) < max(table.seconds.values()) < 1
    packed = trace(net, shapes=shapes, realisation="packed").graph
    assert {op.signature for op in packed.ops} <= table.seconds.keys()


@pytest.fixture
def of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The realisations that were profiled on a GPU, which is this CPU."""
    asked: list[object] = []

    def measured(net: mx.sym.Symbol, shapes: dict[str, Any], **options: Any) -> CostTable:
        asked.append(options["realisation"])
        table = profile_inputs(net, shapes, **{**options, "ctx": mx.cpu(), "repeats": 1})
        return dataclasses.replace(table, device="gpu(a model)")

    monkeypatch.setattr("memplan.mxnet.profile.profile_inputs", measured)
    monkeypatch.setattr("memplan.mxnet.trace.device.device_name", lambda _: "gpu(a model)")
    return asked


def test_a_gpu_is_profiled_for_the_realisation(of_a_gpu: list[object]) -> None:
    net, shapes = residual_net()
    for realisation in ("mirror", "explicit"):
        memplan.plan(net, realisation=realisation, strategy="store_all", ctx=mx.gpu(0), **shapes)
    assert of_a_gpu == ["mirror", "explicit"]


def test_inputs_may_have_the_names_of_options(of_a_gpu: list[object]) -> None:
    """Those of a Module are named by its iterator."""
    for name in ("net", "shapes", "ctx", "realisation", "type_dict", "repeats", "warmup"):
        net = mx.sym.MakeLoss(mx.sym.FullyConnected(mx.sym.Variable(name), num_hidden=3))
        job = Job.of_inputs(net, {name: (4, 5)}, ctx=mx.gpu(0))
        assert job.trace.shapes[name] == (4, 5)
    assert of_a_gpu == ["mirror"] * 7


def test_the_table_tells_where_it_was_measured() -> None:
    net, shapes = dropout_net()
    table = profile(net, repeats=np.int64(1), warmup=np.int64(1), **shapes)
    assert isinstance(table, CostTable)
    assert table.device == device_name(mx.cpu())
    assert table.device.startswith("cpu(")
    assert table.shapes == shapes


def test_another_batch_size_lacks_ops() -> None:
    net, shapes = dropout_net()
    table = profile(net, repeats=1, **shapes)
    other = trace(net, shapes={"data": (16, 20)}).graph
    with pytest.raises(CostError, match=r"data=\(8, 20\)"):
        with_costs(other, table)


def test_times_belong_to_their_ops() -> None:
    data = mx.sym.Variable("data")
    body = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=4), act_type="relu")
    body = mx.sym.Custom(body, op_type="memplan_slow", name="slow")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=2), name="softmax")
    graph = costed((net, {"data": (2, 3)}), repeats=3)
    least = 0.95  # what a wait takes is subtracted, which on a busy machine is milliseconds
    for op in graph.ops:
        if op.kind == "Custom":
            assert least * FORWARD_SECONDS <= op.seconds < BACKWARD_SECONDS
        elif op.kind == "_backward_Custom":
            assert least * BACKWARD_SECONDS <= op.seconds < 2 * BACKWARD_SECONDS
        else:
            assert op.seconds < FORWARD_SECONDS / 2


def test_an_op_costs_its_lower_quartile_and_equal_ops_their_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mx.name.NameManager():
        body = mx.sym.Variable("data") * mx.sym.Variable("scale")
    net = mx.sym.tanh(mx.sym.tanh(body, name="first"), name="second")
    shapes = {"data": (2,), "scale": (2,)}
    names = ["_mul0_output", "first_output", "second_output", "_head_grad_0_id_output"]
    names += ["second_backward_output0", "first_backward_output0"]
    names += ["_mul0_backward_output0", "_mul0_backward_output1"]
    passes = [[1, second, 3, 1, 1, 1, 1, 1] for second in (900, 7, 1, 800, 9)]

    def measured(*_: object) -> tuple[list[str], list[list[int]]]:
        return names, passes

    monkeypatch.setattr("memplan.mxnet.profile._measure", measured)
    monkeypatch.setattr("memplan.mxnet.profile.callback_seconds", lambda _: (0.25, 0.5))
    graph = trace(net, shapes=shapes, grad_req={"scale": "write"}).graph
    table = profile(net, grad_req={"scale": "write"}, **shapes)
    seconds = [op.seconds for op in with_costs(graph, table).ops]
    assert [op.name for op in graph.ops[:3]] == ["_mul0", "first", "second"]
    assert seconds[:3] == [0.5, (6.5 + 2.5) / 2, (6.5 + 2.5) / 2]


def test_waiting_for_the_turn_on_a_busy_machine_is_no_overhead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is taken off every op's seconds would be more than most ops take."""
    turns = itertools.cycle([0.004, 0.0005, 0.004, 0.004, 0.0005])
    monkeypatch.setattr(PackedMemory, "timed", lambda *_: next(turns))
    _, overhead = call_seconds(mx.cpu())
    assert overhead <= 0.0005


def test_copies_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may do nothing, where only a control dependency asks for them."""
    copies = 0

    def measured(*arguments: object) -> tuple[list[str], list[list[float]]]:
        nonlocal copies
        names, passes = _measure(*arguments)
        is_copy = ["_mirror_" in name and "_backward_" not in name for name in names]
        copies += sum(is_copy)
        slow = [[9.0 if c else s for c, s in zip(is_copy, row, strict=True)] for row in passes]
        return names, slow

    monkeypatch.setattr("memplan.mxnet.profile._measure", measured)
    graph = costed(residual_net(units=8))
    assert copies
    assert max(op.seconds for op in graph.ops) < 1


def test_profiling_takes_less_memory_than_the_step() -> None:
    net, shapes = residual_net(units=8)
    graph = trace(net, shapes=shapes).graph
    schedule = frugal_schedule(graph, Flags())
    assert schedule.recomputed
    assert allocate(schedule).nbytes < 0.8 * allocate(Schedule.unplanned(graph)).nbytes


def test_sums_that_mxnet_adds_in_place_cost_nothing() -> None:
    """From eight terms on, MXNet skips the additions of a sum of gradients."""
    graph = costed(unrolled_lstm(steps=9, layers=1))
    free = [op for op in graph.ops if op.seconds == 0]
    assert free
    assert all(op.kind == "_grad_add" for op in free)


def test_tokens_labels_and_integers() -> None:
    tokens = mx.sym.Variable("tokens")
    lengths = mx.sym.Variable("lengths")
    body = mx.sym.Embedding(tokens, input_dim=7, output_dim=5, name="embedding")
    body = mx.sym.SequenceMask(mx.sym.swapaxes(body, 0, 1), lengths, use_sequence_length=True)
    scores = mx.sym.FullyConnected(body, num_hidden=3, flatten=False)
    picked = mx.sym.pick(mx.sym.log_softmax(scores), mx.sym.Variable("label"), axis=-1)
    net = mx.sym.MakeLoss(-mx.sym.sum(picked))
    shapes = {"tokens": (4, 6), "lengths": (4,), "label": (6, 4)}
    types = dict.fromkeys(net.list_arguments(), "float32") | {"tokens": "int32"}
    table = profile(net, repeats=1, type_dict=types, **shapes)
    graph = trace(net, shapes=shapes, type_dict=types).graph
    assert min(op.seconds for op in with_costs(graph, table).ops) > 0


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_floats(dtype: str) -> None:
    net = mx.sym.MakeLoss(mx.sym.tanh(mx.sym.Variable("data") * mx.sym.Variable("scale")))
    shapes = {"data": (4, 5), "scale": (4, 5)}
    types = dict.fromkeys(shapes, dtype)
    request = {"scale": "add"}
    table = profile(net, repeats=1, type_dict=types, grad_req=request, **shapes)
    graph = trace(net, shapes=shapes, type_dict=types, grad_req=request).graph
    assert with_costs(graph, table).seconds > 0


@pytest.mark.long
def test_the_memory_is_returned() -> None:
    """MXNet hands every monitored output to the callback, which has to free it."""
    mib = 1 << 20
    body = mx.sym.Variable("data") * mx.sym.Variable("scale")
    for _ in range(8):
        body = mx.sym.tanh(body)
    net = mx.sym.MakeLoss(body)

    def run() -> int:
        # A leaked executor keeps its 8 MiB of activations and more.
        profile(net, repeats=1, warmup=0, data=(mib,), scale=(mib,), grad_req={"scale": "write"})
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    run()
    before = run()
    assert max(run() for _ in range(4)) - before < 40 * mib


def test_an_op_that_fails() -> None:
    body = mx.sym.Custom(mx.sym.Variable("data") * mx.sym.Variable("w"), op_type="memplan_broken")
    with pytest.raises(CostError, match=r"cannot run a step.*cpu\(0\).*kCustomOpForward"):
        profile(mx.sym.MakeLoss(body), repeats=1, data=(2,), w=(2,), grad_req="write")
    # and MXNet is in order afterwards
    net, shapes = dropout_net()
    assert profile(net, repeats=1, **shapes).seconds


def test_a_step_that_is_not_the_planned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    net, shapes = two_headed_net()
    with (
        pytest.warns(UserWarning, match="MXNET_BACKWARD_DO_MIRROR"),
        pytest.raises(CostError, match=r"memplan expected.*MXNET_BACKWARD_DO_MIRROR"),
    ):
        profile(net, repeats=1, **shapes)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        *[({"repeats": n}, "repeats must be") for n in (0, 1.5, 10**5000, -(10**5000))],
        ({"warmup": -1}, "warmup"),
        ({"dta": (8, 20)}, "dta"),
        ({"grad_req": "none"}, "grad_req"),
    ],
)
def test_bad_arguments(options: dict[str, object], culprit: str) -> None:
    net, shapes = dropout_net()
    with pytest.raises(ArgumentError, match=culprit):
        profile(net, **shapes, **options)


def test_a_missing_gpu_is_named() -> None:
    if mx.context.num_gpus():
        pytest.skip("there is a GPU")
    with pytest.raises(CostError, match=r"gpu\(0\)"):
        device_name(mx.gpu(0))
    net, shapes = dropout_net()
    has_cuda = mx.runtime.Features().is_enabled("CUDA")
    reason = "" if has_cuda else r".*built without CUDA; install 'memplan\[cu112\]'"
    with pytest.raises(CostError, match=r"gpu\(0\)" + reason):
        profile(net, ctx=mx.gpu(0), **shapes)


@pytest.mark.gpu
@pytest.mark.skipif(not mx.context.num_gpus(), reason="MXNet 1.9.1 has no GPU here")
def test_on_a_gpu() -> None:
    net, shapes = residual_net()
    table = profile(net, ctx=mx.gpu(0), repeats=2, **shapes)
    assert table.device.startswith("gpu(")
    graph = trace(net, shapes=shapes).graph
    assert min(op.seconds for op in with_costs(graph, table, device=table.device).ops) > 0


def test_a_context_is_one_of_mxnet() -> None:
    net, shapes = residual_net(units=1)
    with pytest.raises(ArgumentError, match=r"ctx must be a context such as .*'gpu'"):
        memplan.profile(net, ctx="gpu", **shapes)
