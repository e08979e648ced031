"""Equal operators of one graph, of which MXNet computes and differentiates one, and copies that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU
from memplan.errors import TraceError, UsageError
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "store_all", "realisation": "packed"}
DRAW = np.random.default_rng(0)
X = mx.nd.array(DRAW.normal(size=(8, 6)), ctx=CPU)
Y = mx.nd.array(DRAW.integers(0, 3, 8), ctx=CPU)


class Of(gluon.HybridBlock):
    """The graph of what a function computes of scores and labels."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.scores, self.compute = nn.Dense(3), compute
        self.hybridize()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return self.compute(F, self.scores(x), y)


class Within(gluon.HybridBlock):
    """What a function computes, in no graph, of all that a graph returns."""

    def __init__(self, child: gluon.HybridBlock, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.child, self.compute = child, compute

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return self.compute(F, *self.child(x, y))


class OfSame(gluon.HybridBlock):
    """A graph that gets one array twice, in two variables."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.child = nn.Dense(3), Pair()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        scores = self.scores(x)
        return self.child(scores, scores, y)


class Pair(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        self.hybridize()

    def hybrid_forward(self, F: Any, one: Any, other: Any, y: Any) -> Any:  # noqa: N803
        return one * 2, F.SoftmaxOutput(one, y), F.SoftmaxOutput(other, y)


def _two(F: Any, scores: Any, y: Any) -> Any:  # noqa: N803
    return F.SoftmaxOutput(scores, y), F.SoftmaxOutput(scores, y)


def _three(F: Any, scores: Any, y: Any) -> Any:  # noqa: N803
    return scores * 2, *_two(F, scores, y)


def _softmax(F: Any, scores: Any, y: Any) -> Any:  # noqa: N803
    return F.softmax(scores), F.softmax(scores), y * 2


def _unmerged(F: Any, scores: Any, y: Any) -> Any:  # noqa: N803
    return scores * 2, F.SVMOutput(scores, y), F.SVMOutput(scores, y)


def _other_first(F: Any, one: Any, other: Any) -> Any:  # noqa: N803
    return F.tanh(other), one


def _gradients(make: Callable[[], Any], way: str, read: Sequence[int]) -> list[np.ndarray]:
    """Those of a step of what ``make`` makes whose loss reads some outputs, or is these."""
    mx.random.seed(1)
    block = make()
    block.initialize(mx.init.Uniform(0.7), ctx=CPU)
    block(X, Y)

    def loss(outputs: Any, _: Any = None) -> Any:
        return [(k + 2) * outputs[k] * outputs[k] if way != "heads" else outputs[k] for k in read]

    if way in ("mxnet", "planned"):
        block = block if way == "mxnet" else planned(block, **OPTIONS)
        with autograd.record():
            losses = loss(block(X, Y))
        autograd.backward(losses)
    else:
        TrainStep(block, loss, keep_outputs=way == "kept", **OPTIONS)((X, Y), Y)
    return [parameter.grad().asnumpy() for parameter in block.collect_params().values()]


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Of(_three),
        lambda: Of(_two),
        lambda: Of(_softmax),
        lambda: Of(_unmerged),
        lambda: Within(Of(_two), _other_first),
        lambda: Within(Of(_two), lambda _, *outputs: outputs[::-1]),
        OfSame,
    ],
)
def test_a_planned_block_differentiates_them_as_mxnet_does(
    make: Callable[[], Any], read: Sequence[int]
) -> None:
    expected = _gradients(make, "mxnet", read)
    assert any(gradient.any() for gradient in expected)
    assert all(map(np.array_equal, expected, _gradients(make, "planned", read)))


def test_a_step_whose_losses_they_are_differentiates_one() -> None:
    expected = _gradients(lambda: Of(_three), "mxnet", (1, 2))
    assert all(map(np.array_equal, expected, _gradients(lambda: Of(_three), "heads", (1, 2))))


class Few(gluon.HybridBlock):
    """``ntimes`` equal operators and a loss operator: as few as MXNet runs one by one, or more."""

    def __init__(self, ntimes: int, *, reads_them: bool) -> None:
        super().__init__()
        self.w = self.params.get("w", shape=(8, 3))
        self.ntimes, self.reads_them = ntimes, reads_them
        self.hybridize()

    def hybrid_forward(self, F: Any, x: Any, y: Any, w: Any) -> Any:  # noqa: N803
        read = w * 1.5 if self.reads_them else w
        return *(w * 1.5 for _ in range(self.ntimes)), F.SoftmaxOutput(read, y)


@pytest.mark.parametrize("way", ["planned", "kept", "not kept"])
@pytest.mark.parametrize("reads_them", [False, True])
@pytest.mark.parametrize("ntimes", [1, 2])
def test_mxnet_counts_them_once_and_their_copies(ntimes: int, reads_them: bool, way: str) -> None:
    def make() -> Any:
        return Few(ntimes, reads_them=reads_them)

    is_whole = ntimes > 1
    if (way == "not kept") == is_whole:
        with pytest.raises((TraceError, UsageError), match="the loss does not read op"):
            _gradients(make, way, (0,))
        return
    assert np.array_equal(_gradients(make, "mxnet", (0,)), _gradients(make, way, (0,)))


class Passed(gluon.HybridBlock):
    """Returns its input as it is, ``ntimes``, beside a loss operator."""

    def __init__(self, ntimes: int) -> None:
        super().__init__()
        self.w = self.params.get("w", shape=(8, 3))
        self.ntimes = ntimes
        self.hybridize()

    def hybrid_forward(self, F: Any, x: Any, y: Any, w: Any) -> Any:  # noqa: N803
        return F.sin(w), *[x] * self.ntimes, F.SoftmaxOutput(w, y)


@pytest.mark.parametrize("way", ["planned", "kept"])
@pytest.mark.parametrize("ntimes", [1, 2])
def test_what_is_returned_as_it_was_got_is_no_operator_but_once_more_is(
    ntimes: int, way: str
) -> None:
    def make() -> Any:
        return Passed(ntimes)

    if ntimes == 1:
        with pytest.raises((TraceError, UsageError), match="the loss does not read op"):
            _gradients(make, way, (0,))
        return
    assert np.array_equal(_gradients(make, "mxnet", (0,)), _gradients(make, way, (0,)))
