"""Gradients that MXNet's kernels do not write: zeros, as in its executor's arrays, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.networks import dense, var
from helpers.operator_calls import CONTRIB, NP, S, V
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.errors import TraceError
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

LENGTHS = {"use_sequence_length": True}


def rnn(data: mx.sym.Symbol, lengths: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.RNN(
        data,
        var("parameters"),
        mx.sym.BlockGrad(var("state", shape=(1, 3, 4))),
        sequence_length=lengths,
        mode="gru",
        state_size=4,
        num_layers=1,
        **LENGTHS,
    )


# What reads the data and the other input, by shape and values of that.
CALLS: dict[str, tuple[Callable[..., mx.sym.Symbol], np.ndarray]] = {
    "mask": (lambda x, n: mx.sym.SequenceMask(x, n, **LENGTHS), np.array([1, 4, 6])),
    "reverse": (lambda x, n: mx.sym.SequenceReverse(x, n, **LENGTHS), np.array([1, 4, 6])),
    "last": (lambda x, n: mx.sym.SequenceLast(x, n, **LENGTHS), np.array([1, 4, 6])),
    "rnn": (rnn, np.array([6, 6, 6])),
    "ctc": (lambda x, label: mx.sym.CTCLoss(x, label), np.array([[1, 2], [3, 1], [2, 4]])),
    "copy": (
        lambda x, n: mx.sym.contrib.index_copy(x, n, mx.sym.sin(x)),
        np.array([5, 0, 1, 2, 3, 4]),
    ),
}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("name", CALLS)
def test_they_are_zeros(name: str, realisation: str) -> None:
    call, other = CALLS[name]
    with mx.name.NameManager():
        body = mx.sym.sin(dense(var(), 5, flatten=False, name="first"))
        net = mx.sym.MakeLoss(mx.sym.sum(mx.sym.sin(call(body, var("other")))))
    shapes = {"data": (6, 3, 7), "other": other.shape}
    traced = trace(net, shapes=shapes, realisation=realisation, grad_req="write")
    values = random_values(traced) | {"other": other.astype("float32")}
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    found = planned_steps(executor, 2)
    assert not differences(stock_steps(traced, values, 2), found)
    assert not any(step["gradient of other"].any() for step in found)


def _resize(*, stopped: bool, of_activation: bool) -> mx.sym.Symbol:
    """Resizes a picture to the size of another, which is an argument or computed of one."""
    like, picture = V("like"), S.tanh(V("picture"))
    like = S.sin(like) if of_activation else like
    read = S.BlockGrad(like) if stopped else like
    resized = CONTRIB.BilinearResize2D(picture, like=read, mode="like")
    return S.MakeLoss(S.sum(S.square(resized)) + S.sum(S.cos(like)))


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("of_activation", [True, False])
@pytest.mark.parametrize("height", [5, 8])
@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_what_a_resize_takes_the_size_of_has_no_gradient_by_it(
    realisation: str, height: int, of_activation: bool, grad_req: str
) -> None:
    """MXNet writes zeros where the sizes differ, over what was added before, and else nothing."""
    shapes = {"picture": (2, 3, 8, 8), "like": (2, 4, height, 8)}
    with mx.name.NameManager():
        nets = [_resize(stopped=s, of_activation=of_activation) for s in (False, True)]
    options = {"shapes": shapes, "grad_req": grad_req}
    right, traced = trace(nets[1], **options), trace(nets[0], realisation=realisation, **options)
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    _fill_free_memory()
    assert not differences(stock_steps(right, values, 2), planned_steps(executor, 2))


def _fill_free_memory() -> None:
    """Has NaN in what MXNet's pool hands out next."""
    for nelements in (12, 240, 256, 384, 512):
        arrays = [mx.nd.full((nelements,), np.nan) for _ in range(8)]
        mx.nd.waitall()
        del arrays


def _assert_as_if_stopped(
    net: Callable[[Callable[[mx.sym.Symbol], mx.sym.Symbol]], mx.sym.Symbol],
    realisation: str,
    **options: Any,
) -> None:
    """A step of ``net`` leaves what MXNet's does where no gradient goes to what it stops."""
    traced = trace(net(S.identity), realisation=realisation, **options)
    values = random_values(traced)
    executor = bound(traced, Schedule.unplanned(traced.graph), values)
    _fill_free_memory()
    found = planned_steps(executor, 2)
    assert not differences(stock_steps(trace(net(S.BlockGrad), **options), values, 2), found)


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_anchors_have_no_gradient_by_their_targets(realisation: str) -> None:
    def net(stop: Callable[[mx.sym.Symbol], mx.sym.Symbol]) -> mx.sym.Symbol:
        anchors = S.tanh(V("anchors"))
        scores = S.softmax(V("scores"), axis=1)
        targets = CONTRIB.MultiBoxTarget(stop(anchors), V("boxes"), scores)
        return S.MakeLoss(S.sum(S.square(targets[0])) + S.sum(S.cos(anchors)))

    shapes = {"anchors": (1, 4, 4), "boxes": (2, 2, 5), "scores": (2, 3, 4)}
    options = {"shapes": shapes, "grad_req": {"anchors": "write"}}
    _assert_as_if_stopped(net, realisation, **options)


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_the_state_before_a_hawkes_process_has_no_gradient_by_it(realisation: str) -> None:
    def net(stop: Callable[[mx.sym.Symbol], mx.sym.Symbol]) -> mx.sym.Symbol:
        state, ages = S.tanh(V("state")), S.sigmoid(V("data"))
        # The step computes gradients of neither times nor lengths, which MXNet refuses.
        marks = S.Cast(S.zeros_like(ages), dtype="int32")
        numbers = [S.BlockGrad(n + 0 * S.sum(ages, axis=1)) for n in (5, 20)]
        rates = [0.2 + S.zeros((2, 3)), 0.1 + S.zeros((3,)), 1 + S.zeros((3,))]
        likelihood = CONTRIB.hawkesll(*rates, stop(state), S.BlockGrad(ages), marks, *numbers)
        return S.MakeLoss(S.sum(likelihood[0]) + S.sum(S.cos(state)))

    shapes = {"data": (2, 5), "state": (2, 3)}
    options = {"shapes": shapes, "grad_req": {"state": "write"}}
    _assert_as_if_stopped(net, realisation, **options)


