"""Gradients of Concats in packed steps: the same bits as MXNet's, without what that leaks."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from memplan.mxnet.realise.concat_parts import slices
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.train.random_run import random_arrays
from memplan.mxnet.train.train_executor import TrainExecutor
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol


def _joined(dim: int, channels: int, shape: tuple[int, ...]) -> Trace:
    """Two branches, joined before a BatchNorm, which rounds by the layout of what it reads."""
    with mx.name.NameManager():
        data = mx.sym.Variable("data")
        if len(shape) == 2:
            branches = [mx.sym.FullyConnected(data, num_hidden=channels + k) for k in (0, 1)]
        else:
            options = {"num_filter": channels, "no_bias": True}
            branches = [
                mx.sym.Convolution(data, kernel=(k, k), pad=(k // 2, k // 2), **options)
                for k in (1, 3)
            ]
        joined = mx.sym.concat(*map(mx.sym.tanh, branches), branches[0], dim=dim)
        if len(shape) == 4:
            joined = mx.sym.Convolution(joined, num_filter=16, kernel=(1, 1))
        net = mx.sym.SoftmaxOutput(
            mx.sym.FullyConnected(mx.sym.BatchNorm(joined), num_hidden=3), name="softmax"
        )
    return trace(net, shapes={"data": shape}, realisation="packed")


def _executor(traced: Trace) -> TrainExecutor:
    arguments, states = random_arrays(traced, mx.cpu())
    schedule = Schedule.unplanned(traced.graph)
    return TrainExecutor(traced, schedule, ctx=mx.cpu(), args=arguments, aux_states=states)


def _gradients(executor: Any, nsteps: int) -> dict[str, np.ndarray]:
    for _ in range(nsteps):
        executor.forward(is_train=True)
        executor.backward()
    held = executor.grad_dict.items()
    return {name: array.asnumpy() for name, array in held if array is not None}


PICTURES, ROWS = (2, 3, 8, 8), (6, 10)
CASES = [(1, 16, PICTURES), (1, 7, PICTURES), (2, 16, PICTURES), (3, 12, PICTURES), (1, 5, ROWS)]


@pytest.mark.parametrize(("dim", "channels", "shape"), CASES)
def test_the_parts_are_those_of_mxnet(dim: int, channels: int, shape: tuple[int, ...]) -> None:
    """From the third step on the calls are made past the C API."""
    _check_gradients(_joined(dim, channels, shape))


def test_a_concat_of_more_parts_than_python_has_frames() -> None:
    """As of the steps of a recurrent network, each of which is a part."""
    nparts = sys.getrecursionlimit() + 1
    with mx.name.NameManager():
        data = mx.sym.Variable("data")
        parts = [mx.sym.slice_axis(data, axis=1, begin=k, end=k + 1) for k in range(nparts)]
        joined = mx.sym.concat(*parts, dim=1)
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(joined, num_hidden=3), name="softmax")
    options = {"grad_req": {"data": "write"}, "realisation": "packed"}
    _check_gradients(trace(net, shapes={"data": (2, nparts)}, **options))


def _check_gradients(traced: Trace) -> None:
    """Three steps, of which the last makes calls past the C API, and one of MXNet's."""
    executor = _executor(traced)
    arrays = {name: array.copy() for name, array in executor.arg_dict.items()}
    stock = traced.symbol.bind(
        mx.cpu(),
        arrays,
        {name: mx.nd.zeros_like(array) for name, array in arrays.items()},
        aux_states={name: array.copy() for name, array in executor.aux_dict.items()},
    )
    expected, found = _gradients(stock, 1), _gradients(executor, 3)
    assert found
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, expected[name])


class _Used(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks used free top".split()
    )


def _used_nbytes() -> int:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("glibc before 2.33 does not tell what is in use")
    mallinfo.restype = _Used
    mx.nd.waitall()
    return int(mallinfo().used)


@pytest.mark.parametrize(("dim", "channels", "shape"), [CASES[0], CASES[-1]])
def test_no_step_leaves_anything_behind(dim: int, channels: int, shape: tuple[int, ...]) -> None:
    """MXNet's operator leaves a kilobyte for each of the three parts."""
    executor = _executor(_joined(dim, channels, shape))
    _gradients(executor, 30)
    before = _used_nbytes()
    _gradients(executor, 200)
    assert _used_nbytes() - before < 200 * 1000


JOINS: dict[str, tuple[Callable[[Symbol], Symbol], list[tuple[str, str]]]] = {
    "of rows": (
        lambda x: mx.sym.concat(x, mx.sym.sin(x), dim=1),
        [("(0, 0)", "(4, 6)"), ("(0, 6)", "(4, 12)")],
    ),
    "of three dimensions": (lambda x: mx.sym.concat(*[mx.sym.expand_dims(x, 2)] * 2, dim=2), []),
    "by the first axis": (lambda x: mx.sym.concat(x, x, dim=0), []),
    "counted from the last axis": (lambda x: mx.sym.concat(x, x, dim=-1), []),
    "of float64": (
        lambda x: mx.sym.concat(*[mx.sym.cast(x, dtype="float64")] * 2, dim=1),
        [],
    ),
}


@pytest.mark.parametrize("name", JOINS)
def test_only_what_onednn_takes_apart_is_sliced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    join, expected = JOINS[name]
    net = mx.sym.MakeLoss(mx.sym.sum(join(mx.sym.tanh(mx.sym.Variable("data")))))
    options = {"grad_req": {"data": "write"}, "realisation": "packed"}
    nodes = trace(net, shapes={"data": (4, 6)}, **options).nodes
    (node,) = (node for node in nodes if node.op == "_backward_Concat")
    assert [(part["begin"], part["end"]) for part in slices(node, "cpu")] == expected
    assert slices(node, "gpu") == []
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    assert slices(node, "cpu") == []
