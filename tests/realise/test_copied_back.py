"""What oneDNN computes beside what MXNet lets it write over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import SHAPE, N, activated, pictures
from memplan.mxnet.realise.estimate import workspace_estimate
from memplan.mxnet.realise.estimate.copied_back import copied_back_nbytes
from memplan.mxnet.realise.estimate.workspace_estimate import executor_nbytes, packed_nbytes
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol


def _traced(net: Symbol, shape: tuple[int, ...] = SHAPE, **options: Any) -> Trace:
    net = mx.sym.MakeLoss(mx.sym.mean(net))
    options = {"grad_req": {"data": "write"}, "realisation": "mirror", **options}
    return trace(net, shapes={"data": shape}, **options)


def _copied_back(net: Symbol, shape: tuple[int, ...] = SHAPE, **options: Any) -> int:
    traced = _traced(net, shape, **options)
    return max(copied_back_nbytes(traced.graph, traced.nodes))


def _pooled(data: Symbol, kernel: int, **options: Any) -> Symbol:
    return mx.sym.Pooling(data, kernel=(kernel, kernel), pool_type="max", **options)


BY_ONEDNN: dict[str, Callable[[Symbol], Symbol]] = {
    "dense": lambda x: mx.sym.FullyConnected(x, num_hidden=4, flatten=False),
    "activation": activated,
    "gelu": lambda x: mx.sym.LeakyReLU(x, act_type="gelu"),
    "softmax": mx.sym.softmax,
    "softmax, last axis": lambda x: mx.sym.softmax(x, axis=3),
    "log_softmax": mx.sym.log_softmax,
    # In the place of the gradient of what it remembers, which is zeros and as large as its output.
    "pooling": lambda x: _pooled(x, 3, pad=(1, 1)),
    "LRN": lambda x: mx.sym.LRN(x, nsize=3),
}
BY_MXNET: dict[str, Callable[[Symbol], Symbol]] = {
    "softmax, channels": lambda x: mx.sym.softmax(x, axis=1),
    "softmax, warm": lambda x: mx.sym.softmax(x, temperature=1.0),
    "log_softmax, rows": lambda x: mx.sym.log_softmax(x, axis=2),
    "softmax, five dimensions": lambda x: mx.sym.softmax(mx.sym.expand_dims(x, axis=1)),
    "softmax, dtype": lambda x: mx.sym.softmax(x, dtype="float32"),
    "PReLU": lambda x: mx.sym.LeakyReLU(x, act_type="prelu"),
    "selu": lambda x: mx.sym.LeakyReLU(x, act_type="selu"),
    "softsign": lambda x: mx.sym.Activation(x, act_type="softsign"),
    "smaller pooling": lambda x: _pooled(x, 2, stride=(2, 2)),
    "mean of pictures": lambda x: mx.sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="avg"),
}


def _of_product(operator: Callable[[Symbol], Symbol]) -> Symbol:
    """Of a product, which has nothing of oneDNN's, and whose data nobody reads later."""
    return operator(mx.sym.broadcast_mul(pictures(), mx.sym.Variable("by", shape=(1, 16, 1, 1))))


@pytest.mark.parametrize("name", BY_ONEDNN)
def test_what_onednn_computes_is_copied_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    net = _of_product(BY_ONEDNN[name])
    assert _copied_back(net) == N
    assert _copied_back(net, type_dict={"data": "float64"}) == 0
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    assert _copied_back(net) == 0


@pytest.mark.parametrize("name", BY_MXNET)
def test_what_mxnet_computes_is_not(name: str) -> None:
    assert _copied_back(_of_product(BY_MXNET[name])) == 0


def test_nothing_is_copied_over_what_another_op_reads_later() -> None:
    """The relu's gradient reads its output, which that of the layer behind it could overwrite."""
    behind = []
    for activation in (mx.sym.relu, mx.sym.sin):  # the gradient of a sin reads its input instead
        net = mx.sym.FullyConnected(activation(pictures()), num_hidden=4, flatten=False)
        behind.append(_copied_back(net))
    assert behind == [0, N]


@pytest.mark.parametrize(
    ("op", "times"),
    [
        (lambda data: mx.sym.FullyConnected(data, num_hidden=4, flatten=False), 1),
        (mx.sym.softmax, 1),
        (mx.sym.log_softmax, 1),
        (mx.sym.tanh, 0),
    ],
)
def test_gradients_of_onednns_are_computed_beside_what_they_overwrite(
    monkeypatch: pytest.MonkeyPatch, op: Callable[[Symbol], Symbol], times: int
) -> None:
    """The largest array is that of ``op``; what it reads nobody else does."""
    net = mx.sym.MakeLoss(mx.sym.mean(op(pictures() * mx.sym.Variable("by", shape=(2, 8, 64)))))
    traced = trace(net, shapes={"data": (2, 8, 64)}, realisation="packed")
    monkeypatch.setattr(workspace_estimate, "code_nbytes", lambda *_: 0)
    assert packed_nbytes(traced.graph, traced.nodes) == times * 3 * (4 * 2 * 8 * 64) // 2


@pytest.mark.parametrize("realisation", ["packed", "mirror"])
def test_what_is_computed_beside_its_place_leaves_no_holes_if_it_is_large(
    monkeypatch: pytest.MonkeyPatch, realisation: str
) -> None:
    """Of so many bytes, or more, which the C library gives back to the system at once."""
    monkeypatch.setattr(workspace_estimate, "code_nbytes", lambda *_: 0)
    monkeypatch.setattr(workspace_estimate, "further_calls", lambda *_: [])
    traced = _traced(_of_product(mx.sym.softmax), realisation=realisation)
    found = []
    for most_kept in (N + 1, N):
        monkeypatch.setattr(workspace_estimate, "MOST_KEPT", most_kept)
        if realisation == "packed":
            found.append(packed_nbytes(traced.graph, traced.nodes))
        else:
            found.append(executor_nbytes(traced.graph, traced.nodes, leaves_holes=True)[0])
    assert found == [N + (N // 2 if realisation == "packed" else N), N]