def _of_numpy(call: Callable[..., mx.sym.Symbol]) -> Callable[..., mx.sym.Symbol]:
    return lambda *inputs: call(*(x.as_np_ndarray() for x in inputs)).as_nd_ndarray()


# What reads a float and another dtype, in either order.
MIXED: dict[str, Callable[..., mx.sym.Symbol]] = {
    "add": lambda x, n: x + n,
    "subtract": lambda x, n: n - x,
    "multiply": lambda x, n: x * n,
    "multiply, broadcast": lambda x, n: NP.sum(x, axis=1, keepdims=True) * n,
    "mod": lambda x, n: NP.mod(x, n),
    "divide": lambda x, n: x / n,
    "power": lambda x, n: NP.exp(x) ** n,
}


@pytest.mark.parametrize("dtype", ["int32", "bool"])
@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("name", MIXED)
def test_what_is_no_float_has_no_gradient_by_a_float_beside_it(
    name: str, realisation: str, dtype: str
) -> None:
    def net(stop: Callable[[mx.sym.Symbol], mx.sym.Symbol]) -> mx.sym.Symbol:
        data = S.tanh(V("data"))
        others = (5 + 4 * stop(S.sin(data))).as_np_ndarray().astype(dtype)
        return S.MakeLoss(S.sum(S.sin(_of_numpy(MIXED[name])(data, others))))

    options = {"shapes": {"data": (4, 6)}, "grad_req": "write"}
    with mx.util.np_shape(True):
        traced = trace(net(S.identity), realisation=realisation, **options)
        right = trace(net(S.BlockGrad), **options)
        values = random_values(traced)
        executor = bound(traced, Schedule.unplanned(traced.graph), values)
        _fill_free_memory()
        assert not differences(stock_steps(right, values, 2), planned_steps(executor, 2))


# What reads data and a parameter, whose gradient MXNet's executor does not write where that of the
# data is not wanted, and their shapes.
ALONE: dict[str, tuple[Callable[..., mx.sym.Symbol], tuple[int, ...], tuple[int, ...]]] = {
    "dense layer": (
        lambda x, w: S.FullyConnected(S.sin(x), x, w, num_hidden=4),
        (4, 3),
        (4,),
    ),
    "attention": (
        lambda x, w: CONTRIB.interleaved_matmul_selfatt_valatt(x, w, heads=2),
        (5, 3, 24),
        (6, 5, 5),
    ),
    "scores": (
        lambda x, w: CONTRIB.interleaved_matmul_encdec_qk(x, w, heads=2),
        (5, 3, 8),
        (5, 3, 16),
    ),
    "polynomial": (_of_numpy(NP.polyval), (3,), (4, 6)),
    "differences": (_of_numpy(lambda x, w: NP.ediff1d(x, to_begin=w)), (4, 6), (3,)),
}


