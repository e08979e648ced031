"""Slopes of a PReLU at the ends of a hybridized block, by what stands between it and the outputs.

MXNet's graph writes over no gradient that autograd has: that of an output, which a sum hands on to
its terms in the same array, and what only computes hands on in another one. An output that nothing
reads has zeros for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import gradients
from helpers.blocks import CPU, vectors
from helpers.training_runs import differences
from memplan.errors import TraceError
from memplan.mxnet.gluon import TrainStep, planned

# Of the outputs of a PReLU and of another layer, and of what the block reads.
Ends = Callable[[Any, Any, Any, Any], Any]


def _with_more(f: Any, read: Any) -> Any:
    return read, f.relu(read)


RIGHT: dict[str, Ends] = {
    "a term": lambda f, y, z, x: x + y,
    "the first term": lambda f, y, z, x: z + y,
    "a term of a term": lambda f, y, z, x: x + (z + y),
    "a sum and a number": lambda f, y, z, x: 1 + x + y,
    "rounded": lambda f, y, z, x: f.contrib.round_ste(y),
    "the sign": lambda f, y, z, x: f.contrib.sign_ste(y),
    "beside a reader without a gradient": lambda f, y, z, x: x + f.BlockGrad(f.sin(y)) + y,
}
RIGHT_OF_TWO: dict[str, Ends] = {
    "one of two sums": lambda f, y, z, x: (x + y, z + x),
    "a sum and its numbers": lambda f, y, z, x: (x + y, f.BlockGrad(x + y)),
}
MULTIPLIED: dict[str, Ends] = {
    "a copy": lambda f, y, z, x: f.identity(y),
    "reshaped": lambda f, y, z, x: f.reshape(y, (-1,)),
    "flat": lambda f, y, z, x: f.Flatten(y),
    "whole": lambda f, y, z, x: f.slice_axis(y, axis=0, begin=0, end=None),
    "cast": lambda f, y, z, x: f.cast(y, "float32"),
    "a sum with broadcasting": lambda f, y, z, x: f.broadcast_add(x, y),
    "an add_n": lambda f, y, z, x: f.add_n(x, y),
    "a difference": lambda f, y, z, x: y - x,
    "a reshaped sum": lambda f, y, z, x: f.reshape(x + y, (-1,)),
    "a sum of what is reshaped": lambda f, y, z, x: x.reshape((-1,)) + y.reshape((-1,)),
    "both terms": lambda f, y, z, x: y + y,
    "in two terms": lambda f, y, z, x: x + (y + f.sin(y)),
}
MULTIPLIED_OF_TWO: dict[str, Ends] = {
    "the sum and the term": lambda f, y, z, x: (x + y, y),
    "the sum and more": lambda f, y, z, x: _with_more(f, x + y),
    "the term of two sums": lambda f, y, z, x: (x + y, z + y),
    "two outputs": lambda f, y, z, x: (y, y),
}
COPIED: dict[str, Ends] = {
    "an add_n of two that are trained": lambda f, y, z, x: f.add_n(y, x, z),
    "a sum of copies": lambda f, y, z, x: f.identity(y) + f.identity(z),
    "a sum of what is flat": lambda f, y, z, x: f.Flatten(y) + f.Flatten(z),
}
OF_TWO = RIGHT_OF_TWO | MULTIPLIED_OF_TWO
ENDS = RIGHT | MULTIPLIED | OF_TWO

# What a network reads of a child.
Reads = Callable[[Any, Any], Any]

READ_OF_TWO: dict[str, Reads] = {
    "both": lambda _, found: found[0] * 1.5 + found[1],
    "the first": lambda _, found: found[0] * 1.5,
    "the other": lambda _, found: found[1] * 1.5,
}

# Of a PReLU that reads what another layer of the network has computed, and what the child reads.
BEGINNINGS: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    "alone": (lambda f, y, x: f.sin(y) * 2, 1),
    "beside readers without gradients": (
        lambda f, y, x: f.sin(y) + f.BlockGrad(f.sin(x)) + f.zeros_like(x),
        1,
    ),
    "beside one whose output is dropped": (lambda f, y, x: (f.sin(y) * 2, f.sin(x)), 0.25),
    "beside another one": (lambda f, y, x: f.sin(y) + f.sin(x), 0.25),
    "beside one without a gradient that is dropped": (
        lambda f, y, x: (f.sin(y) * 2, f.BlockGrad(f.sin(x))),
        1,
    ),
}


class _Block(gluon.HybridBlock):
    def __init__(self, name: str) -> None:
        super().__init__(prefix="net_")
        self._ends = (ENDS | COPIED)[name]
        with self.name_scope():
            self.one, self.other = nn.Dense(8, in_units=8), nn.Dense(8, in_units=8)
            self.slopes = nn.PReLU()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self._ends(F, self.slopes(self.one(x)), self.other(x), x)


class _Beginning(gluon.HybridBlock):
    def __init__(self, begin: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__(prefix="net_")
        self._begin = begin
        with self.name_scope():
            self.slopes = nn.PReLU()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self._begin(F, self.slopes(x), x)


def _one(found: Any) -> Any:
    return found[0] if isinstance(found, (list, tuple)) else found


def _first(_: Any, found: Any) -> Any:
    return _one(found) * 1.5


def _gradients(name: str, way: str, *, read: Reads | None = None) -> dict[str, Any]:
    """The gradients of a block that ends so, or one of which a network ``read``s, by a ``way``."""
    block = _Block(name)
    if read is None:
        return _gradients_of(block, block, way)
    net = nn.HybridSequential(prefix="outer_")
    net.add(block, nn.HybridLambda(read))
    return _gradients_of(net, block, way)


def _gradients_of(net: Any, block: Any, way: str) -> dict[str, Any]:
    """The gradients of ``net``, whose ``block`` is hybridized."""
    mx.random.seed(3)
    if way != "one by one":
        block.hybridize()
    net.initialize(mx.init.Xavier(), ctx=CPU)
    x = mx.nd.array(np.random.default_rng(0).normal(0, 1, (16, 8)), ctx=CPU)
    if way == "step":
        TrainStep(net, lambda out, _: out.square().sum(), strategy="chen_sqrt")(x, x)
        return gradients(net)
    run = planned(net, realisation="packed", strategy="chen_sqrt") if way == "planned" else net
    with autograd.record():
        found = run(x)
        losses = [out.square() for out in (found if isinstance(found, (list, tuple)) else [found])]
    autograd.backward(losses)
    return gradients(net)


def _slopes(found: dict[str, Any]) -> Any:
    return next(array for name, array in found.items() if name.endswith("alpha"))


@pytest.mark.parametrize("name", ENDS)
def test_slopes_at_the_end_have_the_gradients_of_the_hybridized_block(name: str) -> None:
    ways = ("one by one", "hybridized", "planned")
    right, expected, found = (_gradients(name, way) for way in ways)
    assert not differences([expected], [found])
    factor = 1 if name in RIGHT | RIGHT_OF_TWO else 0.25
    np.testing.assert_allclose(_slopes(found), factor * _slopes(right), rtol=1e-4)


@pytest.mark.parametrize("name", [*RIGHT, "a copy", "reshaped", "an add_n", "both terms"])
def test_slopes_at_the_end_of_a_child_have_those_of_the_hybridized_child(name: str) -> None:
    expected, found = (_gradients(name, way, read=_first) for way in ("hybridized", "planned"))
    assert not differences([expected], [found])


@pytest.mark.parametrize("read", READ_OF_TWO)
@pytest.mark.parametrize("name", OF_TWO)
def test_an_output_of_a_child_counts_whether_or_not_it_is_read(name: str, read: str) -> None:
    ways = ("one by one", "hybridized", "planned")
    right, expected, found = (_gradients(name, way, read=READ_OF_TWO[read]) for way in ways)
    assert not differences([expected], [found])
    factor = 1 if name in RIGHT_OF_TWO else 0.25
    np.testing.assert_allclose(_slopes(found), factor * _slopes(right), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a term", _first),
        ("an add_n", _first),
        ("the sum and the term", READ_OF_TWO["the other"]),
        ("the sum and more", READ_OF_TWO["the first"]),
    ],
)
def test_a_step_has_the_slopes_of_a_hybridized_child(name: str, read: Reads) -> None:
    expected, found = (_gradients(name, way, read=read) for way in ("hybridized", "step"))
    assert not differences([expected], [found])


@pytest.mark.parametrize("name", BEGINNINGS)
def test_slopes_at_the_beginning_of_a_child_have_those_of_the_hybridized_child(name: str) -> None:
    begin, factor = BEGINNINGS[name]

    def run(way: str) -> dict[str, Any]:
        net, block = nn.HybridSequential(prefix="outer_"), _Beginning(begin)
        net.add(
            nn.Dense(8, in_units=8, activation="tanh", prefix="one_"),
            block,
            nn.HybridLambda(_first),
        )
        return _gradients_of(net, block, way)

    right, expected, found = map(run, ("one by one", "hybridized", "planned"))
    assert not differences([expected], [found])
    np.testing.assert_allclose(_slopes(found), factor * _slopes(right), rtol=1e-4)


@pytest.mark.parametrize("read", [None, _first])
@pytest.mark.parametrize("name", COPIED)
def test_copies_of_one_gradient_leave_slopes_right(name: str, read: Reads | None) -> None:
    """Where a hybridized block multiplies, which copies the gradient for each of the terms."""
    ways = ("one by one", "planned", "hybridized")
    right, found, other = (_slopes(_gradients(name, way, read=read)) for way in ways)
    np.testing.assert_allclose(found, right, rtol=1e-4)
    np.testing.assert_allclose(other, 0.25 * right, rtol=1e-4)


class _BesideAnother(gluon.HybridBlock):
    """A sum, whose gradient goes to a child and to another layer, in one array."""

    def __init__(self, child: _Block) -> None:
        super().__init__(prefix="outer_")
        self.child = child
        self.layer = nn.Dense(8, in_units=8, prefix="layer_")

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return F.sin(_one(self.child(x)) + self.layer(x))


@pytest.mark.parametrize("name", ["a copy", "two outputs"])
def test_another_reader_of_the_gradient_of_a_child_leaves_slopes_right(name: str) -> None:
    """Where the hybridized child multiplies, whose graph has an array of its own for it."""

    def slopes(way: str) -> Any:
        block = _Block(name)
        return _slopes(_gradients_of(_BesideAnother(block), block, way))

    right, found, other = map(slopes, ("one by one", "planned", "hybridized"))
    np.testing.assert_allclose(found, right, rtol=1e-4)
    np.testing.assert_allclose(other, 0.25 * right, rtol=1e-4)


class _OfTwo(gluon.HybridBlock):
    def __init__(self) -> None:
        super().__init__(prefix="two_")
        with self.name_scope():
            self.slopes = nn.PReLU()

    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        return F.sin(self.slopes(x)) + F.sin(y)


class _CallsOfTwo(gluon.HybridBlock):
    """Has a child that gets one array twice, or a copy of it."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__(prefix="outer_")
        self._copies = copies
        self.layer, self.child = nn.Dense(8, in_units=8, prefix="layer_"), _OfTwo()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.layer(x)
        return F.sin(self.child(x, F.identity(x) if self._copies else x))


