"""By which loss operators MXNet trains that the loss does not read: by those of its graphs.

What a graph is does not depend on the names of ops: a step trains by the same ones, or is refused.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Tower(gluon.HybridBlock):
    """What a loss reads, and probabilities."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.body, self.scores = nn.Dense(5, activation="tanh"), nn.Dense(3)

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        hidden = self.body(x)
        return hidden, F.SoftmaxOutput(self.scores(hidden), y)


class Zoo(gluon.HybridBlock):
    """As those of the model zoo: its features have no prefix of their own, or were imported."""

    def __init__(self, *, imported: bool = False) -> None:
        super().__init__()
        with self.name_scope():
            self.features = _imported() if imported else nn.HybridSequential(prefix="")
            self.output = nn.Dense(3)
            if not imported:
                self.features.add(nn.Dense(5, activation="tanh"), nn.Dense(5))
                self.features.hybridize()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        hidden = self.features(x)
        return hidden, F.SoftmaxOutput(self.output(hidden), y)


def _imported() -> gluon.SymbolBlock:
    data = mx.sym.Variable("data")
    hidden = mx.sym.tanh(mx.sym.FullyConnected(data, num_hidden=5, name="one"))
    hidden = mx.sym.relu(mx.sym.FullyConnected(hidden, num_hidden=5, name="other"))
    return gluon.SymbolBlock(hidden, data)


class Twice(gluon.HybridBlock):
    """Calls a graph twice, so that all ops of both calls have the same names."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.tower = Tower()
        self.tower.hybridize()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return *self.tower(x, y), *self.tower(2 * x, y)


class Head(gluon.HybridBlock):
    """Probabilities of scores, in ops that have the names of none of the blocks around."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Dense(3)

    def hybrid_forward(self, F: Any, hidden: Any, y: Any) -> Any:  # noqa: N803
        return F.SoftmaxOutput(F.tanh(self.scores(hidden)), y)


class Unscoped(gluon.HybridBlock):
    """Its children have no names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Dense(5, activation="tanh"), Head()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        hidden = self.body(x)
        return hidden, self.head(hidden, y)


class OwnForward(Unscoped):
    """MXNet runs the forward of it in Python, whose layers are graphs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.hybridize()

    def forward(self, x: Any, y: Any) -> Any:
        hidden = self.body(x)
        return hidden, self.head(hidden, y)


class Around(gluon.HybridBlock):
    """A graph within a block that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Unscoped()
        self.child.hybridize()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        hidden, probabilities = self.child(x, y)
        return hidden * 2, probabilities


class Small(gluon.HybridBlock):
    """Two operators, which MXNet runs one by one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        with self.name_scope():
            self.scores = nn.Dense(3)
        self.hybridize(**options)

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        scores = self.scores(x)
        return scores, F.SoftmaxOutput(scores, y)


class Behind(gluon.HybridBlock):
    """A loss that only what is not read of a graph reads: MXNet goes through it all the same."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.loss, self.tower = nn.Dense(4), Tower()
        self.tower.hybridize()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        others = F.sum(F.MakeLoss(F.square(self.loss(x))), axis=1)
        return self.tower(x, F.BlockGrad(y + 0 * others))


class Boxes(gluon.HybridBlock):
    """Its targets have gradients of zeros, whatever MXNet takes them to be computed of."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        with self.name_scope():
            self.body, self.classes, self.offsets = nn.Dense(64), nn.Conv2D(4, 1), nn.Conv2D(8, 1)

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        hidden = F.reshape(self.body(F.slice_axis(x, axis=0, begin=0, end=1)), (1, 4, 4, 4))
        classes, offsets = self.classes(hidden), self.offsets(hidden)
        if self.operator == "MultiBoxTarget":
            anchors = F.contrib.MultiBoxPrior(hidden, sizes=(0.3, 0.5), ratios=(1,))
            boxes = F.reshape(F.slice_axis(F.sigmoid(y), axis=0, begin=0, end=5), (1, 1, 5))
            scores = F.reshape(classes, (0, 2, -1))
            return classes + 1, offsets, *F.contrib.MultiBoxTarget(anchors, boxes, scores)
        size = F.ones((1, 3)) * 4
        proposed = getattr(F.contrib, self.operator)(
            F.softmax(classes, axis=1),
            offsets,
            size,
            scales=(2,),
            ratios=(0.5, 1),
            rpn_pre_nms_top_n=20,
            rpn_post_nms_top_n=5,
            feature_stride=1,
        )
        return classes, offsets, proposed


def _first(outputs: Any, _: Any) -> Any:
    return (outputs[0] * outputs[0]).mean()


def _gradients(make: Callable[[], Any], way: str) -> list[Any]:
    """Those of a step of the block that ``make`` makes, in MXNet or by a plan."""
    mx.random.seed(1)
    block = make()
    block.initialize(mx.init.Uniform(0.7), ctx=CPU)
    block(X, Y)
    if way in ("mxnet", "planned"):
        block = block if way == "mxnet" else planned(block, **OPTIONS)
        with autograd.record():
            loss = _first(block(X, Y), Y)
        loss.backward()
    else:
        TrainStep(block, _first, keep_outputs=way == "kept", **OPTIONS)((X, Y), Y)
    return [parameter.grad().asnumpy() for parameter in block.collect_params().values()]


READ = {"planned": False, "not kept": True, "kept": False}
WHOLE = {"planned": True, "not kept": False, "kept": True}
ALL = {"planned": True, "not kept": True, "kept": True}


@pytest.mark.parametrize("way", list(ALL))
@pytest.mark.parametrize(
    ("make", "trains"),
    [
        (Zoo, READ),
        (lambda: Zoo(imported=True), READ),
        (Twice, dict.fromkeys(ALL, False)),  # by the first call, not by the second
        (OwnForward, READ),
        (Around, WHOLE),
        (Behind, WHOLE),
        (Small, READ),
        (lambda: Small(inline_limit=0), WHOLE),
        (lambda: Small(static_alloc=True), WHOLE),
        *((lambda name=name: Boxes(name), ALL) for name in ("MultiBoxTarget", "Proposal")),
        (lambda: Boxes("MultiProposal"), ALL),
    ],
)
def test_a_step_trains_by_them_as_mxnet_does_or_not_at_all(
    make: Callable[[], Any], trains: dict[str, bool], way: str
) -> None:
    expected = _gradients(make, "mxnet")
    assert any(gradient.any() for gradient in expected)
    if not trains[way]:
        with pytest.raises((TraceError, UsageError), match="the loss does not read op"):
            _gradients(make, way)
        return
    found = _gradients(make, way)
    assert all(map(np.array_equal, expected, found))


def test_a_loss_that_reads_less_of_a_graph_than_before_is_refused() -> None:
    """The block is not called anew where only the loss is: its graph is known."""
    block, reads = Tower(), [0, 1]
    block.initialize(mx.init.Uniform(0.7), ctx=CPU)
    block.hybridize()

    def loss(outputs: Any, _: Any) -> Any:
        return sum(outputs[place].square().mean() for place in reads)

    step = TrainStep(block, loss, **OPTIONS)
    step((X, Y), Y)
    del reads[1]
    with pytest.raises(TraceError, match=r"the loss does not read op .* only with keep_outputs"):
        step((X, Y), Y)
