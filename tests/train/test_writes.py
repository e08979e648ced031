"""Parameters that a script writes between the call of a planned block and ``backward``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.ndarray import to_dlpack_for_write  # before anything is planned

from helpers.blocks import chain_net
from memplan.errors import UsageError
from memplan.mxnet.gluon import TrainStep, planned

Write = Callable[[Any, Path], None]


def pictures() -> Any:
    return mx.nd.arange(600).reshape((2, 3, 10, 10)) / 600


def network() -> Any:
    net = chain_net(pictures())
    net.hybridize()
    return net


def set_data(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * 2)


def load(net: Any, folder: Path) -> None:
    net.load_parameters(str(folder / "other.params"))


def assign(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        parameter.data()[1:] = 0.5


def multiply(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        array = parameter.data()
        array *= 2


def update(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        mx.nd.sgd_update(parameter.data(), parameter.data(), lr=0.1, out=parameter.data())


def update_together(net: Any, folder: Path) -> None:
    arrays = [parameter.data() for parameter in net.collect_params().values()]
    pairs = [array for array in arrays for _ in range(2)]
    rates = {"lrs": [0.1] * len(arrays), "wds": [0] * len(arrays)}
    mx.nd.multi_sgd_update(*pairs, num_weights=len(arrays), out=arrays, **rates)


def update_by_an_optimizer(net: Any, folder: Path) -> None:
    optimizer = mx.optimizer.create("adam")
    for index, parameter in enumerate(net.collect_params().values()):
        array = parameter.data()
        optimizer.update(index, array, array.copy(), optimizer.create_state(index, array))


def draw(net: Any, folder: Path) -> None:
    mx.random.seed(3)
    for parameter in net.collect_params().values():
        mx.nd.random.normal(out=parameter.data())


def copy(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        (parameter.data() * 3).copyto(parameter.data())


def pull(net: Any, folder: Path) -> None:
    store = mx.kv.create()
    for name, parameter in net.collect_params().items():
        store.init(name, parameter.data() * 2)
        store.pull(name, parameter.data())


def push_and_pull(net: Any, folder: Path) -> None:
    store = mx.kv.create()
    for name, parameter in net.collect_params().items():
        store.init(name, parameter.data())
        store.pushpull(name, parameter.data() * 2, out=parameter.data())


def push_and_pull_the_same(net: Any, folder: Path) -> None:
    """What it is given is where the kvstore writes: averages of the parameters of two copies."""
    store = mx.kv.create()
    for name, parameter in net.collect_params().items():
        store.init(name, parameter.data())
        store.pushpull(name, [parameter.data(), parameter.data() * 2])
    mx.nd.waitall()  # it lays the weights out anew, which the backward ops of MXNet read meanwhile


def assign_to_a_view(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        view = parameter.data()[:1]
        view[:] = 0.5


def assign_by_numpy(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        parameter.data().as_np_ndarray()[1:] = 0.5


def reset(net: Any, folder: Path) -> None:
    arrays = [parameter.data() for parameter in net.collect_params().values()]
    mx.nd.reset_arrays(*arrays, num_arrays=len(arrays))


def write_by_dlpack(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        capsule = parameter.data().to_dlpack_for_write()
        mx.nd.from_dlpack(capsule)[:] = 0.5


def write_by_the_function_for_dlpack(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        mx.nd.from_dlpack(mx.nd.to_dlpack_for_write(parameter.data()))[:] = 0.5


def write_by_a_name_for_that_function(net: Any, folder: Path) -> None:
    for parameter in net.collect_params().values():
        mx.nd.from_dlpack(to_dlpack_for_write(parameter.data()))[:] = 0.5


WRITES = [
    reset,
    write_by_a_name_for_that_function,
    write_by_dlpack,
    write_by_the_function_for_dlpack,
    set_data,
    load,
    assign,
    multiply,
    copy,
    update,
    update_together,
    update_by_an_optimizer,
    draw,
    pull,
    push_and_pull,
    push_and_pull_the_same,
    assign_to_a_view,
    assign_by_numpy,
]


def gradients_of(write: Write, folder: Path, strategy: str | None) -> list[np.ndarray[Any, Any]]:
    net = network()
    with_others = network()
    set_data(with_others, folder)
    with_others.save_parameters(str(folder / "other.params"))
    if strategy is not None:
        planned(net, strategy=strategy, realisation="packed")
    for _ in range(2):
        with autograd.record():
            loss = (net(pictures()) ** 2).sum()
        write(net, folder)
        loss.backward()
    return [p.grad().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_not_recomputed_is_differentiated_as_by_mxnet(write: Write, tmp_path: Path) -> None:
    expected = gradients_of(write, tmp_path, None)
    found = gradients_of(write, tmp_path, "store_all")
    assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize("write", WRITES)
def test_what_would_be_recomputed_by_other_values_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was written between the call of a planned block and"):
        gradients_of(write, tmp_path, "chen_sqrt")


def test_the_halves_of_a_step_refuse_it_too(tmp_path: Path) -> None:
    net = network()
    step = TrainStep(net, strategy="chen_sqrt", realisation="packed")
    with autograd.record():
        loss = step.forward(pictures()).sum()
    set_data(net, tmp_path)
    with pytest.raises(UsageError, match="was written between"):
        step.backward(loss)
    step.abandon()
    assert {type(p.data()) for p in net.collect_params().values()} == {mx.nd.NDArray}


def test_what_is_written_before_the_call_or_behind_backward_counts_as_without_a_plan(
    tmp_path: Path,
) -> None:
    def run(plan: bool) -> dict[str, Any]:
        net = network()
        if plan:
            planned(net, strategy="chen_sqrt", realisation="packed")
        for _ in range(3):
            set_data(net, tmp_path)
            with autograd.record():
                net(pictures())  # a step that is left out
            assign(net, tmp_path)
            with autograd.record():
                loss = (net(pictures()) ** 2).sum()
            loss.backward()
            multiply(net, tmp_path)
        arrays = {p.name: p.data() for p in net.collect_params().values()}
        assert {type(array) for array in arrays.values()} == {mx.nd.NDArray}
        return {n: a.asnumpy() for n, a in arrays.items()} | {
            f"gradient of {p.name}": p.grad().asnumpy() for p in net.collect_params().values()
        }

    expected, found = run(False), run(True)
    assert not [n for n in expected if not np.array_equal(expected[n], found[n])]


def of_a_flat_array(net: Any) -> tuple[Any, list[Any]]:
    """One array, of whose views the parameters are made, behind which there is more."""
    parameters = list(net.collect_params().values())
    ends = np.cumsum([p.data().size for p in parameters])
    flat = mx.nd.zeros((ends[-1] + 10,))
    for parameter, end in zip(parameters, ends, strict=True):
        view = flat[end - parameter.data().size : end].reshape(parameter.shape)
        view[:] = parameter.data()
        parameter._data[0] = view
        autograd.mark_variables([view], parameter._grad)
    return flat, [p.data() for p in parameters]


def assign_to_all(flat: Any, views: list[Any]) -> None:
    flat[:] = 0.5


def assign_to_views(flat: Any, views: list[Any]) -> None:
    for view in views:
        view[:] = 0.5


def assign_to_views_by_numpy(flat: Any, views: list[Any]) -> None:
    for view in views:
        view[:] = np.full(view.shape, 0.5)


def update_all(flat: Any, views: list[Any]) -> None:
    mx.nd.sgd_update(flat, flat.copy(), lr=0.1, out=flat)


def assign_beside(flat: Any, views: list[Any]) -> None:
    behind = flat[-10:]  # else MXNet's operator gets the whole array for its out
    behind[:] = 0.5


def flat_gradients(write: Callable[[Any, list[Any]], None], plan: bool) -> list[Any]:
    net = network()
    flat, views = of_a_flat_array(net)
    if plan:
        planned(net, strategy="chen_sqrt", realisation="packed")
    for _ in range(2):
        with autograd.record():
            loss = (net(pictures()) ** 2).sum()
        write(flat, views)
        loss.backward()
    return [p.grad().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize(
    "write", [assign_to_all, assign_to_views, assign_to_views_by_numpy, update_all]
)
def test_a_write_through_an_array_taken_before_the_call_is_refused(write: Any) -> None:
    with pytest.raises(UsageError, match="was written between the call of a planned block and"):
        flat_gradients(write, True)


def test_a_write_beside_the_parameters_is_none_of_them() -> None:
    expected, found = flat_gradients(assign_beside, False), flat_gradients(assign_beside, True)
    assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize("begin", [0, 2])
def test_a_warning_tells_of_an_input_that_was_written(begin: int) -> None:
    """Gradients are those of what it was; what is written beside it is no input."""
    gradients = []
    for writes in (False, True):
        net = planned(network(), strategy="chen_sqrt", realisation="packed")
        whole = mx.nd.concat(pictures(), pictures(), dim=0)
        with autograd.record():
            loss = (net(whole[:2]) ** 2).sum()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            if writes:
                part = whole[begin : begin + 2]
                part[:] = 0
            loss.backward()
        assert len(found) == (writes and begin == 0)
        assert all("input of a planned block was written" in str(w.message) for w in found)
        gradients.append([p.grad().asnumpy() for p in net.collect_params().values()])
    assert all(map(np.array_equal, *gradients))


def test_arrays_in_the_memory_of_an_input_that_is_gone_are_no_input() -> None:
    net = planned(network(), strategy="chen_sqrt", realisation="packed")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3):
            with autograd.record():
                loss = (net(mx.nd.array(pictures().asnumpy())) ** 2).sum()
            mx.nd.waitall()
            others = [mx.nd.array(pictures().asnumpy()) for _ in range(8)]
            loss.backward()
    assert len(others) == 8
