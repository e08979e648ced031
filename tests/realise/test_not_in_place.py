"""Ops that must not write over what they read, as MXNet lets them.

They are np.ediff1d of one number more, np.diff with n=0, and a flat cumsum of pictures. MXNet's own
training step does so only where no backward op reads their input.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.operator_calls import NP, V, numpy
from helpers.operator_runs import (
    assert_mirrored_is,
    differing,
    scheduled_run,
    training_run,
)
from helpers.schedules import random_schedule
from helpers.training_runs import bound
from memplan.errors import TraceError
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.mirroring import flaggable
from memplan.step.schedule import Schedule

ENDS = pytest.mark.parametrize("ends", [{"to_begin": 0.5}, {"to_end": 0.5}])
SHAPES = {"data": (24,)}


def network(ends: dict[str, float]) -> mx.sym.Symbol:
    wave = mx.sym.sin(mx.sym.broadcast_mul(V("data"), V("weight", shape=(24,))), name="wave")
    return mx.sym.square(numpy(lambda x: NP.ediff1d(x, **ends))(wave))


def with_all_repeated(traced: Trace) -> Schedule:
    """Each op of the forward pass that may run twice does so right before the backward pass."""
    graph = traced.graph
    forward, backward = range(graph.nforward), range(graph.nforward, len(graph.ops))
    again = [op for op in forward if graph.ops[op].recomputable]
    return Schedule.sequence(graph, [*forward, *again, *backward])


@ENDS
def test_where_what_it_reads_may_come_again(ends: dict[str, float]) -> None:
    """In packed steps it does, and dies before; MXNet's executor would write over it then."""
    with mx.util.np_shape(True):
        symbol = network(ends)
        traced = trace(symbol, shapes=SHAPES)
        expected = training_run(symbol, traced)
        assert_mirrored_is(expected, traced, (frozenset({op}) for op in flaggable(traced.graph)))
        for realisation in ("explicit", "packed"):
            again = trace(symbol, shapes=SHAPES, realisation=realisation)
            repeated = {op.kind for op in again.graph.ops if op.recomputable}
            assert ("sin" in repeated) is (realisation == "packed")
            assert not differing(expected, scheduled_run(again, with_all_repeated(again)))


def undifferentiated(ends: dict[str, float]) -> Any:
    differences = numpy(lambda x: NP.ediff1d(x, **ends))(mx.sym.sin(V("data"), name="wave"))
    return mx.sym.broadcast_mul(differences, V("weight", shape=(24,)))


@ENDS
def test_one_without_a_gradient_is_right_in_packed_steps(ends: dict[str, float]) -> None:
    """MXNet's executor has it write over what it reads, as that dies there."""
    data = np.random.default_rng(1).normal(size=24).astype(np.float32)
    weight = np.ones(24, np.float32)
    with mx.util.np_shape(True):
        symbol = undifferentiated(ends)
        traced = trace(symbol, shapes=SHAPES, realisation="packed")
        values = {"data": data, "weight": weight}
        step = bound(traced, Schedule.unplanned(traced.graph), values)
        found = step.forward(is_train=True)[0].asnumpy()
        expected = np.ediff1d(np.sin(data), **ends)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(TraceError, match=r"np.ediff1d .* realisation='packed'"):
            trace(symbol, shapes=SHAPES, realisation="explicit")


def without_differences(activation: mx.sym.Symbol) -> Any:
    """An np.diff that takes no differences, and writes zeros before it reads."""
    return mx.sym.square(numpy(lambda x: NP.diff(x, n=0))(activation))


@pytest.mark.parametrize("is_reshaped", [False, True])
def test_no_difference_at_all(is_reshaped: bool) -> None:
    """MXNet's executor keeps what it reads for the tanh's backward op, which may read a copy."""
    activation = mx.sym.tanh(mx.sym.broadcast_mul(V("data"), V("weight", shape=(24,))))
    if is_reshaped:  # in place, for MXNet's executor: the storage is one
        activation = mx.sym.reshape(activation, shape=(4, 6))
    with mx.util.np_shape(True):
        symbol = without_differences(activation)
        traced = trace(symbol, shapes=SHAPES)
        expected = training_run(symbol, traced)
        flags = flaggable(traced.graph)
        assert flags
        every_one = (frozenset({op}) for op in flags)
        assert_mirrored_is(expected, traced, (*every_one, frozenset(flags)))
        packed = trace(symbol, shapes=SHAPES, realisation="packed")
        for schedule in (with_all_repeated(packed), random_schedule(packed.graph, 1, repeated=0.7)):
            assert not differing(expected, scheduled_run(packed, schedule))


def test_no_difference_at_all_in_explicit_steps() -> None:
    with mx.util.np_shape(True):
        trace(
            without_differences(V("data")), shapes=SHAPES, realisation="explicit", grad_req="write"
        )
        with pytest.raises(TraceError, match=r"np.diff with n=0.*Leave it out"):
            trace(
                without_differences(mx.sym.tanh(V("weight", shape=(24,)))),
                shapes={},
                realisation="explicit",
            )


def test_a_flat_sum_of_pictures_is_not_written_over_their_layout() -> None:
    """That is not for one dimension: MXNet can write it nowhere, should a plan have it die there.

    It keeps what the ReLU leaves for the backward op of that, which may read a copy.
    """
    data = mx.sym.Convolution(V("data"), num_filter=16, kernel=(3, 3), pad=(1, 1), name="conv")
    data = mx.sym.Activation(data, act_type="relu", name="relu")
    total = mx.sym.reshape(mx.sym.cumsum(data), shape=(4, 16, 6, 6))
    waves = mx.sym.SwapAxis(mx.sym.sin(mx.sym.SwapAxis(total, dim1=0, dim2=1)), dim1=0, dim2=1)
    symbol, shapes = mx.sym.MakeLoss(mx.sym.square(mx.sym.sin(waves))), {"data": (4, 16, 6, 6)}
    traced = trace(symbol, shapes=shapes)
    expected = training_run(symbol, traced)
    flags = flaggable(traced.graph)
    assert_mirrored_is(expected, traced, (*(frozenset({op}) for op in flags), frozenset(flags)))
    for realisation in ("explicit", "packed"):
        again = trace(symbol, shapes=shapes, realisation=realisation)
        repeated = {op.name for op in again.graph.ops if op.recomputable}
        assert ("relu" in repeated) is (realisation == "packed")
        for schedule in (with_all_repeated(again), random_schedule(again.graph, 1, repeated=0.9)):
            assert not differing(expected, scheduled_run(again, schedule))
