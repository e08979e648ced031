"""Where hybridize() would help, a block with a ``forward`` of its own needs a hybrid_forward."""

from __future__ import annotations

import re
import warnings
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU, SOFTMAX, trained, vectors
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.train.blocks.hybridized import call_hybridize

REMEDY = "make its forward a hybrid_forward, and call hybridize("


class Looping(gluon.HybridBlock):
    """Reads a parameter in every iteration of a loop."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(12, 12))

    def hybrid_forward(self, F: Any, x: Any, weight: Any) -> Any:  # noqa: N803
        def body(row: Any, state: Any) -> Any:
            state = F.tanh(F.dot(row.expand_dims(0), weight) + state)
            return state, state

        return F.contrib.foreach(body, x, F.zeros((1, 12)))[0].reshape((64, 12))


class Dropping(gluon.HybridBlock):
    """Reads last what it draws first."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.drop, self.inner = nn.Dropout(0.5), nn.Dense(12)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        early = self.drop(x)
        return F.tanh(self.drop(self.inner(x))) + early


class Two(gluon.HybridBlock):
    """Returns scores, and their probabilities, which train, too, if MXNet gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        scores = self.scores(x)
        return scores, F.SoftmaxOutput(scores, F.argmax(x, axis=1))


class InForward(gluon.HybridBlock):
    """Calls it in a ``forward``, which MXNet runs in Python."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        with self.name_scope():
            self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class InHybridForward(InForward):
    """Does as the messages say."""

    forward = gluon.HybridBlock.forward

    def hybrid_forward(self, _: Any, x: Any) -> Any:
        return self.inner(x)


def warned_of(net: Any) -> list[str]:
    net.initialize(ctx=CPU)
    x, y = vectors()
    net(x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trained(planned(net, strategy="store_all"), x, y)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    ("inner", "what"),
    [(Looping, "planned step runs its loop"), (Dropping, "draws random numbers in another order")],
)
def test_a_warning_says_what_makes_all_of_the_block_a_graph(inner: Any, what: str) -> None:
    (found,) = warned_of(InForward(inner()))
    assert "is not hybridized, and" in found
    assert what in found
    assert REMEDY in found
    net = InHybridForward(inner())
    net.hybridize()
    assert not warned_of(net)


def test_a_loop_beside_the_graphs_of_a_hybridized_block_has_a_warning_that_is_true() -> None:
    net = InForward(Looping())
    net.hybridize()
    net.inner.hybridize(False)
    (found,) = warned_of(net)
    assert "has a forward of its own, and a planned step runs its loop" in found
    assert REMEDY in found


def test_a_refusal_says_it_too() -> None:
    net, (x, y) = InForward(Two()), vectors()
    net.initialize(ctx=CPU)
    step = TrainStep(net, lambda outputs, labels: SOFTMAX(outputs[0], labels), keep_outputs=True)
    with pytest.raises(
        TraceError, match=f"does not train by it.*{re.escape(REMEDY)}inline_limit=0"
    ):
        step(x, y)


def test_a_graph_of_several_outputs_is_differentiated_alike_whatever_is_read_first() -> None:
    """So the limits say; of a forward of its own, and of no graph, last bits may differ."""

    class Three(gluon.HybridBlock):
        def __init__(self) -> None:
            super().__init__(prefix="net_")
            with self.name_scope():
                self.body = nn.Dense(20, in_units=12, activation="relu")
                self.heads = nn.HybridSequential()
                self.heads.add(*(nn.Dense(2, in_units=20) for _ in range(3)))

        def hybrid_forward(self, _: Any, x: Any) -> Any:
            body = self.body(x)
            return tuple(head(body) for head in self.heads)

    def gradient(plan: bool) -> Any:
        mx.random.seed(3)
        net, (x, _) = Three(), vectors()
        net.initialize(mx.init.Normal(1), ctx=CPU)
        net.hybridize()
        net = planned(net, strategy="store_all") if plan else net
        with autograd.record():
            first, second, third = net(x)
            loss = third.sin().sum() + second.cos().sum() + first.sin().sum()
        loss.backward()
        return net.body.weight.grad().asnumpy().tolist()

    assert gradient(True) == gradient(False)


def test_a_recurrent_cell_has_no_forward_of_its_own() -> None:
    """Gluon's counts steps and calls the usual one: a cell has its hybrid_forward already."""
    cell = gluon.rnn.LSTMCell(4)
    assert (
        call_hybridize(planned(cell)) == call_hybridize(gluon.rnn.GRUCell(4)) == "call hybridize()"
    )
