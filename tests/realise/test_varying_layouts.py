"""Layouts on which a schedule decides: what reads notes on its data, or writes over a gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.layouts import convolution, pooling
from helpers.schedules import random_schedule
from helpers.training_runs import (
    Values,
    bound,
    differences,
    planned_steps,
    random_values,
    stock_steps,
)
from memplan.errors import TraceError
from memplan.mxnet.realise import in_place
from memplan.mxnet.realise.lowering import lower
from memplan.mxnet.realise.mirror import annotate
from memplan.planning.realisation import trace
from memplan.step.mirroring import flaggable
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol

SHAPES = {"img": (2, 8, 8, 8)}


def _loss(out: Symbol) -> Symbol:
    return mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(out)))


def _centred(data: Symbol) -> Symbol:
    """What is none of oneDNN's, and may be written over the data."""
    return mx.sym.broadcast_sub(data, mx.sym.sum(data, axis=1, keepdims=True), name="sub")


def _normed() -> Symbol:
    out = convolution(mx.sym.Variable("img"), "conv")
    return mx.sym.BatchNorm(out, fix_gamma=False, name="bn")


def _prelu(data: Symbol, name: str = "prelu") -> Symbol:
    return mx.sym.LeakyReLU(data, mx.sym.Variable(f"{name}_slopes"), act_type="prelu", name=name)


@pytest.mark.parametrize("is_joined", [False, True])
def test_the_notes_of_a_max_pooling_are_for_what_its_backward_op_reads(is_joined: bool) -> None:
    out = _centred(_normed())
    if is_joined:
        out = mx.sym.Concat(out, out, name="joined")
    traced = trace(_loss(pooling(out, "max")), shapes=SHAPES, realisation="explicit")
    values = random_values(traced)
    stock = stock_steps(traced, values, 1)
    for seed in range(24):
        schedule = random_schedule(traced.graph, seed, repeated=0.5)
        assert not differences(stock, planned_steps(bound(traced, schedule, values), 1)), seed


@pytest.mark.parametrize(
    ("data", "kind", "again"),
    [
        (_centred(_normed()), "max", {"conv", "bn", "pool"}),
        (_centred(_normed()), "avg", {"conv", "bn", "sub", "pool"}),
        (mx.sym.Activation(_normed(), act_type="relu", name="relu"), "max", {"bn", "relu"}),
    ],
)
def test_only_data_whose_layout_varies_is_kept_for_notes(
    data: Symbol, kind: str, again: set[str]
) -> None:
    traced = trace(_loss(pooling(data, kind)), shapes=SHAPES, realisation="explicit")
    recomputable = {op.name for op in traced.graph.ops if op.recomputable}
    assert again <= recomputable
    assert ("sub" in recomputable) == ("sub" in again)


def test_explicit_steps_refuse_slopes_whose_gradient_a_layout_decides_on() -> None:
    network = _loss(pooling(_prelu(_normed()), "max"))
    with pytest.raises(TraceError, match=r"'prelu'.*layout.*realisation='packed'"):
        trace(network, shapes=SHAPES, realisation="explicit")
    requests = dict.fromkeys(network.list_arguments(), "write") | {"prelu_slopes": "null"}
    trace(network, shapes=SHAPES, realisation="explicit", grad_req=requests)


def test_explicit_steps_refuse_an_lrn_whose_gradient_a_layout_decides_on() -> None:
    network = _loss(pooling(mx.sym.LRN(_centred(_normed()), nsize=3, name="lrn"), "avg"))
    with pytest.raises(TraceError, match=r"'lrn'.*layout.*realisation='packed'"):
        trace(network, shapes=SHAPES, realisation="explicit")
    followed = convolution(mx.sym.LRN(_normed(), nsize=3), "more")
    trace(_loss(followed), shapes=SHAPES, realisation="explicit")


def test_explicit_steps_train_slopes_whose_gradient_comes_from_a_convolution() -> None:
    network = _loss(mx.sym.sin(convolution(_prelu(_normed()), "more")))
    traced = trace(network, shapes=SHAPES, realisation="explicit")
    values = random_values(traced)
    stock = _gradient(stock_steps(traced, values, 1), "prelu_slopes")
    for seed in range(4):
        planned = planned_steps(bound(traced, random_schedule(traced.graph, seed), values), 1)
        np.testing.assert_allclose(_gradient(planned, "prelu_slopes"), stock, rtol=1e-3)


@pytest.mark.parametrize("kind", ["sigmoid", "tanh"])
@pytest.mark.parametrize("is_reshaped", [False, True])
def test_a_sum_is_in_the_layout_that_it_has_unplanned_where_a_term_comes_again(
    kind: str, is_reshaped: bool
) -> None:
    """MXNet keeps the gate, and writes the sum over the other term."""
    data = convolution(mx.sym.Variable("img"), "conv")
    gate = getattr(mx.sym, kind)(data, name="gate")
    if is_reshaped:
        gate = mx.sym.reshape(mx.sym.reshape(gate, (-3, 0, 0)), (-1, 16, 8, 8))
    total = gate + mx.sym.BatchNorm(data, fix_gamma=False, name="first")
    _has_the_bits_of_unplanned(total, again="gate", before="gate_backward")


