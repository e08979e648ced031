"""Arrays that MXNet's executor shares between shapes: packed steps add and round as it does there.

The array has one layout of oneDNN's there, whatever the shape by which it is read or written.
"""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.realise.shared_arrays import in_own_shape
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.strategies.base import Problem
from memplan.strategies.chen import ChenSqrt

Symbol = mx.sym.Symbol

CHANNELS, SIDE = 16, 8


def _convolution(data: Symbol, name: str) -> Symbol:
    return mx.sym.Convolution(data, num_filter=CHANNELS, kernel=(3, 3), pad=(1, 1), name=name)


def _norm(data: Symbol, name: str) -> Symbol:
    return mx.sym.BatchNorm(data, fix_gamma=False, name=name)


def _back(data: Symbol) -> Symbol:
    return mx.sym.reshape(data, shape=(-1, CHANNELS, SIDE, SIDE))


def _like(data: Symbol) -> Symbol:
    """In another shape and back, both by operators that leave the layout as it is."""
    rows = mx.sym.reshape_like(data, mx.sym.Variable("rows"))
    return mx.sym.reshape_like(mx.sym.square(rows), mx.sym.Variable("pictures"))


THERE_AND_BACK: dict[str, Callable[[Symbol], Symbol]] = {
    "reshape": lambda x: _back(mx.sym.tanh(mx.sym.reshape(x, shape=(0, 0, -1)))),
    "reshape of a copy": lambda x: _back(mx.sym.reshape(mx.sym.identity(x), shape=(0, 0, -1))),
    "relu": lambda x: _back(mx.sym.Activation(mx.sym.reshape(x, shape=(0, -1)), act_type="relu")),
    "Flatten": lambda x: _back(mx.sym.tanh(mx.sym.Flatten(x))),
    "expand_dims": lambda x: mx.sym.squeeze(mx.sym.sin(mx.sym.expand_dims(x, axis=1)), axis=1),
    "reshape_like": _like,
}


def _traced(read: Callable[[Symbol], list[Symbol]]) -> Trace:
    """Losses of what ``read`` makes of a max pooling of a convolution, in this order."""
    data = _convolution(mx.sym.Variable("img"), "conv")
    data = mx.sym.Pooling(data, kernel=(3, 3), pad=(1, 1), pool_type="max", name="pool")
    losses = [mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(each))) for each in read(data)]
    rows, pictures = (2, CHANNELS, SIDE * SIDE), (2, CHANNELS, SIDE, SIDE)
    shapes = {"img": (2, 3, SIDE, SIDE), "rows": rows, "pictures": pictures}
    net = mx.sym.Group(losses)
    known = {name: shape for name, shape in shapes.items() if name in net.list_arguments()}
    return trace(net, shapes=known, realisation="packed")


def _different(traced: Trace) -> list[str]:
    """What differs from MXNet's own steps, by schedules that recompute nothing, or something."""
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    schedules = [Schedule.unplanned(traced.graph)]
    schedules += [random_schedule(traced.graph, seed) for seed in range(4)]
    planned = (planned_steps(bound(traced, schedule, values), 2) for schedule in schedules)
    return [difference for each in planned for difference in differences(stock, each)]


@pytest.mark.parametrize("kind", THERE_AND_BACK)
def test_gradients_that_come_by_way_of_another_shape_are_added_as_mxnet_adds_them(
    kind: str,
) -> None:
    def read(data: Symbol) -> list[Symbol]:
        terms = [
            _convolution(data, "next"),
            _norm(mx.sym.Activation(data, act_type="relu"), "second"),
            _norm(THERE_AND_BACK[kind](data), "third"),
        ]
        return [_norm(terms[0] + terms[1] + terms[2], "last")]

    assert not _different(_traced(read))


@pytest.mark.parametrize("name", ["broadcast_add", "broadcast_sub"])
@pytest.mark.parametrize("is_left", [False, True])
def test_what_computes_in_another_shape_is_no_copy(name: str, is_left: bool) -> None:
    """A sum that has more dimensions than the first term may lie over that in MXNet, too."""

    def read(data: Symbol) -> list[Symbol]:
        terms = [mx.sym.Variable("five", shape=(1, 1, 1, 1, 1)), _convolution(data, "next")]
        total = getattr(mx.sym, name)(*(terms[::-1] if is_left else terms))
        return [_norm(_back(mx.sym.tanh(mx.sym.tanh(total))), "last")]

    assert not _different(_traced(read))


@pytest.mark.parametrize("reader", ["softmax", "transpose", "log_softmax"])
def test_who_cannot_read_the_layout_of_another_shape_reads_the_usual_one(reader: str) -> None:
    """A Flatten turns for MXNet what is another array in a packed step.

    oneDNN computes garbage of an array in such a layout, or ends the process.
    """

    def read(data: Symbol) -> list[Symbol]:
        rows = mx.sym.reshape_like(data, mx.sym.Variable("rows"))
        return [mx.sym.sin(rows), mx.sym.Flatten(data), getattr(mx.sym, reader)(rows)]

    assert not _different(_traced(read))


def test_what_others_read_before_it_is_turned_they_also_read_so_when_they_run_again() -> None:
    """By a plan that runs the backward op of the last norm first, and the ReLU anew behind it."""

    shared = _norm(_convolution(mx.sym.Variable("data"), "conv"), "shared")
    first = _norm(mx.sym.Activation(shared, act_type="relu"), "first")
    third = mx.sym.sigmoid(mx.sym.reshape(shared, shape=(0, 0, -1)))
    third = mx.sym.tanh(mx.sym.reshape(third, shape=(0, -1)))
    third = _norm(_back(mx.sym.reshape(third, shape=(-1, SIDE, SIDE, CHANNELS))), "third")
    body = first + _norm(shared, "second") + third
    dense = mx.sym.FullyConnected(_norm(body, "last"), num_hidden=5, name="dense")
    net = mx.sym.Group([mx.sym.SoftmaxOutput(dense, name="softmax"), mx.sym.BlockGrad(body)])
    traced = trace(net, shapes={"data": (4, 3, SIDE, SIDE)}, realisation="packed")
    schedule = ChenSqrt().solve(Problem(traced.graph, None)).schedule
    assert schedule is not None
    values = random_values(traced)
    planned = planned_steps(bound(traced, schedule, values), 2)
    assert not differences(stock_steps(traced, values, 2), planned)


def test_a_flatten_of_volumes_has_the_shape_of_its_layout_where_it_copies() -> None:
    data = mx.sym.Variable("data")
    volumes = mx.sym.Convolution(data, num_filter=4, kernel=(1, 1, 1), name="volumes")
    net = mx.sym.FullyConnected(mx.sym.Flatten(volumes, name="rows"), num_hidden=2)
    traced = trace(net, shapes={"data": (2, 3, 4, 4, 4)}, realisation="explicit")
    graph, nodes = traced.graph, traced.nodes
    (source,), (rows,) = (
        next(op.outputs for op, node in zip(graph.ops, nodes, strict=True) if node.name == name)
        for name in ("volumes", "rows")
    )
    assert in_own_shape(graph, nodes, {rows: source}, (), rows) == source
    assert in_own_shape(graph, nodes, {}, (), rows) == rows
    assert in_own_shape(graph, nodes, {}, (rows,), rows) is None
