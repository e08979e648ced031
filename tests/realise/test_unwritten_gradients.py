"""Gradients that MXNet's kernels never write are zeros, as in the arrays that its executor has."""

from __future__ import annotations

from collections.abc import Callable

import mxnet as mx
import numpy as np
import pytest

from helpers.networks import dense, var
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
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
