"""What reads an array for its shape alone reads none in an explicit step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

S = mx.sym
SHAPE = (2, 8, 8, 8)
SHAPES = {"data": SHAPE}


def _convolution(data: mx.sym.Symbol) -> mx.sym.Symbol:
    return S.Convolution(data, num_filter=8, kernel=(3, 3), pad=(1, 1), no_bias=True)


def _rows(data: mx.sym.Symbol) -> mx.sym.Symbol:
    return S.slice_axis(data, axis=2, begin=0, end=4)


def _network(part: mx.sym.Symbol | None, like: Callable[[Any], Any]) -> mx.sym.Symbol:
    """A convolution of some rows of an array, which so is dead, and then what is ``like`` it."""
    with mx.name.NameManager():
        whole = _convolution(S.Variable("data"))
        small = _convolution(_convolution(_rows(whole)))
        part = like(whole) if part is None else part
        return S.MakeLoss(S.mean((small + _rows(part)) ** 2))


def _of_numpy(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda array: call(array.as_np_ndarray()).as_nd_ndarray()


@pytest.mark.parametrize(
    ("like", "told"),
    [
        (S.zeros_like, S.zeros(SHAPE)),
        (S.ones_like, S.ones(SHAPE)),
        (_of_numpy(S.np.zeros_like), S.zeros(SHAPE)),
        (_of_numpy(lambda a: S.np.full_like(a, 0.1)), S.full(SHAPE, 0.1)),
        (
            lambda a: S.cast(_of_numpy(lambda b: S.np.ones_like(b, "int8"))(a), "float32"),
            S.ones(SHAPE),
        ),
    ],
)
def test_what_has_the_shape_of_a_dead_array_is_made_without_it(
    like: Callable[[Any], Any], told: mx.sym.Symbol
) -> None:
    """MXNet's own executor ends with an error where oneDNN has written in its place."""
    given = trace(_network(told, like), shapes=SHAPES, realisation="explicit")
    traced = trace(_network(None, like), shapes=SHAPES, realisation="explicit")
    values = random_values(given)
    with pytest.raises(mx.MXNetError, match="doesn't match the requested MKLDNN memory desc"):
        stock_steps(traced, values, 1)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(given, values), planned_steps(executor))


def test_a_gradient_of_zeros_waits_for_what_it_has_the_shape_of() -> None:
    whole = _convolution(S.Variable("data"))
    pooled = S.Pooling(whole, kernel=(2, 2), stride=(2, 2), pool_type="max", name="pool")
    marks = S.floor(S.sigmoid(pooled, name="gate"))
    loss = S.MakeLoss(S.mean(S.broadcast_add(whole, S.sum(marks, axis=(2, 3), keepdims=True)) ** 2))
    traced = trace(loss, shapes=SHAPES, realisation="explicit")
    zeros = [op for op in traced.graph.ops if op.kind in ("_zeros", "zeros_like")]
    assert [(op.kind, op.inputs) for op in zeros] == [("_zeros", ())]
    assert {traced.graph.ops[place].name for place in zeros[0].after} == {"pool", "gate"}


def _marked(array: mx.sym.Symbol) -> mx.sym.Symbol:
    return S.ones_like(array, attr={"mood": "calm"})


def _retained(array: mx.sym.Symbol) -> mx.sym.Symbol:
    rows = S.zeros_like(S.cast_storage(S.reshape(array, (2, -1)), stype="row_sparse"))
    first = S.sparse.retain(rows, S.BlockGrad(S.zeros((1,))))
    return S.reshape(S.cast_storage(first, stype="default"), SHAPE)


@pytest.mark.parametrize("like", [_marked, _retained])
def test_what_the_constant_operators_would_refuse_runs_as_in_mxnet(
    like: Callable[[Any], Any],
) -> None:
    """Attributes of the user's, and rows of which some are retained."""
    body = _convolution(S.Variable("data"))
    loss = S.MakeLoss(S.mean((_convolution(body) + like(body)) ** 2))
    traced = trace(loss, shapes=SHAPES, realisation="explicit")
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    assert not differences(stock_steps(traced, values), planned_steps(executor))
