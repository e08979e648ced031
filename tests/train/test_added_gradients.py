"""grad_req="add": packed steps add as MXNet does, an Embedding row by row."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.schedules import random_schedule
from helpers.training_runs import differences
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.profile import profile
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

WORDS = 10


def embedding() -> list[Any]:
    return [nn.Embedding(WORDS, 8)]


def recurrent() -> list[Any]:
    return [nn.Embedding(WORDS, 8), gluon.rnn.LSTM(6, 2, input_size=8), nn.InstanceNorm()]


class Tied(gluon.HybridBlock):
    """Its weights have a gradient of two terms, which are added up first."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(WORDS, 8)
            self.decode = nn.Dense(WORDS, flatten=False, in_units=8, params=self.embed.params)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.decode(self.embed(x))


@pytest.mark.parametrize("layers", [embedding, recurrent, lambda: [Tied()]])
def test_gradients_of_several_batches(layers: Any) -> None:
    results = []
    for plan in (False, True):
        mx.random.seed(3)
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(*layers(), nn.Dense(3, flatten=False))
        net.initialize(mx.init.Xavier())
        batches = [mx.nd.floor(mx.nd.random.uniform(0, WORDS, shape=(16, 4))) for _ in range(5)]
        net(batches[0])
        net.collect_params().setattr("grad_req", "add")
        net.hybridize()
        if plan:
            planned(net, strategy="chen_sqrt", realisation="packed")
        found = []
        for x in batches:
            with autograd.record():
                loss = (net(x) ** 2).sum()
            loss.backward()
            params = net.collect_params()
            found.append({n.partition("_")[2]: p.grad().asnumpy() for n, p in params.items()})
        results.append(found)
    assert not differences(*results)


def added(planned_by: str | None) -> tuple[Any, TrainStep | None, gluon.Trainer]:
    """A network whose gradients are added, planned or with a TrainStep, and its trainer."""
    mx.random.seed(3)
    net = nn.HybridSequential()
    net.add(nn.Dense(6), nn.BatchNorm(), nn.Dense(3))
    net.initialize(mx.init.Xavier())
    net(mx.nd.ones((3, 4)))
    net.hybridize()
    for parameter in net.collect_params().values():
        parameter.grad_req = "null" if parameter.grad_req == "null" else "add"
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    if planned_by in ("packed", "explicit"):
        planned(net, strategy="chen_sqrt", realisation=planned_by)
    return net, TrainStep(net, strategy="chen_sqrt") if planned_by == "halves" else None, trainer


def without_last(planned_by: str | None, *, ignore: bool, last: int) -> list[Any]:
    """What updates leave whose last micro-batch, of the size ``last``, is left out."""
    net, halves, trainer = added(planned_by)
    found = []
    for _ in range(2):
        for size in (3, 3):
            x = mx.nd.random.normal(shape=(size, 4))
            with autograd.record():
                loss = ((net if halves is None else halves.forward)(x) ** 2).sum()
            (autograd if halves is None else halves).backward(loss)
        with autograd.record():
            (net if halves is None else halves.forward)(mx.nd.ones((last, 4)))
        if halves is not None:
            halves.abandon()
        trainer.step(6, ignore_stale_grad=ignore)
        params = net.collect_params().values()
        found.append({str(i): p.data().asnumpy() for i, p in enumerate(params)})
        net.collect_params().zero_grad()
    return found


@pytest.mark.parametrize("planned_by", ["packed", "explicit", "halves"])
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize("last", [3, 5])
def test_the_last_micro_batch_may_be_left_out(planned_by: str, ignore: bool, last: int) -> None:
    """What the others have added stays, for the trainer to take; ``last`` may be a new shape."""
    expected = without_last(None, ignore=ignore, last=last)
    assert not differences(expected, without_last(planned_by, ignore=ignore, last=last))


