"""What a profile does otherwise on a GPU, as far as that is seen without one."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest

from helpers.networks import residual_net
from memplan.errors import CostError
from memplan.mxnet.profile import _without_readers, _workspace_nbytes, _workspaces
from memplan.planning.realisation import load, trace
from memplan.step.mirroring import mirror


def test_executors_have_a_measured_workspace_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it where a second process has no room there; on a CPU there is an estimate."""
    net, shapes = residual_net(units=1)
    traced = trace(net, shapes=shapes, realisation="explicit")
    measure = "memplan.mxnet.profile._workspace_nbytes"
    monkeypatch.setattr(measure, lambda *_: 7)
    assert _workspaces(load("explicit"), traced, mx.gpu(0)) == {"explicit": 7}
    assert _workspaces(load("explicit"), traced, mx.cpu()) == {}

    def failed(*_: Any) -> int:
        raise CostError("out of memory")

    monkeypatch.setattr(measure, failed)
    assert _workspaces(load("mirror"), traced, mx.gpu(0)) == {}


@pytest.mark.long
def test_the_workspace_of_an_executor() -> None:
    net, shapes = residual_net(units=1)
    for realisation in ("mirror", "explicit"):
        traced = trace(net, shapes=shapes, realisation=realisation)
        assert 0 < _workspace_nbytes(load(realisation), traced, mx.cpu()) < 64 << 20


def test_what_cudnn_cannot_leave_out_is_not_recomputed_for_timing() -> None:
    """A BatchNorm's copy that nobody reads: cuDNN's does not know kNullOp (seen on an H200)."""
    data = mx.sym.Variable("data")
    body = mx.sym.BatchNorm(mx.sym.FullyConnected(data, num_hidden=4), name="norm")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=2), name="softmax")
    traced = trace(net, shapes={"data": (2, 3)}, realisation="mirror")
    (norm,) = (op for op, node in enumerate(traced.nodes) if node.name == "norm")
    flagged = mirror(traced.graph, frozenset({norm}))
    assert not _without_readers(traced, flagged, mx.gpu(0)).recomputed
    assert _without_readers(traced, flagged, mx.cpu()).recomputed
