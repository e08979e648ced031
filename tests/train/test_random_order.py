"""A warning tells of a block that draws random numbers otherwise than its plan, and only then."""

from __future__ import annotations

import re
import warnings
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import losses_of_two_steps
from helpers.blocks import CPU, SOFTMAX, vectors
from memplan.mxnet.gluon import TrainStep, planned

OPTIONS: dict[str, Any] = {"strategy": "store_all", "realisation": "packed"}
MOVED, MISSING = "draws random numbers in another order, for", "draws no random numbers for"


class EarlyAndLate(gluon.HybridBlock):
    """One layer draws twice: what it draws first is read ``last``, or it is not."""

    def __init__(self, last: bool, rate: float = 0.5) -> None:
        super().__init__()
        self.last = last
        with self.name_scope():
            self.drop, self.inner = nn.Dropout(rate), nn.Dense(12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        early = self.drop(x)
        late = self.drop(self.inner(x))
        return F.tanh(late) + early if self.last else early + F.tanh(late)


class Two(gluon.HybridBlock):
    """Of what it draws it returns ``both`` masked arrays, or the first that it did not draw."""

    def __init__(self, both: bool, rate: float = 0.5) -> None:
        super().__init__()
        self.both = both
        with self.name_scope():
            self.drop, self.inner = nn.Dropout(rate), nn.Dense(12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        dropped, result = self.drop(x), F.tanh(self.inner(x))
        return (result, dropped) if self.both else (result, x)


class Paused(Two):
    """Calls its dropout, and reads nothing of that, in predict mode unless it is ``both``."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        with autograd.pause(train_mode=self.both):
            self.drop(x)
        return F.tanh(self.inner(x))


class TwoGenerators(EarlyAndLate):
    """Draws numbers of two generators in another order than its graph, and each in the same."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        early = self.drop(x)
        rows = F.sample_multinomial(F.softmax(x), dtype="float32").expand_dims(1)
        return F.broadcast_add(F.tanh(self.inner(x)), rows) + early


class Behind(gluon.HybridBlock):
    """Reads the first output of ``inner``, or its only one, and draws a mask for that."""

    def __init__(self, inner: gluon.HybridBlock) -> None:
        super().__init__()
        with self.name_scope():
            self.inner, self.drop, self.scores = inner, nn.Dropout(0.5), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.inner(x)
        return self.scores(self.drop(x[0] if isinstance(x, tuple | list) else x))


class CallingPast(gluon.HybridBlock):
    """Calls layers of a block by themselves, and uses what one of them computes, or ``both``."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        with self.name_scope():
            self.layers = nn.HybridSequential()
            self.layers.add(EarlyAndLate(True), EarlyAndLate(True))

    def hybrid_forward(self, _: Any, x: Any) -> Any:
        first = self.layers[0](x)
        return self.layers[1](first if self.both else x)


class Unrolled(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        cell = gluon.rnn.LSTMCell(12)
        with self.name_scope():
            self.cell = gluon.contrib.rnn.VariationalDropoutCell(cell, 0.3, 0.3, 0.3)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        steps = F.stack(x, x, x, axis=1)
        return self.cell.unroll(3, steps, layout="NTC", merge_outputs=False)[0][-1]


def losses_of(make: Any, hybridized: str, plan: bool) -> list[Any]:
    mx.random.seed(3)
    x, y = vectors()
    net = Behind(make())
    net.initialize(mx.init.Xavier(), ctx=CPU)
    net(x)
    if hybridized:
        parts = {"all": net, "a child": net.inner, "layers": net.inner._children.get("layers")}
        parts[hybridized].hybridize()
    mx.random.seed(4)
    return losses_of_two_steps(planned(net, **OPTIONS) if plan else net, x, y)


@pytest.mark.parametrize(
    ("make", "hybridized", "expected"),
    [
        (lambda: EarlyAndLate(True), "", MOVED),
        (lambda: EarlyAndLate(True), "a child", None),
        (lambda: EarlyAndLate(False), "", None),
        (lambda: EarlyAndLate(True, 0), "", None),
        (lambda: TwoGenerators(True), "", None),
        (lambda: Two(True), "", MISSING),
        (lambda: Two(True), "a child", MISSING),
        (lambda: Two(True), "all", None),
        (lambda: Two(True, 0), "", None),
        (lambda: Two(False), "", MISSING),
        (lambda: Two(False), "a child", None),
        (lambda: Paused(True), "", MISSING),
        (lambda: Paused(False), "", None),
        (lambda: CallingPast(True), "", MOVED),
        (lambda: CallingPast(True), "layers", None),
        (lambda: CallingPast(False), "layers", MISSING),
        (Unrolled, "", MOVED),
        (Unrolled, "all", None),
    ],
)
def test_a_warning_tells_of_other_draws(make: Any, hybridized: str, expected: str | None) -> None:
    losses = losses_of(make, hybridized, False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        same = losses_of(make, hybridized, True) == losses
    texts = [str(w.message) for w in found if "a planned step draws" in str(w.message)]
    assert same is (expected is None)
    assert len(texts) == (expected is not None)
    assert all(re.search(expected or "", text) for text in texts)


class DrawingLoss(gluon.HybridBlock):
    """Draws two masks for what it reads, of which the graph has the second first."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.inner = EarlyAndLate(True)

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return SOFTMAX(self.inner(x), y)


def with_and_without(net: Any, loss_of: Any, *, hybridized: list[Any]) -> tuple[bool, list[str]]:
    """Whether losses are the same in a TrainStep, and what it warns of."""
    (x, y), runs = vectors(), []
    parts = [part for part in (net, loss_of) if isinstance(part, gluon.Block)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for plan in (False, True):
            mx.random.seed(3)
            for part in parts:
                part.hybridize(False)
                part.initialize(mx.init.Xavier(), ctx=CPU, force_reinit=True)
            loss_of(net(x), y)
            for part in hybridized:
                part.hybridize()
            mx.random.seed(4)
            step = TrainStep(net, loss_of, **OPTIONS) if plan else None
            losses: list[Any] = []
            for _ in range(2):
                with autograd.record():
                    loss = loss_of(net(x), y) if step is None else step(x, y)
                losses += loss.asnumpy().tolist()
            runs.append(losses)
    return runs[0] == runs[1], [str(w.message) for w in found if "a planned step" in str(w.message)]


@pytest.mark.parametrize("net_is", [False, True])
@pytest.mark.parametrize("loss_is", [False, True])
def test_a_hybridized_loss_draws_in_the_order_of_its_graph(loss_is: bool, net_is: bool) -> None:
    """One that is not is warned of, whatever the block is."""
    net, loss = EarlyAndLate(False), DrawingLoss()
    hybridized = [part for part, is_it in ((net, net_is), (loss, loss_is)) if is_it]
    are_same, texts = with_and_without(net, loss, hybridized=hybridized)
    assert are_same is loss_is
    assert [MOVED in text for text in texts] == [True] * (not loss_is)


class Heads(gluon.HybridBlock):
    """Scores twice, with a mask for each."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.drop, self.scores = nn.Dropout(0.5), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(self.drop(x)), self.scores(self.drop(F.tanh(x)))


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize(
    ("read", "expected"), [([0, 1], None), ([1, 0], MOVED), ([0], MISSING), ([1], MISSING)]
)
def test_a_loss_that_reads_other_outputs_draws_others(
    read: list[int], expected: str | None, hybridized: bool
) -> None:
    def loss_of(outputs: Any, label: Any) -> Any:
        losses = [SOFTMAX(outputs[k], label) for k in read]
        return losses[0] if len(losses) == 1 else losses[0] + 2 * losses[1]

    net = Heads()
    are_same, texts = with_and_without(net, loss_of, hybridized=[net] * hybridized)
    assert are_same is (expected is None)
    assert len(texts) == (expected is not None)
    assert all(re.search(expected or "", text) for text in texts)
