"""The slopes of a PReLU, whose gradient depends in MXNet on what its backward op writes over."""

from __future__ import annotations

import mxnet as mx
import pytest

from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.errors import TraceError
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol


def _prelu(data: Symbol, name: str) -> Symbol:
    return mx.sym.LeakyReLU(data, mx.sym.Variable(name), act_type="prelu")


def _term(data: Symbol, name: str, *, first: bool) -> Symbol:
    """The sum of a PReLU and of what has no oneDNN; its backward op comes ``first``, or last."""
    terms = [_prelu(data, name), mx.sym.tanh(data)]
    left, right = terms if first else reversed(terms)
    return left + right


def _network(*, first: bool) -> Symbol:
    out = mx.sym.Variable("data")
    for layer in range(2):
        out = mx.sym.Convolution(out, num_filter=5, kernel=(3, 3), pad=(1, 1))
        out = _term(mx.sym.sin(out), f"slopes{layer}", first=first)
        out = mx.sym.tanh(_term(mx.sym.sin(out), f"more{layer}", first=not first))
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(out, num_hidden=3), name="softmax")


SHAPES = {"data": (2, 3, 6, 6)}


@pytest.mark.parametrize("first", [True, False])
def test_packed_steps_write_over_what_mxnet_writes_over(first: bool) -> None:
    traced = trace(_network(first=first), shapes=SHAPES, realisation="packed")
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    for seed in range(6):
        planned = planned_steps(bound(traced, random_schedule(traced.graph, seed), values), 2)
        assert not differences(stock, planned), seed


def test_what_is_read_last_is_so_in_mxnets_order() -> None:
    """A sum of several gradients is taken apart: the ops of a plan come in another order."""
    read = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6)
    summed = _prelu(read, "slopes") + _prelu(mx.sym.sin(read), "more")
    network = mx.sym.Group(
        [mx.sym.MakeLoss(out) for out in (mx.sym.square(summed), mx.sym.cos(read))]
    )
    traced = trace(network, shapes={"data": (4, 5)}, realisation="packed")
    assert traced.stock_order != tuple(range(len(traced.nodes)))
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    for seed in range(4):
        planned = planned_steps(bound(traced, random_schedule(traced.graph, seed), values), 2)
        assert not differences(stock, planned), seed


DROPPED = {"Dropout": {"p": 0.3}, "L2Normalization": {"mode": "channel"}}


def _convolved(data: Symbol) -> Symbol:
    return mx.sym.Convolution(data, num_filter=8, kernel=(3, 3), pad=(1, 1))


def _check_slopes(out: Symbol) -> None:
    """They have MXNet's gradient, and all else, too, by any plan."""
    network = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(out, num_hidden=3), name="softmax")
    traced = trace(network, shapes=SHAPES, realisation="packed")
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    for seed in range(2):
        planned = planned_steps(bound(traced, random_schedule(traced.graph, seed), values), 2)
        assert not differences(stock, planned), seed


@pytest.mark.parametrize("op", DROPPED)
def test_a_gradient_by_autograd_has_the_layout_of_what_mxnet_writes_it_over(op: str) -> None:
    """The sum of that and of another one is in a layout of oneDNN's, and the op reads a copy."""
    activated = _prelu(_convolved(mx.sym.Variable("data")), "slopes")
    dropped = getattr(mx.sym, op)(activated, **DROPPED[op])
    _check_slopes(_convolved(dropped + activated) + _convolved(dropped))


@pytest.mark.parametrize("op", DROPPED)
def test_the_gradient_of_pictures_that_a_dense_layer_reads_is_in_their_layout(op: str) -> None:
    """So is what the BatchNorm and autograd make of it."""
    data = _convolved(mx.sym.Variable("data"))
    dropped = getattr(mx.sym, op)(_prelu(mx.sym.sin(data), "slopes"), **DROPPED[op])
    _check_slopes(_convolved(data) + mx.sym.BatchNorm(dropped, fix_gamma=False))


def test_explicit_steps_refuse_what_a_schedule_would_decide() -> None:
    network = _network(first=True)
    with pytest.raises(TraceError, match=r"act_type='prelu'.*slopes.*='packed' \(for mx"):
        trace(network, shapes=SHAPES, realisation="explicit")
    frozen = {"slopes0": "null", "slopes1": "null", "more0": "null", "more1": "null"}
    requests = {n: frozen.get(n, "write") for n in network.list_arguments()}
    requests["data"] = requests["softmax_label"] = "null"
    trace(network, shapes=SHAPES, realisation="explicit", grad_req=requests)


@pytest.mark.parametrize("realisation", ["packed", "updating"])
def test_gradients_of_arguments_are_written_over_nothing(realisation: str) -> None:
    """What MXNet's executor writes into an array beside the step leaves all that it reads."""
    weight = _prelu(mx.sym.Variable("raw", shape=(5, 3, 3, 3)), "slopes")
    out = mx.sym.Convolution(
        mx.sym.Variable("data"), weight=weight, num_filter=5, kernel=(3, 3), no_bias=True
    )
    network = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(out, num_hidden=3), name="softmax")
    traced = trace(network, shapes=SHAPES, realisation=realisation)
    [of_slopes] = (op for op in traced.graph.ops if op.kind == "_backward_LeakyReLU")
    assert not of_slopes.handovers
    if realisation == "packed":
        values = random_values(traced)
        planned = bound(traced, random_schedule(traced.graph, 0), values)
        assert not differences(stock_steps(traced, values, 2), planned_steps(planned, 2))
    with pytest.raises(TraceError, match=r"'raw', whose gradient is wanted.*realisation='packed'"):
        trace(network, shapes=SHAPES, realisation="explicit")
