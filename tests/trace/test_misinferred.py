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


@pytest.mark.parametrize("realisation", REALISATIONS)
def test_what_onednn_alone_computes_is_refused_where_it_must_not(
    realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = S.contrib.BatchNormWithReLU(S.Variable("data"), name="norm")
    shapes = {"data": (2, 8, 6, 6)}
    trace(S.MakeLoss(S.sum(norm)), shapes=shapes, realisation=realisation)
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    with pytest.raises(TraceError, match=r"'norm'.*write a BatchNorm and an Activation"):
        trace(S.MakeLoss(S.sum(norm)), shapes=shapes, realisation=realisation)


def _recurrent(dtype: str, mode: str = "gru") -> Any:
    states = [S.zeros((1, 3, 4), dtype=dtype)] * (2 if mode == "lstm" else 1)
    inputs = S.Variable("data", dtype=dtype), S.Variable("weight", dtype=dtype), *states
    return S.MakeLoss(S.sum(S.RNN(*inputs, mode=mode, state_size=4, num_layers=1, name="layer")))


@pytest.mark.parametrize("realisation", REALISATIONS)
@pytest.mark.parametrize("mode", ["rnn_tanh", "gru", "lstm"])
def test_a_fused_recurrent_layer_must_be_told_of_onednn_too(
    realisation: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"data": (5, 3, 10)}
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    trace(_recurrent("float64", mode), shapes=shapes, realisation=realisation)
    with pytest.raises(TraceError, match=r"'layer' \(RNN\).*set MXNET_USE_MKLDNN_RNN=0, too"):
        trace(_recurrent("float32", mode), shapes=shapes, realisation=realisation)
    monkeypatch.setenv("MXNET_USE_MKLDNN_RNN", "0")
    trace(_recurrent("float32", mode), shapes=shapes, realisation=realisation)
