"""What a Reshape turns into the usual layout, and others read: in MXNet's layouts by any plan."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import mxnet as mx
import numpy as np
import pytest

from helpers.layouts import convolution, pooling
from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.realise.mirror import annotate
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.mirroring import flaggable
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol

SHAPES = {"img": (2, 8, 8, 8)}
OPTIONS = {"shapes": SHAPES, "realisation": "packed"}


def _norm(data: Symbol, name: str = "norm") -> Symbol:
    return mx.sym.BatchNorm(data, fix_gamma=False, name=name)


def _relu(data: Symbol, name: str) -> Symbol:
    return mx.sym.Activation(data, act_type="relu", name=name)


def _sum(data: Symbol) -> Symbol:
    return _norm(mx.sym.elemwise_add(data, convolution(data, "branch"), name="sum"))


def _reshape(data: Symbol) -> Symbol:
    return mx.sym.reshape(data, shape=(0, 0, -1), name="turn")


def _expand(data: Symbol) -> Symbol:
    return mx.sym.expand_dims(data, axis=1, name="turn")


def _block(data: Symbol) -> Symbol:
    return mx.sym.Flatten(mx.sym.BlockGrad(data, name="block"), name="turn")


def _network(
    turn: Callable[[Symbol], Symbol], read: Callable[[Symbol], Symbol], is_read_first: bool
) -> Symbol:
    """A ReLU that ``turn`` turns and ``read`` reads, before that or after it."""
    shared = _relu(_norm(convolution(mx.sym.Variable("img"), "conv"), "first"), "shared")
    losses = [mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(of(shared)))) for of in (turn, read)]
    return mx.sym.Group(losses[::-1] if is_read_first else losses)


def _largest(data: Symbol) -> Symbol:
    return pooling(data, "max")


READERS: dict[str, Callable[[Symbol], Symbol]] = {
    "norm": _norm,
    "average": lambda data: _norm(pooling(data, "avg")),
    "largest": _largest,
    "sum": _sum,
    "handed_on": lambda data: _norm(_relu(data, "again")),
    "written_over": lambda data: _norm(mx.sym.sin(data)),
}

CASES = [
    *((_reshape, reader, is_first) for reader in READERS for is_first in (False, True)),
    *((turn, "norm", False) for turn in (mx.sym.Flatten, _expand, _block)),
]


# But for those where the gradient of MXNet's own step is wrong, and that of packed ones right.
RIGHT = [case for case in CASES if case[1:] != ("largest", True)]


@pytest.mark.parametrize(
    ("turn", "reader", "is_read_first", "realisation"),
    [*((*case, "explicit") for case in CASES), *((*case, "packed") for case in RIGHT)],
)
def test_steps_read_what_a_reshape_turns_as_mxnet_does(
    turn: Callable[[Symbol], Symbol], reader: str, is_read_first: bool, realisation: str
) -> None:
    network = _network(turn, READERS[reader], is_read_first)
    traced = trace(network, shapes=SHAPES, realisation=realisation)
    values = random_values(traced)
    stock = stock_steps(traced, values, 1)
    for seed in range(12):
        schedule = random_schedule(traced.graph, seed)
        assert not differences(stock, planned_steps(bound(traced, schedule, values), 1)), seed


def test_packed_steps_do_not_turn_what_a_pooling_has_taken_notes_on() -> None:
    """The gradient is that where the Reshape reads a copy: MXNet's own is wrong by a fifth."""
    right = trace(_network(lambda x: _reshape(x * 1), _largest, True), **OPTIONS)
    turning = trace(_network(_reshape, _largest, True), **OPTIONS)
    values = random_values(turning)
    [stock] = stock_steps(right, values, 1)
    for seed in range(4):
        schedule = random_schedule(turning.graph, seed)
        [planned] = planned_steps(bound(turning, schedule, values), 1)
        assert stock.keys() == planned.keys()
        assert all(np.allclose(stock[name], planned[name], 1e-3, 1e-4) for name in stock), seed


@pytest.mark.parametrize("nfilters", [16, 24])
def test_packed_steps_turn_what_a_pooling_of_whole_pictures_has_taken_notes_on(
    nfilters: int,
) -> None:
    """They are right for every layout: one for each channel."""
    data = mx.sym.Convolution(mx.sym.Variable("img"), num_filter=nfilters, kernel=(3, 3))
    gate = mx.sym.Pooling(data, kernel=(6, 6), pool_type="max")
    turned = mx.sym.reshape(_reshape(data), shape=(-1, nfilters, 6, 6))
    total = mx.sym.broadcast_mul(data, gate) + turned + _norm(data)
    traced = trace(mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(total))), **OPTIONS)
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))


def _assert_mirrored_is_stock(network: Symbol) -> None:
    traced = trace(network, shapes=SHAPES, realisation="mirror")
    values = random_values(traced)
    stock = stock_steps(traced, values, 1)
    for seed in range(12):
        rng = random.Random(seed)
        flags = {op for op in flaggable(traced.graph) if rng.random() < 0.6}
        mirrored = dataclasses.replace(traced, symbol=annotate(traced, flags))
        assert not differences(stock, stock_steps(mirrored, values, 1)), seed


