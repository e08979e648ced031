"""Gradients that a script keeps in arrays of its own, as views of one flat array."""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import SOFTMAX
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.gluon import TrainStep, planned

X = mx.nd.random.normal(shape=(4, 6))
Y = mx.nd.array([0, 1, 2, 0])

Arrays = Callable[[list[Any]], list[Any]]


def dense() -> nn.HybridSequential:
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier())
    return net


def apart(parameters: list[Any]) -> list[Any]:
    """An array for each of the gradients, of which the parameters know nothing."""
    arrays = [p.data().zeros_like() for p in parameters]
    autograd.mark_variables([p.data() for p in parameters], arrays)
    return arrays


def attached(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        parameter.data().attach_grad()
    return [p.data().grad for p in parameters]


def asked(parameters: list[Any]) -> list[Any]:
    return [p.data().grad for p in parameters]


def reshaped(parameters: list[Any]) -> list[Any]:
    return [p.grad().reshape((-1,)) for p in parameters]


def own(parameters: list[Any]) -> list[Any]:
    return [p.grad() for p in parameters]


def own_by_list(parameters: list[Any]) -> list[Any]:
    return [array for p in parameters for array in p.list_grad()]


def flat_zeros(parameters: list[Any]) -> Any:
    return mx.nd.zeros((sum(p.data().size for p in parameters),))


def views_of(flat: Any, parameters: list[Any]) -> list[Any]:
    """A part of a ``flat`` array for each of the parameters."""
    ends = np.cumsum([p.data().size for p in parameters])
    places = zip(parameters, ends, strict=True)
    return [flat[end - p.data().size : end].reshape(p.shape) for p, end in places]


def replaced(parameters: list[Any]) -> list[Any]:
    """Views of a flat array, which are made the gradients of the parameters."""
    flat = flat_zeros(parameters)
    views = views_of(flat, parameters)
    for parameter, view in zip(parameters, views, strict=True):
        parameter._grad[0] = view
    autograd.mark_variables([p.data() for p in parameters], views)
    return views_of(flat, parameters)


def marked(parameters: list[Any]) -> list[Any]:
    """The same, where the parameters know nothing of it."""
    flat = flat_zeros(parameters)
    views = views_of(flat, parameters)
    autograd.mark_variables([p.data() for p in parameters], views)
    return views_of(flat, parameters)


@contextmanager
def expected_warning(text: str) -> Iterator[None]:
    if text:
        with pytest.warns(UserWarning, match=text):
            yield
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield


def gradients_of(arrays_of: Arrays, before: int, text: str, plan: bool) -> list[np.ndarray]:
    """What ``arrays_of`` parameters have after two steps, asked after so many steps ``before``.

    After -1 is before the block is planned.
    """
    net = dense()
    early = arrays_of(list(net.collect_params().values())) if before < 0 else None
    if plan:
        planned(net, strategy="chen_sqrt")
    parameters = list(net.collect_params().values())
    for _ in range(before):
        with autograd.record():
            loss = SOFTMAX(net(X), Y)
        loss.backward()
    arrays = early or arrays_of(parameters)
    result = []
    with expected_warning(text if plan else ""):
        for _ in range(2):
            with autograd.record():
                loss = SOFTMAX(net(X), Y)
            loss.backward()
            result += [array.asnumpy() for array in arrays]
            for parameter, array in zip(parameters, arrays, strict=True):
                parameter.data()[:] -= 0.1 * array.reshape(parameter.shape)
    return result


HELD = "has gradients .*net_dense0_weight and 3 more"


@pytest.mark.parametrize(
    ("arrays_of", "before", "text"),
    [
        *(
            (arrays_of, n, HELD)
            for arrays_of in (replaced, marked, apart, attached)
            for n in (0, 2)
        ),
        *((arrays_of, -1, HELD) for arrays_of in (replaced, asked, reshaped)),
        (reshaped, 0, HELD),
        *((arrays_of, n, "") for arrays_of in (asked, own, own_by_list) for n in (0, 2)),
        *((arrays_of, -1, "") for arrays_of in (own, own_by_list)),
        (reshaped, 2, ""),
    ],
)
def test_arrays_that_a_script_holds_get_the_gradients(
    arrays_of: Arrays, before: int, text: str
) -> None:
    expected = gradients_of(arrays_of, before, text, False)
    assert all(array.any() for array in expected)
    assert all(map(np.array_equal, expected, gradients_of(arrays_of, before, text, True)))


@pytest.mark.parametrize("numpy", [False, True])
def test_what_data_of_a_parameter_gives_for_its_gradient_follows_that(numpy: bool) -> None:
    """From step to step of batches of two shapes."""
    results = []
    with mx.util.np_shape(numpy), mx.util.np_array(numpy):
        for plan in (False, True):
            net = dense()
            if plan:
                planned(net, strategy="chen_sqrt")
            gradients = None
            for size in (4, 2, 4, 2):
                inputs = X.as_np_ndarray() if numpy else X
                with autograd.record():
                    loss = (net(inputs[:size]) ** 2).sum()
                if gradients is not None and plan:
                    with pytest.raises(UsageError, match="is not there"):
                        net[0].weight.data().grad.asnumpy()
                loss.backward()
                gradients = gradients or [p.data().grad for p in net.collect_params().values()]
                results += [array.asnumpy() for array in gradients]
    assert all(array.any() for array in results)
    assert all(map(np.array_equal, results[:16], results[16:]))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_refuses_such_gradients(is_frozen: bool) -> None:
    net = dense()
    step = TrainStep(net, SOFTMAX, strategy="chen_sqrt")
    step(X, Y)
    views = replaced(list(net.collect_params().values()))
    if is_frozen:  # Python tells of no object then that is there now
        gc.freeze()
    with pytest.raises(ArgumentError, match=r"has gradients.*take planned\(block\)"):
        step(X, Y)
    del views
    step(X, Y)


def test_an_array_whose_handle_python_has_lost_is_nobodys() -> None:
    # As where a signal handler raises while Python frees an array: MXNet never does, then.
    net = dense()
    view = net[0].weight.grad().reshape((-1,))
    view.handle = ctypes.c_void_p()
    step = TrainStep(net, SOFTMAX, strategy="chen_sqrt")
    for _ in range(2):
        assert step(X, Y).asnumpy().all()


def trained_as_static_graph() -> tuple[nn.HybridSequential, Any]:
    """A network of which MXNet's own graph has computed gradients: zeros for the first layer.

    With the loss, by which the graph stays, whatever becomes of that of the network.
    """
    net = dense()
    net[1].weight.set_data(mx.nd.zeros((3, 8)))
    net.hybridize(static_alloc=True, static_shape=True)
    with autograd.record():
        loss = SOFTMAX(net(X), Y)
    loss.backward()
    return net, loss


def test_zeros_that_a_graph_of_mxnets_has_computed_are_nobody_elses() -> None:
    net, before = trained_as_static_graph()
    planned(net, strategy="chen_sqrt")
    with expected_warning(""), autograd.record():
        loss = SOFTMAX(net(X), Y)
    loss.backward()
    assert net.planned_step.plans
    other, before = trained_as_static_graph()
    loss = TrainStep(other, SOFTMAX, strategy="chen_sqrt")(X, Y)
    assert np.array_equal(loss.asnumpy(), before.asnumpy())


def test_views_of_what_a_graph_of_mxnets_has_computed_get_the_gradients() -> None:
    results = []
    for plan in (False, True):
        net, _before = trained_as_static_graph()
        parameters = list(net.collect_params().values())
        views = reshaped(parameters)
        if plan:
            planned(net, strategy="chen_sqrt")
        for _ in range(2):
            for parameter, view in zip(parameters, views, strict=True):
                parameter.data()[:] -= 0.1 * view.reshape(parameter.shape)
            with expected_warning(HELD if plan else ""), autograd.record():
                loss = SOFTMAX(net(X), Y)
            loss.backward()
            results += [view.asnumpy() for view in views]
    assert all(array.any() for array in results)
    assert all(map(np.array_equal, results[:8], results[8:]))


def test_views_to_which_gradients_are_added_are_planned() -> None:
    results = []
    for plan in (False, True):
        net = dense()
        net.collect_params().setattr("grad_req", "add")
        if plan:
            planned(net, strategy="chen_sqrt")
        parameters = list(net.collect_params().values())
        flat = flat_zeros(parameters)
        views = views_of(flat, parameters)
        for parameter, view in zip(parameters, views, strict=True):
            parameter._grad[0] = view
        autograd.mark_variables([p.data() for p in parameters], views, "add")
        with expected_warning(""):
            for _ in range(2):
                flat[:] = 0
                with autograd.record():
                    loss = SOFTMAX(net(X), Y)
                loss.backward()
                results.append(flat.asnumpy())
        assert not plan or net.planned_step.plans
    assert all(array.any() for array in results)
    assert all(map(np.array_equal, results[:2], results[2:]))


def test_gradients_of_a_plan_and_arrays_apart_are_planned() -> None:
    net = planned(dense(), strategy="chen_sqrt")
    parameters = list(net.collect_params().values())
    with expected_warning(""):
        for _ in range(3):
            with autograd.record():
                loss = SOFTMAX(net(X), Y)
            loss.backward()
            for parameter in parameters:
                parameter._grad[0] = mx.nd.zeros(parameter.shape)
            autograd.mark_variables([p.data() for p in parameters], [p.grad() for p in parameters])
    assert net.planned_step.plans
    with autograd.record():
        loss = SOFTMAX(net(X), Y)
    loss.backward()
    assert all(p.grad().asnumpy().any() for p in parameters)


def thawed(plan: bool) -> list[np.ndarray]:
    """Gradients of a frozen parameter of which a script wants one after the first step."""
    net = dense()
    net[1].bias.grad_req = "null"
    if plan:
        planned(net, strategy="chen_sqrt")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    result = []
    for step in range(3):
        if step == 1:
            net[1].bias.data().attach_grad()
        text = "attach_grad .*net_dense1_bias" if plan and step else ""
        with expected_warning(text), autograd.record():
            loss = SOFTMAX(net(X), Y)
        loss.backward()
        trainer.step(4)
        if step:
            result.append(net[1].bias.data().grad.asnumpy())
    return [*result, *(p.data().asnumpy() for p in net.collect_params().values())]


def test_a_frozen_parameter_whose_array_gets_a_gradient_later_has_it() -> None:
    expected = thawed(False)
    assert expected[0].any()
    assert all(map(np.array_equal, expected, thawed(True)))


def test_a_step_refuses_a_frozen_parameter_whose_array_gets_a_gradient_later() -> None:
    net = dense()
    net[1].bias.grad_req = "null"
    step = TrainStep(net, SOFTMAX, strategy="chen_sqrt")
    step(X, Y)
    net[1].bias.data().attach_grad()
    with pytest.raises(ArgumentError, match=r"attach_grad .*net_dense1_bias"):
        step(X, Y)


def test_gradients_of_the_former_autograd_count_from_the_step_on_before_which_they_are() -> None:
    results = []
    for plan in (False, True):
        net = dense()
        if plan:
            planned(net, strategy="chen_sqrt")
        parameters = list(net.collect_params().values())
        for number in range(4):
            if number == 2:
                arrays = [mx.nd.zeros(p.shape) for p in parameters]
                mx.contrib.autograd.mark_variables([p.data() for p in parameters], arrays)
            with expected_warning(HELD if plan and number > 1 else ""), autograd.record():
                loss = SOFTMAX(net(X), Y)
            loss.backward()
            results += [array.asnumpy() for array in arrays] if number > 1 else []
    assert all(map(np.array_equal, results[:8], results[8:]))