@pytest.mark.parametrize("planned_by", ["packed", "halves"])
def test_an_optimizer_does_not_take_sums_of_nothing(planned_by: str) -> None:
    """To bind a plan adds nothing, and a step that fails does not add all."""
    net, halves, trainer = added(planned_by)
    with autograd.record():
        loss = (net if halves is None else halves.forward)(mx.nd.ones((3, 4))).sum()
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(3)
    (autograd if halves is None else halves).backward(loss)
    trainer.step(3)
    with autograd.record():
        loss = (net if halves is None else halves.forward)(mx.nd.ones((3, 4))).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainExecutor, "backward_half", fails)
        with pytest.raises(KeyboardInterrupt):
            (autograd if halves is None else halves).backward(loss)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(3)


def fails(executor: TrainExecutor, more: Any) -> None:
    raise KeyboardInterrupt


def test_a_gradient_that_autograd_adds_has_no_second_place_in_the_memory() -> None:
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=1000, output_dim=8, name="embed")
    net = mx.sym.MakeLoss(mx.sym.sum(words * words))
    held = {}
    for request in ("write", "add"):
        traced = trace(
            net,
            shapes={"data": (6, 2)},
            grad_req={"embed_weight": request},
            realisation="packed",
        )
        nbytes = traced.form.memory(traced).nbytes(Schedule.unplanned(traced.graph))
        held[request] = (nbytes, traced.graph.fixed_nbytes)
    gradient = 1000 * 8 * 4
    assert held["write"][0] > gradient > held["add"][0]
    assert held["add"][1] == held["write"][1] + gradient


@pytest.mark.long
def test_the_profiler_runs_a_packed_step_with_a_sparse_gradient() -> None:
    """Nobody gives it an array for one."""
    words = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=WORDS, output_dim=8, sparse_grad=True, name="embed"
    )
    net = mx.sym.MakeLoss(mx.sym.sum(words * words))
    costs = profile(net, ctx=mx.cpu(), realisation="packed", data=(6, 2))
    assert costs.seconds


def warnings_of(traced: Trace, text: str) -> list[str]:
    """The warnings with this ``text`` where a step is bound."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TrainExecutor(traced, Schedule.unplanned(traced.graph))
    return [str(one.message) for one in caught if text in str(one.message)]


def test_an_explicit_step_says_that_it_adds_rows_at_once() -> None:
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=WORDS, output_dim=4, name="embed")
    net = mx.sym.MakeLoss(mx.sym.sum(words * words))
    told = {}
    for request in ("write", "add"):
        requests = {"embed_weight": request}
        traced = trace(net, shapes={"data": (6, 2)}, grad_req=requests, realisation="explicit")
        told[request] = warnings_of(traced, "'embed_weight'")
    assert not told["write"]
    assert len(told["add"]) == 1
    assert "the last bits may differ" in told["add"][0]


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("op", ["take", "gather_nd"])
def test_a_step_says_that_it_adds_looked_up_rows_at_once(op: str, realisation: str) -> None:
    table = mx.sym.Variable("table", shape=(WORDS, 4))
    rows = getattr(mx.sym, op)(table, mx.sym.Variable("data"))
    net = mx.sym.MakeLoss(mx.sym.sum(rows * rows))
    shapes, requests = {"data": (1, 6)}, {"table": "add"}
    traced = trace(net, shapes=shapes, grad_req=requests, realisation=realisation)
    assert len(warnings_of(traced, "'table'")) == 1


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_a_step_says_that_it_adds_pictures_at_once(
    realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXNet without oneDNN, whose convolutions add the gradients of one picture after another."""
    body = mx.sym.Variable("data")
    for name in ("first", "second"):
        body = mx.sym.Convolution(body, num_filter=2, kernel=(3, 3), name=name)
    net = mx.sym.MakeLoss(mx.sym.sum(body * body))
    requests = dict.fromkeys(net.list_arguments(), "write")
    requests |= {"data": "null", "first_weight": "add", "first_bias": "add"}
    told = {}
    for enabled in ("1", "0"):
        monkeypatch.setenv("MXNET_MKLDNN_ENABLED", enabled)
        traced = trace(
            net, shapes={"data": (2, 2, 6, 6)}, grad_req=requests, realisation=realisation
        )
        told[enabled] = warnings_of(traced, "picture")
    assert not told["1"]
    assert len(told["0"]) == 1
    assert "'first_weight' (grad_req" in told["0"][0]


