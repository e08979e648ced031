"""Arrays in oneDNN's layouts are brought back where they lie, so that executors keep no copies."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.explicit import explicit, identical
from helpers.schedules import random_schedule
from memplan.memory.blocks import best_allocation
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.train.trial import CODE_NBYTES, run_apart
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol


def _normed(data: Symbol, name: str, activation: Callable[[Symbol], Symbol]) -> Symbol:
    out = mx.sym.Convolution(data, num_filter=16, kernel=(3, 3), pad=(1, 1), name=f"{name}_conv")
    return activation(mx.sym.BatchNorm(out, fix_gamma=False, name=f"{name}_norm"))


def _net(activation: Callable[[Symbol], Symbol]) -> tuple[Symbol, dict[str, tuple[int, ...]]]:
    out = mx.sym.Variable("data")
    for name in ("first", "second", "third"):
        out = _normed(out, name, activation)
    out = mx.sym.FullyConnected(mx.sym.Flatten(out), num_hidden=4, name="fc")
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (2, 16, 8, 8)}


def _gated_net() -> tuple[Symbol, dict[str, tuple[int, ...]]]:
    """An array of oneDNN's with several readers, one of which reads it twice."""
    out = _normed(mx.sym.Variable("data"), "first", mx.sym.identity)
    weights = mx.sym.mean(out, axis=(2, 3), keepdims=True)
    out = mx.sym.broadcast_mul(out, mx.sym.sigmoid(weights)) + mx.sym.relu(out) * out
    out = mx.sym.gather_nd(out, mx.sym.zeros((1, 2)))
    out = _normed(mx.sym.concat(out, out * out, dim=1), "second", mx.sym.relu)
    out = mx.sym.FullyConnected(mx.sym.Flatten(out), num_hidden=4, name="fc")
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (2, 16, 8, 8)}


def _solid_net() -> tuple[Symbol, dict[str, tuple[int, ...]]]:
    """Arrays of five dimensions, of which a Reshape would change nothing."""
    out = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=16, kernel=(3, 3, 3), name="conv")
    out = mx.sym.FullyConnected(mx.sym.Flatten(mx.sym.relu(out)), num_hidden=4, name="fc")
    return mx.sym.SoftmaxOutput(out, name="softmax"), {"data": (2, 16, 6, 6, 6)}


def _by_onednn(data: Symbol) -> Symbol:
    return mx.sym.Activation(data, act_type="relu")


def test_what_onednn_does_not_compute_reads_by_way_of_a_reshape() -> None:
    traced = explicit(_net(mx.sym.relu))
    graph = lower(traced, Schedule.unplanned(traced.graph)).schedule.graph
    written = [op.outputs[0] for op in graph.ops if op.kind == "Reshape"]
    kinds = [graph.ops[reader].kind for tensor in written for reader in graph.readers[tensor]]
    # The forward ops read what BatchNorm writes, the backward ones the gradients of convolutions;
    # that of the last may come from the copy that Flatten's backward op makes.
    assert kinds == ["relu"] * 3 + ["_backward_relu"] * 3
    assert all(len(graph.readers[tensor]) == 1 for tensor in written)
    assert graph.nforward == traced.graph.nforward + 3


def test_a_network_that_onednn_computes_gets_none() -> None:
    traced = explicit(_net(_by_onednn))
    lowered = lower(traced, Schedule.unplanned(traced.graph))
    assert len(lowered.schedule.graph.ops) == len(traced.graph.ops)


def test_packed_steps_get_none() -> None:
    net, shapes = _net(mx.sym.relu)
    traced = trace(net, shapes=shapes, realisation="packed")
    lowered = lower(traced, Schedule.unplanned(traced.graph))
    assert len(lowered.schedule.graph.ops) == len(traced.graph.ops)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("network", [lambda: _net(mx.sym.relu), _gated_net, _solid_net])
def test_losses_and_gradients_keep_their_bits(
    network: Callable[[], tuple[Symbol, dict[str, tuple[int, ...]]]], seed: int
) -> None:
    traced = explicit(network())
    assert identical(traced, random_schedule(traced.graph, seed))


def test_the_process_takes_what_mxnet_says() -> None:
    net, _ = _net(mx.sym.relu)
    traced = explicit((net, {"data": (8, 16, 128, 128)}))
    schedule = Schedule.unplanned(traced.graph)
    promised = best_allocation(lower(traced, schedule).schedule).nbytes
    assert promised > 60 << 20, "too small to tell"
    grown = run_apart(schedule, traced, ctx=mx.cpu()).grown_nbytes
    # Copies of what relu and its backward op read and write took twice as much again. Beside the
    # blocks there are a workspace as large as one array, and scratchpads.
    assert grown - CODE_NBYTES < 1.5 * promised