@pytest.mark.parametrize("name", ALONE)
def test_gradients_that_are_not_written_alone(name: str) -> None:
    """Packed steps have those that MXNet computes beside that of the data, and warn.

    Explicit ones refuse them.
    """
    call, data, weight = ALONE[name]
    with mx.name.NameManager():
        net = S.MakeLoss(S.sum(S.sin(call(V("data"), S.tanh(V("weight"))))))
    shapes = {"data": data, "weight": weight}
    with mx.util.np_shape(True):
        whole = trace(net, shapes=shapes, grad_req="write")
        with pytest.warns(UserWarning, match="not wanted: .* A packed step computes it"):
            traced = trace(net, shapes=shapes, grad_req={"weight": "write"}, realisation="packed")
        values = random_values(whole)
        right = stock_steps(whole, values, 1)[0]["gradient of weight"]
        executor = bound(traced, Schedule.unplanned(traced.graph), values)
        assert np.array_equal(planned_steps(executor, 1)[0]["gradient of weight"], right)
        with pytest.raises(TraceError, match=r"not wanted.*realisation='packed'"):
            trace(net, shapes=shapes, grad_req={"weight": "write"}, realisation="explicit")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for realisation in ("explicit", "packed"):
                trace(net, shapes=shapes, grad_req="write", realisation=realisation)


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("subscripts", ["ii->i", "ij,jj->i", "...ii->..."])
def test_a_diagonal_by_einsum_is_refused(subscripts: str, realisation: str) -> None:
    def net(*, read: bool) -> mx.sym.Symbol:
        parts = [S.tanh(V("weight")), V("data")] if "," in subscripts else [V("data")]
        parts = [part.as_np_ndarray() for part in parts]
        parts[-1] = NP.tanh(parts[-1]) if read else NP.exp(parts[-1])
        return S.MakeLoss(S.sum(NP.einsum(subscripts, *parts).as_nd_ndarray()))

    wanted = {name: "write" for name in ("data", "weight") if name in net(read=True).list_inputs()}
    shapes = dict.fromkeys(wanted, (4, 4))
    with mx.util.np_shape(True):
        with pytest.raises(TraceError, match=r"einsum.*takes a diagonal.*np\.diagonal"):
            trace(net(read=True), shapes=shapes, grad_req=wanted, realisation=realisation)
        if "weight" in wanted:  # the diagonal is that of what has no gradient
            trace(
                net(read=False),
                shapes=shapes,
                grad_req={"weight": "write"},
                realisation=realisation,
            )
        advised = S.MakeLoss(S.sum(NP.diagonal(NP.tanh(V("data").as_np_ndarray())).as_nd_ndarray()))
        trace(advised, shapes={"data": (4, 4)}, grad_req="write", realisation=realisation)


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_the_last_of_a_sequence_without_lengths_is_refused(realisation: str) -> None:
    """MXNet's backward op reads places that the forward op has left in temporary space."""
    data = mx.sym.Variable("data", shape=(5, 2, 3))
    weight = mx.sym.Variable("weight", shape=(3,))
    read = mx.sym.broadcast_mul(data, weight)
    with pytest.raises(TraceError, match=r"SequenceLast without sequence_length.*slice_axis"):
        trace(mx.sym.MakeLoss(mx.sym.SequenceLast(read)), shapes={}, realisation=realisation)
    advised = mx.sym.slice_axis(read, axis=0, begin=-1, end=None).reshape((-3, -2))
    trace(mx.sym.MakeLoss(advised), shapes={}, realisation=realisation)
    lengths = mx.sym.Variable("lengths", shape=(2,))
    with_lengths = mx.sym.SequenceLast(read, lengths, use_sequence_length=True)
    requests = {"data": "null", "weight": "write", "lengths": "null"}
    options = {"shapes": {}, "realisation": realisation, "grad_req": requests}
    trace(mx.sym.MakeLoss(with_lengths), **options)


def _compressed(x: mx.sym.Symbol) -> mx.sym.Symbol:
    return S.cast_storage(x, stype="csr")


def _network(call: Callable[[mx.sym.Symbol], mx.sym.Symbol]) -> mx.sym.Symbol:
    return S.MakeLoss(S.sum(S.sin(call(S.tanh(V("data"))))))


_OPTIONS = {"shapes": {"data": (4, 4), "weight": (4, 4)}, "grad_req": "write"}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: S.dot(_compressed(x), V("weight")),
        lambda x: S.dot(V("weight"), _compressed(x)),
        lambda x: S.dot(S.square(_compressed(x)), V("weight")),
        lambda x: S.dot(S.dot(S.sin(x), _compressed(S.BlockGrad(x))), V("weight")),
    ],
)
def test_the_gradient_of_a_csr_array_by_a_dot_is_refused(call: Any) -> None:
    with pytest.raises(TraceError, match=r"\(dot\) reads .* csr .*stype='default'"):
        trace(_network(call), realisation="explicit", **_OPTIONS)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: S.dot(S.cast_storage(_compressed(x), stype="default"), V("weight")),
        lambda x: S.dot(S.BlockGrad(_compressed(x)), V("weight")) + S.cos(x),
        lambda x: S.dot(S.dot(_compressed(S.BlockGrad(x)), S.sin(x)), V("weight")),
    ],
)
def test_dots_of_csr_arrays_without_a_gradient(call: Any) -> None:
    traced = trace(_network(call), realisation="explicit", **_OPTIONS)
    values = random_values(traced)
    planned = bound(traced, Schedule.unplanned(traced.graph), values)
    # The gradient of the weight is row_sparse in both, where MXNet chooses: with a dense one it
    # takes another kernel, which rounds otherwise.
    stock = traced.symbol.simple_bind(mx.cpu(), "write", **_OPTIONS["shapes"])
    stock.copy_params_from({name: mx.nd.array(value) for name, value in values.items()})
    _fill_free_memory()
    for executor in (stock, planned):
        executor.forward(is_train=True)
        executor.backward()
    for name, gradient in stock.grad_dict.items():
        assert planned.grad_dict[name].stype == gradient.stype
        assert np.array_equal(planned.grad_dict[name].asnumpy(), gradient.asnumpy())