def test_the_executors_gradients_are_the_arrays_given() -> None:
    words = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=WORDS, output_dim=4, name="embed")
    net = mx.sym.MakeLoss(mx.sym.sum(words * words))
    requests = {"embed_weight": "add"}
    traced = trace(net, shapes={"data": (6, 2)}, grad_req=requests, realisation="packed")
    total = mx.nd.ones((WORDS, 4))
    executor = TrainExecutor(
        traced, Schedule.unplanned(traced.graph), args_grad={"embed_weight": total}
    )
    executor.arg_dict["embed_weight"][:] = 0.5
    for step in range(2):
        executor.forward(is_train=True, data=mx.nd.zeros((6, 2)))
        assert executor.grad_dict["embed_weight"] is total
        expected = np.ones((WORDS, 4))
        expected[0] += 12 * (step + 1)
        assert np.array_equal(total.asnumpy(), expected)


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_the_sums_of_an_optimized_einsum(realisation: str) -> None:
    """MXNet adds them to memory that it has not written."""
    names, shapes = "abc", {"a": (4, 6), "b": (6, 3), "c": (3, 2)}
    terms = [mx.sym.Variable(name).as_np_ndarray() for name in names]
    product = mx.sym.np.einsum("ij,jk,kl->il", *terms, optimize=True).as_nd_ndarray()
    found = {}
    for grad_req in ("write", "add"):
        traced = trace(product, shapes=shapes, grad_req=grad_req, realisation=realisation)
        executor = TrainExecutor(traced, Schedule.unplanned(traced.graph), ctx=mx.cpu(0))
        for name in names:
            executor.arg_dict[name][:] = mx.nd.arange(1, 1 + np.prod(shapes[name])).reshape(
                shapes[name]
            )
        for _ in range(2):
            executor.forward(is_train=True)
        found[grad_req] = {name: executor.grad_dict[name].asnumpy() for name in names}
    for name in names:
        assert np.array_equal(found["add"][name], 2 * found["write"][name])


def test_a_packed_step_says_that_it_adds_what_a_loop_gives_at_once() -> None:
    weight = mx.sym.Variable("weight", shape=(4, 4))

    def body(x: Any, state: Any) -> tuple[Any, Any]:
        state = mx.sym.tanh(mx.sym.dot(x + state, weight))
        return state, state

    outputs, _ = mx.sym.contrib.foreach(body, mx.sym.Variable("data"), mx.sym.zeros((2, 4)))
    net = mx.sym.MakeLoss(mx.sym.sum(outputs))
    told = {}
    for request in ("write", "add"):
        requests = {"weight": request}
        traced = trace(net, shapes={"data": (3, 2, 4)}, grad_req=requests, realisation="packed")
        told[request] = warnings_of(traced, "'weight'")
    assert not told["write"]
    assert len(told["add"]) == 1
    assert "iteration by iteration" in told["add"][0]