@pytest.mark.parametrize("kind", ["broadcast_minimum", "broadcast_mul"])
def test_an_op_is_in_the_layout_that_it_has_unplanned_where_its_data_comes_again(kind: str) -> None:
    """MXNet keeps the data, in a layout of oneDNN's, and so does not write over it."""
    data = convolution(mx.sym.Variable("img"), "conv")
    other = mx.sym.Variable("other", shape=(1, 1, 8, 1))
    result = getattr(mx.sym, kind)(data, other, name="op")
    _has_the_bits_of_unplanned(result, again="conv", before="op_backward")


def test_nothing_is_read_once_more_that_a_step_keeps() -> None:
    data = convolution(mx.sym.Variable("img"), "conv")
    out = mx.sym.BatchNorm(data * mx.sym.sigmoid(data), fix_gamma=False)
    traced = trace(_loss(convolution(out, "more")), shapes=SHAPES, realisation="explicit")
    lowered = lower(traced, Schedule.unplanned(traced.graph))
    assert not [node.name for node in lowered.nodes if "reader" in node.name]


def _has_the_bits_of_unplanned(out: Symbol, *, again: str, before: str) -> None:
    """An explicit step does where an op runs again, before another one, of a BatchNorm of ``out``.

    That rounds by the layout of ``out``.
    """
    network = _loss(convolution(mx.sym.BatchNorm(out, fix_gamma=False, name="bn"), "more"))
    traced = trace(network, shapes=SHAPES, realisation="explicit")
    names = [op.name for op in traced.graph.ops]
    order = list(range(len(names)))
    order.insert(names.index(before), names.index(again))
    values = random_values(traced)
    planned = planned_steps(bound(traced, Schedule.sequence(traced.graph, order), values), 1)
    assert not differences(stock_steps(traced, values, 1), planned)


@pytest.mark.parametrize("is_read_by_norm", [False, True])
def test_layouts_are_looked_for_where_others_round_by_what_is_written_over_data(
    monkeypatch: pytest.MonkeyPatch, is_read_by_norm: bool
) -> None:
    looked_for = []

    def looking(*args: Any) -> Any:
        looked_for.append(args)
        return own_layouts(*args)

    out = mx.sym.sin(convolution(mx.sym.Variable("img"), "conv"))
    out = mx.sym.BatchNorm(out, fix_gamma=False) if is_read_by_norm else out
    traced = trace(_loss(convolution(out, "more")), shapes=SHAPES, realisation="explicit")
    own_layouts = in_place.own_layouts
    monkeypatch.setattr(in_place, "own_layouts", looking)
    kept = in_place.kept_in_explicit(traced.graph, traced.nodes, traced.stock_order)
    assert bool(looked_for) == bool(kept) == is_read_by_norm


@pytest.mark.parametrize("is_head", [True, False])
def test_what_lives_to_the_end_is_not_read_once_more(is_head: bool) -> None:
    """Nothing is written over what shares its array with an output of the network."""
    data = convolution(mx.sym.Variable("img"), "conv")
    loss = _loss(mx.sym.BatchNorm(mx.sym.sin(data), fix_gamma=False))
    symbol = mx.sym.Group([mx.sym.BlockGrad(data), loss]) if is_head else loss
    traced = trace(symbol, shapes=SHAPES, realisation="explicit")
    kept = in_place.kept_in_explicit(traced.graph, traced.nodes, traced.stock_order)
    assert bool(kept) == (not is_head)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_mirrored_network_has_the_gradient_of_slopes_of_one_that_is_not(depth: int) -> None:
    out = mx.sym.Variable("img")
    for layer in range(depth):
        out = _prelu(convolution(out, f"conv{layer}"), f"prelu{layer}")
    traced = trace(_loss(pooling(out, "avg")), shapes=SHAPES, realisation="mirror")
    values = random_values(traced)
    names = [op.name for op in traced.graph.ops]
    flags = {op for op in flaggable(traced.graph) if names[op].startswith(("conv", "prelu"))}
    mirrored = dataclasses.replace(traced, symbol=annotate(traced, flags))
    stock, planned = (stock_steps(each, values, 1) for each in (traced, mirrored))
    for layer in range(depth):
        name = f"prelu{layer}_slopes"
        np.testing.assert_allclose(_gradient(planned, name), _gradient(stock, name), rtol=1e-3)


def test_mirroring_leaves_the_layout_of_the_gradient_that_a_dense_layer_hands_to_a_prelu() -> None:
    """MXNet writes it over the sum, which is in the layout of the term that it is written over."""
    read = convolution(mx.sym.Variable("img"), "read")
    out = _prelu(read) + convolution(read, "term") + mx.sym.sin(read)
    traced = trace(
        _loss(mx.sym.FullyConnected(out, num_hidden=4)), shapes=SHAPES, realisation="mirror"
    )
    values = random_values(traced)
    stock = _gradient(stock_steps(traced, values, 1), "prelu_slopes")
    names = [op.name for op in traced.graph.ops]
    flags = {op for op in flaggable(traced.graph) if names[op] in ("read", "prelu")}
    mirrored = dataclasses.replace(traced, symbol=annotate(traced, flags))
    planned = _gradient(stock_steps(mirrored, values, 1), "prelu_slopes")
    np.testing.assert_allclose(planned, stock, rtol=1e-3)


def _gradient(steps: list[Values], name: str) -> np.ndarray:
    return steps[0][f"gradient of {name}"]
