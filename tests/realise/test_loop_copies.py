"""Gradients of what a loop reads in every iteration: those that MXNet computes without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from memplan.errors import TraceError
from memplan.mxnet.gluon import planned

Read = Callable[[Any, Any, Any], Any]


def numpy(op: Any, name: str, read: Any) -> Any:
    call = getattr(mx.np if op is mx.nd else op.np, name)
    return call(read.as_np_ndarray(), axis=1).as_nd_ndarray()


def traces(op: Any, read: Any) -> Any:
    """A row of the traces of matrices."""
    found = (mx.np if op is mx.nd else op.np).trace(read.as_np_ndarray())
    return op.expand_dims(found.as_nd_ndarray(), axis=0)


def where(op: Any, state: Any, *chosen: Any) -> Any:
    """What is ``chosen`` by signs of more dimensions, over which MXNet sums gradients."""
    signs = op.stack(state, state * -2).as_np_ndarray() > 0
    arrays = [one if isinstance(one, float) else one.as_np_ndarray() for one in chosen]
    found = (mx.np if op is mx.nd else op.np).where(signs, *arrays)
    return op.sum(found.as_nd_ndarray(), axis=0)


# What the body computes of a state and of something that is the same in every iteration.
READ: dict[str, Read] = {
    "a sum with it": lambda op, state, read: state + read,
    "it first in a sum": lambda op, state, read: read + op.tanh(state * 2) * 0.5,
    "clip": lambda op, state, read: state * op.clip(read, -9, 9),
    "reverse": lambda op, state, read: state * op.reverse(read, axis=0),
    "split_v2": lambda op, state, read: state * op.concat(*op.split_v2(read, 2, axis=1), dim=1),
    "amp_cast": lambda op, state, read: state * op.amp_cast(read, dtype="float32"),
    "cumsum": lambda op, state, read: state * op.cumsum(read, axis=0),
    "mean": lambda op, state, read: op.broadcast_mul(state, op.mean(read, axis=1, keepdims=True)),
    "np.flip": lambda op, state, read: state * numpy(op, "flip", read),
    "np.diff": lambda op, state, read: op.broadcast_mul(
        state, op.sum(numpy(op, "diff", read), axis=1, keepdims=True)
    ),
    "np.trace": lambda op, state, read: op.broadcast_mul(state, traces(op, read)),
    "np.where": lambda op, state, read: where(op, state, read, state),
    "np.where, second": lambda op, state, read: where(op, state, state, read),
    "gemm2": lambda op, state, read: op.linalg_gemm2(
        op.linalg_gemm2(state, read, transpose_b=True), state
    ),
    "a straight-through sign of": lambda op, state, read: (
        state * op.clip(op.contrib.sign_ste(read), -9, 9)
    ),
    "indices": lambda op, state, read: op.broadcast_add(state, op.sum(op.take(state, read))),
    "an operator that adds": lambda op, state, read: state * op.relu(read),
    "twice": lambda op, state, read: (state + read) * read,
}

# In a while_loop MXNet's own gradients of these write beyond their memory, without a plan, too.
IN_FOREACH: dict[str, Read] = {
    "np.where or a number": lambda op, state, read: where(op, state, read, 1.5),
    "a number or np.where": lambda op, state, read: where(op, state, 1.5, read),
}


class Looping(gluon.HybridBlock):
    """A loop of a ``kind``, in a loop or a branch ``around`` it if there is one."""

    def __init__(self, kind: str, read: str, around: str = "", begin: str = "computed") -> None:
        super().__init__(prefix="net_")
        self.kind, self.around, self.begin = kind, around, begin
        self.read = (READ | IN_FOREACH)[read]
        with self.name_scope():
            init = mx.init.Uniform(0.9)
            self.first = self.params.get("first", shape=(4,), init=init)
            self.other = self.params.get("other", shape=(4,), init=init)

    def hybrid_forward(self, F: Any, x: Any, first: Any, other: Any) -> Any:  # noqa: N803
        read = F.broadcast_mul(x, other)
        if self.read is READ["np.trace"]:
            read = F.expand_dims(read, axis=0)

        def step(state: Any) -> Any:
            return F.tanh(F.broadcast_mul(self.read(F, state, read), first))

        def loop(begin: Any) -> Any:
            if self.kind == "foreach":
                found, last = F.contrib.foreach(
                    lambda part, state: (F.broadcast_add(state, part), step(state)), x, begin
                )
                return F.sum(found, axis=0) * 0.1 + last
            _, (_, last) = F.contrib.while_loop(
                lambda i, state: i < 3,
                lambda i, state: (state * 2, (i + 1, step(state))),
                (F.zeros((1,)), begin),
                max_iterations=3,
            )
            return last

        begin = x if self.begin == "data" else F.broadcast_mul(x, first)
        if self.around == "while_loop":
            _, (_, last) = F.contrib.while_loop(
                lambda i, state: i < 2,
                lambda i, state: (state * 2, (i + 1, loop(begin) + state * 0.5)),
                (F.zeros((1,)), F.broadcast_mul(x, other)),
                max_iterations=2,
            )
            return last
        if self.around == "cond":
            return F.contrib.cond(
                F.sum(x * x) > 0, lambda: loop(begin), lambda: F.broadcast_mul(begin, first * other)
            )
        return loop(begin)


# The output and the next state, of a part of data, the state and an array from outside: the
# gradients of some are those of an output or state, handed on as they are.
HANDED_ON: dict[str, Callable[..., Any]] = {
    "a running sum": lambda op, part, state, read: (part * read, state + part * read),
    "a sum of the state and the part": lambda op, part, state, read: (state * 2, state + part),
    "sums as outputs": lambda op, part, state, read: (part + read, op.tanh(state)),
    "a sum of the state as output": lambda op, part, state, read: (state + part * read, part * 2),
    "several sums": lambda op, part, state, read: (part + state, state + part + read),
    "a straight-through sign": lambda op, part, state, read: (
        op.tanh(state),
        op.contrib.sign_ste(part),
    ),
}


class Handing(gluon.HybridBlock):
    """A loop of a ``kind`` of which some gradients are handed on."""

    def __init__(self, kind: str, body: str) -> None:
        super().__init__(prefix="net_")
        self.kind, self.body = kind, HANDED_ON[body]
        with self.name_scope():
            init = mx.init.Uniform(0.9)
            self.first = self.params.get("first", shape=(4,), init=init)
            self.other = self.params.get("other", shape=(4,), init=init)

    def hybrid_forward(self, F: Any, x: Any, first: Any, other: Any) -> Any:  # noqa: N803
        read, parts = F.broadcast_mul(x, other), F.broadcast_mul(F.stack(x, x * 2), first)
        begin = F.tanh(F.broadcast_mul(x, first))
        if self.kind == "foreach":
            found, last = F.contrib.foreach(
                lambda part, state: self.body(F, part, state, read), parts, begin
            )
        else:

            def step(i: Any, part: Any, state: Any) -> Any:
                found, after = self.body(F, part, state, read)
                return found, (i + 1, part * 0.5, after)

            found, (_, _, last) = F.contrib.while_loop(
                lambda i, part, state: i < 2,
                step,
                (F.zeros((1,)), F.sum(parts, axis=0), begin),
                max_iterations=2,
            )
        return F.concat(*[F.reshape(part, shape=(-1, 4)) for part in (found, last)], dim=0)


def gradients(is_planned: bool, *kind: str, grad_req: str = "write") -> list[Any]:
    mx.random.seed(1)
    net = Handing(*kind) if kind[1] in HANDED_ON else Looping(*kind)
    x = mx.nd.random.normal(shape=(3, 4))
    net.initialize()
    net.collect_params().setattr("grad_req", grad_req)
    if is_planned:
        planned(net, realisation="packed", strategy="chen_sqrt")
    garbage = [mx.nd.full((3, 4), 1e9) for _ in range(100)]
    mx.nd.waitall()
    del garbage
    for _ in range(2):
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
    return [loss.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())]


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        *(("foreach", read) for read in READ | IN_FOREACH),
        *(("while_loop", read) for read in READ),
    ],
)
def test_as_in_a_block_that_is_not_hybridized(kind: str, read: str) -> None:
    for expected, found in zip(
        gradients(False, kind, read), gradients(True, kind, read), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("body", HANDED_ON)
@pytest.mark.parametrize("kind", ["foreach", "while_loop"])
def test_gradients_that_are_handed_on(kind: str, body: str, grad_req: str) -> None:
    """MXNet's own operators of such loops end in an error of storage types."""
    for expected, found in zip(
        gradients(False, kind, body, grad_req=grad_req),
        gradients(True, kind, body, grad_req=grad_req),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("around", ["while_loop", "cond"])
@pytest.mark.parametrize("kind", ["foreach", "while_loop"])
def test_a_loop_within(kind: str, around: str) -> None:
    case = (kind, "a sum with it", around)
    for expected, found in zip(gradients(False, *case), gradients(True, *case), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("around", ["while_loop", "cond"])
def test_a_while_loop_within_that_begins_with_data_is_refused(around: str) -> None:
    """MXNet adds gradients up to memory as it was before."""
    message = r"\((_while_loop|_cond)\) has a while_loop within, of which a state begins .* data"
    with pytest.raises(TraceError, match=message):
        gradients(True, "while_loop", "a sum with it", around, "data")