READERS: dict[str, Callable[..., mx.sym.Symbol]] = {
    "product": lambda x, w, b: mx.sym.broadcast_mul(x, w),
    "dense": functools.partial(mx.sym.FullyConnected, num_hidden=16),
    "convolution": functools.partial(mx.sym.Convolution, kernel=(3, 3), num_filter=16),
    "norm": functools.partial(mx.sym.BatchNorm, fix_gamma=False),
}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("nterms", [4, 5, 7, 8])
@pytest.mark.parametrize("reader", READERS)
def test_sums_of_many_terms_begin_with_what_is_there(
    reader: str, nterms: int, realisation: str
) -> None:
    """MXNet adds five, six or seven terms one after the other to it, and other sums as a whole."""
    data, weight, bias = map(mx.sym.Variable, ("data", "weight", "bias"))
    if reader == "product":
        weight = mx.sym.Variable("weight", shape=(1, 16, 1, 1))
    terms = [READERS[reader](mx.sym.sin(data * (i + 1)), weight, bias) for i in range(nterms)]
    net = mx.sym.Group([mx.sym.MakeLoss(term * term) for term in terms])
    names = [name for name in net.list_arguments() if name != "data"]
    traced, written = (
        trace(
            net,
            shapes={"data": (2, 16, 5, 5)},
            grad_req=dict.fromkeys(names, request) | {"data": "null"},
            realisation=realisation,
        )
        for request in ("add", "write")
    )
    random = np.random.default_rng(1)
    arrays, found = (
        {n: mx.nd.array(random.normal(size=traced.shapes[n])) for n in net.list_arguments()}
        for _ in range(2)
    )
    gradients = {name: found[name].copy() for name in names}
    more = sum(4 * array.size for array in gradients.values())
    assert traced.graph.fixed_nbytes == written.graph.fixed_nbytes + more
    assert not warnings_of(traced, "grad_req='add'")
    states = {name: mx.nd.ones(16) for name in net.list_auxiliary_states()}
    stock = net.bind(mx.cpu(), arrays, found, dict(traced.grad_req), aux_states=states)
    executor = TrainExecutor(
        traced, random_schedule(traced.graph, 1), args=arrays, args_grad=gradients
    )
    for _ in range(2):
        stock.forward(is_train=True)
        stock.backward()
        executor.forward(is_train=True)
        for name in names:
            assert np.array_equal(found[name].asnumpy(), gradients[name].asnumpy()), name


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_a_step_says_that_it_adds_the_terms_for_an_input_at_once(realisation: str) -> None:
    """It is not known whether oneDNN adds them, and then their sum."""
    told = {}
    for nterms in (4, 5):
        data = mx.sym.Variable("data")
        options = {"kernel": (3, 3), "num_filter": 16}
        terms = [mx.sym.Convolution(data, name=f"conv{i}", **options) for i in range(nterms)]
        net = mx.sym.Group([mx.sym.MakeLoss(term * term) for term in terms])
        requests = dict.fromkeys(net.list_arguments(), "null") | {"data": "add"}
        shapes = {"data": (2, 16, 5, 5)}
        traced = trace(net, shapes=shapes, grad_req=requests, realisation=realisation)
        told[nterms] = warnings_of(traced, "five and more terms")
    assert not told[4]
    assert len(told[5]) == 1


class OwnStatistics(gluon.HybridBlock):
    """A BatchNorm whose statistics are parameters like others, of which gradients are asked."""

    def __init__(self) -> None:
        super().__init__(prefix="norm_")
        self.parts = ("gamma", "beta", "running_mean", "running_var")
        for name in self.parts:
            initial = "zeros" if name in ("beta", "running_mean") else "ones"
            setattr(self, name, self.params.get(name, shape=(7,), init=initial))

    def hybrid_forward(self, F: Any, x: Any, **params: Any) -> Any:  # noqa: N803
        return F.BatchNorm(x, *(params[name] for name in self.parts), fix_gamma=False)


def test_statistics_have_no_gradient_to_add_to() -> None:
    found = []
    for is_planned in (False, True):
        mx.random.seed(3)
        net = nn.HybridSequential(prefix="net_")
        net.add(nn.Dense(7, in_units=6, prefix="dense_"), OwnStatistics())
        net.initialize(mx.init.Normal(0.7))
        net.collect_params().setattr("grad_req", "add")
        if is_planned:
            planned(net, strategy="chen_sqrt", realisation="packed")
        for _ in range(2):
            with autograd.record():
                loss = (net(mx.nd.arange(24).reshape((4, 6)) / 9) ** 3).sum()
            loss.backward()
        found.append([gradients(net)])
    assert not differences(*found)
