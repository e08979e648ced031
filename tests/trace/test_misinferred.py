"""Operators that MXNet makes no sound graph of are refused, with advice that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.errors import TraceError
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

S, NP = mx.sym, mx.sym.np
SHAPES = [(4, 6), (4, 6, 5), (4,)]
REALISATIONS = ["mirror", "explicit", "packed"]


def _network(call: Callable[[list[Any]], Any], shape: tuple[int, ...]) -> Any:
    """``call`` of an activation, which another op reads, too, and of the data."""
    data = S.Variable("data", shape=shape).as_np_ndarray()
    body = NP.tanh(data * S.Variable("scale", shape=shape).as_np_ndarray())
    loss = NP.sum(NP.sin(call([body, data]))) + NP.sum(NP.cos(body))
    return S.MakeLoss(NP.reshape(loss, (1,)).as_nd_ndarray())


def _flat(parts: list[Any]) -> Any:
    return NP.concatenate([NP.reshape(part, (-1,)) for part in parts], axis=0)


def _hstack(parts: list[Any], shape: tuple[int, ...]) -> Any:
    return NP.concatenate(parts, axis=min(1, len(shape) - 1))


# An op that is refused, and what the message says to write for it.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "hstack": (lambda parts, _: NP.hstack(parts), _hstack, SHAPES),
    "dstack": (
        lambda parts, _: NP.dstack(parts),
        lambda parts, shape: (
            NP.stack(parts, axis=-1) if len(shape) == 2 else NP.concatenate(parts, axis=2)
        ),
        SHAPES[:2],
    ),
    "concatenate": (
        lambda parts, _: NP.concatenate(parts, axis=None),
        lambda parts, _: _flat(parts),
        SHAPES[:2],
    ),
}


@pytest.mark.parametrize("realisation", REALISATIONS)
@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, row in CALLS.items() for shape in row[2]]
)
def test_they_are_refused_and_what_is_advised_trains(
    name: str, shape: tuple[int, ...], realisation: str
) -> None:
    refused, advised, _ = CALLS[name]
    options = {"shapes": {"data": shape}, "realisation": realisation}
    with mx.util.np_shape(True):
        with pytest.raises(TraceError, match=rf"{name}.*axis="):
            trace(_network(lambda parts: refused(parts, shape), shape), **options)
        traced = trace(_network(lambda parts: advised(parts, shape), shape), **options)
        if realisation == "mirror":
            return
        values = random_values(traced)
        executor = bound(traced, Schedule.unplanned(traced.graph), values)
        assert not differences(stock_steps(traced, values, 2), planned_steps(executor, 2))


@pytest.mark.parametrize("name", ["hstack", "dstack"])
def test_the_advice_means_the_same(name: str) -> None:
    for shape in CALLS[name][2]:
        parts = [mx.np.random.uniform(size=shape) for _ in range(2)]
        whole = getattr(mx.np, name)(parts)
        if name == "hstack":
            advised = mx.np.concatenate(parts, axis=min(1, len(shape) - 1))
        elif len(shape) == 2:
            advised = mx.np.stack(parts, axis=-1)
        else:
            advised = mx.np.concatenate(parts, axis=2)
        assert (whole.asnumpy() == advised.asnumpy()).all()


def test_vectors_are_joined_with_axis_none() -> None:
    """They are flat, as MXNet takes them."""
    with mx.util.np_shape(True):
        net = _network(lambda parts: NP.concatenate(parts, axis=None), (4,))
        traced = trace(net, shapes={"data": (4,)}, realisation="packed")
        values = random_values(traced)
        executor = bound(traced, Schedule.unplanned(traced.graph), values)
        assert not differences(stock_steps(traced, values, 2), planned_steps(executor, 2))