@pytest.mark.parametrize(("turn", "reader", "is_read_first"), CASES)
def test_mirrored_networks_read_what_a_reshape_turns_as_others_do(
    turn: Callable[[Symbol], Symbol], reader: str, is_read_first: bool
) -> None:
    _assert_mirrored_is_stock(_network(turn, READERS[reader], is_read_first))


def _noted(
    decided: Callable[[Symbol], Symbol],
    first: Callable[[Symbol], Symbol] | None = None,
    behind: Callable[[Symbol], Symbol] | None = None,
) -> Symbol:
    """What a max pooling takes notes on, and a Reshape turns then, of a convolution.

    ``first`` and ``behind`` read the convolution, too, before that and after it.
    """
    shared = convolution(mx.sym.Variable("img"), "conv")
    data = decided(shared)
    before, after = ([of(shared)] if of is not None else [] for of in (first, behind))
    read = [*before, pooling(data, "max"), _reshape(data), *after]
    return mx.sym.Group([mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(each))) for each in read])


def _twice(data: Symbol) -> Symbol:
    """What may write over the data, as its gradient does not read them."""
    return data * 2


def _more(data: Symbol) -> Symbol:
    return data + 1


def _copied(data: Symbol) -> Symbol:
    return _more(mx.sym.identity(data))


NOTED = {
    "backward reads": _noted(mx.sym.square),
    "gate": _noted(lambda data: data * mx.sym.sigmoid(data)),
    "chain": _noted(lambda data: _twice(mx.sym.sin(data))),
    "read before": _noted(_twice, first=_more),
    "read behind": _noted(_twice, behind=_more),
    "read before under another name": _noted(_twice, first=_copied),
    "read behind under another name": _noted(_twice, behind=_copied),
}


@pytest.mark.parametrize("network", NOTED.values(), ids=NOTED.keys())
def test_explicit_steps_take_notes_on_what_a_reshape_turns_in_the_layout_of_mxnet(
    network: Symbol,
) -> None:
    traced = trace(network, shapes=SHAPES, realisation="explicit")
    values = random_values(traced)
    stock = stock_steps(traced, values, 1)
    for seed in range(12):
        schedule = random_schedule(traced.graph, seed)
        assert not differences(stock, planned_steps(bound(traced, schedule, values), 1)), seed


@pytest.mark.parametrize("network", NOTED.values(), ids=NOTED.keys())
def test_mirrored_networks_take_notes_on_what_a_reshape_turns_in_the_layout_of_others(
    network: Symbol,
) -> None:
    _assert_mirrored_is_stock(network)


def _recomputable(traced: Trace) -> set[str]:
    return {op.name for op in traced.graph.ops if op.recomputable}


@pytest.mark.parametrize("realisation", ["explicit", "mirror"])
@pytest.mark.parametrize("reader", [lambda data: convolution(data, "more"), mx.sym.sin])
def test_who_reads_in_any_layout_leaves_what_a_reshape_turns_to_be_recomputed(
    reader: Callable[[Symbol], Symbol], realisation: str
) -> None:
    traced = trace(_network(_reshape, reader, False), shapes=SHAPES, realisation=realisation)
    assert {"conv", "first", "shared", "turn"} <= _recomputable(traced)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_a_flatten_before_a_dense_layer_has_all_recomputed_as_before(kind: str) -> None:
    data = _relu(_norm(convolution(mx.sym.Variable("img"), "conv"), "first"), "relu")
    dense = mx.sym.FullyConnected(mx.sym.Flatten(pooling(data, kind), name="flat"), num_hidden=4)
    traced = trace(mx.sym.SoftmaxOutput(dense), shapes=SHAPES, realisation="explicit")
    assert {"conv", "first", "relu", "pool", "flat"} <= _recomputable(traced)


def test_what_reads_before_a_reshape_runs_once_and_before_it() -> None:
    traced = trace(_network(_reshape, _norm, True), shapes=SHAPES, realisation="explicit")
    ops = {op.name: op for op in traced.graph.ops}
    assert {"shared", "norm"}.isdisjoint(_recomputable(traced))
    assert traced.graph.ops[ops["turn"].after[0]].name == "norm"


def test_a_sum_of_what_a_flatten_turns_comes_when_mxnet_runs_it() -> None:
    """It reads all that it needs before the Flatten does, and MXNet runs it behind that."""
    data = convolution(mx.sym.Variable("img"), "conv")
    shared = mx.sym.sin(data)
    total = mx.sym.elemwise_add(data, shared, name="sum")
    turned = mx.sym.identity(mx.sym.Flatten(shared, name="turn"))
    out = _norm(mx.sym.reshape_like(turned, total), "first") + _norm(total, "second")
    loss = mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(out)))
    traced = trace(loss, shapes=SHAPES, realisation="explicit")
    names = [op.name for op in traced.graph.ops]
    turn, place = names.index("turn"), names.index("sum")
    assert turn < place
    assert traced.stock_order.index(turn) < traced.stock_order.index(place)
    values = random_values(traced)
    stock = stock_steps(traced, values, 1)
    for seed in range(2):
        planned = planned_steps(bound(traced, random_schedule(traced.graph, seed), values), 1)
        assert not differences(stock, planned)
