"""Ops of unknown shape that stand within loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from memplan.errors import TraceError
from memplan.mxnet.trace.build import trace


def kept_of(rows: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.contrib.boolean_mask(rows, mx.sym.sum(rows, axis=1) > 0, name="kept")


def branched(x: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.contrib.cond(mx.sym.sum(x) > 0, lambda: mx.sym.tanh(x), lambda: x * 2)


def looped(x: mx.sym.Symbol) -> mx.sym.Symbol:
    outputs, _ = mx.sym.contrib.while_loop(
        lambda n: n < 2, lambda n: (x * 2, n + 1), mx.sym.zeros((1,)), max_iterations=3
    )
    return outputs[0]


def each(function: Callable[[mx.sym.Symbol], mx.sym.Symbol], x: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.contrib.foreach(lambda row, states: (function(row), states), x, [])[0]


WITHIN = {
    "a mask in a loop": (kept_of, r"'kept' \(_contrib_boolean_mask\)", "leave"),
    "a branch in a loop": (branched, r"'_cond\d' \(_cond\)", "write the loop around it"),
    "a loop in a loop": (looped, r"'_while_loop\d' \(_while_loop\)", "write the loop around it"),
}


@pytest.mark.parametrize("case", WITHIN)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("behind", [{}, {"behind_weight": (3, 5), "behind_bias": (3,)}])
def test_an_op_of_unknown_shape_within_a_loop_is_named(
    case: str, nested: bool, behind: dict[str, Any]
) -> None:
    """Not the loop, of which no more is known only because it runs that."""
    function, op, advice = WITHIN[case]
    outer = (lambda rows: each(function, rows)) if nested else function
    data = mx.sym.Variable("x")
    body = mx.sym.FullyConnected(each(outer, data), num_hidden=3, flatten=False, name="behind")
    symbol = mx.sym.MakeLoss(mx.sym.sum(body))
    around = (2 if nested else 1) * r"which '_foreach\d' \(_foreach\) runs, "
    text = rf"the shape of {op}, {around}is not known before it runs.*; {advice}"
    shapes = {"x": (2, 3, 4, 5)[not nested :], **behind}
    with pytest.raises(TraceError, match=text):
        trace(symbol, shapes=shapes, grad_req="write")


@pytest.mark.parametrize(("function", "kind"), [(branched, "_cond"), (looped, "_while_loop")])
def test_what_stands_in_a_loop_of_python_is_known(
    function: Callable[[mx.sym.Symbol], mx.sym.Symbol], kind: str
) -> None:
    rows = mx.sym.split(mx.sym.Variable("x"), num_outputs=2, axis=0, squeeze_axis=True)
    body = mx.sym.stack(*map(function, rows))
    graph = trace(mx.sym.MakeLoss(mx.sym.sum(body)), shapes={"x": (2, 4)}, grad_req="write").graph
    assert sum(op.kind == kind for op in graph.ops) == 2


def test_an_op_of_unknown_shape_in_a_branch_is_named() -> None:
    x = mx.sym.Variable("x")
    body = mx.sym.contrib.cond(mx.sym.sum(x) > 0, lambda: kept_of(x), lambda: x * 2)
    symbol = mx.sym.FullyConnected(body, num_hidden=3)
    with pytest.raises(
        TraceError, match=r"the shape of 'kept' .*, which '.*' \(_cond\) runs, is not"
    ):
        trace(mx.sym.MakeLoss(symbol), shapes={"x": (4, 8)})