def test_slopes_that_read_what_a_child_gets_twice_are_refused() -> None:
    """Whether others read the same of its two variables is not known."""
    net = _CallsOfTwo(copies=False)
    message = r"block 'two' gets 'layer_fwd' twice.*'two_prelu0_fwd'.*F\.identity"
    with pytest.raises(TraceError, match=message):
        _gradients_of(net, net.child, "planned")
    for parameter in net.child.collect_params().values():
        parameter.grad_req = "null"
    assert _gradients_of(net, net.child, "planned")


def test_slopes_of_a_child_that_gets_a_copy_have_the_gradients_of_the_hybridized_child() -> None:
    def run(way: str) -> dict[str, Any]:
        net = _CallsOfTwo(copies=True)
        return _gradients_of(net, net.child, way)

    assert not differences([run("hybridized")], [run("planned")])


def test_explicit_plans_refuse_a_term_of_a_block_s_output() -> None:
    block, x = _Block("a term"), vectors()[0]
    block.hybridize()
    block.initialize(mx.init.Xavier(), ctx=CPU)
    net = planned(block, realisation="explicit", strategy="chen_sqrt")
    message = r"prelu.*would write over the gradient.*'packed'"
    with pytest.raises(TraceError, match=message), autograd.record():
        net(x[:, :8])
