"""Small blocks of every kind that MXNet hybridizes, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.blocks import CPU, SOFTMAX, Case, conv_net, images, vectors


class Named(gluon.HybridBlock):
    """A block whose names are the same at every run."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = nn.Dense(16, in_units=12, activation="tanh")
            self.scores = nn.Dense(10, in_units=16)


class Branches(Named):
    """Noise in training only, and another where nothing is recorded."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.body(x)
        if autograd.is_training():
            x = x + F.random.normal(0, 0.1, shape=(64, 16))
        return self.scores(x if autograd.is_recording() else x * 0)


class Fixed(Named):
    """A Constant, and a parameter that is not trained, in between."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.shift = self.params.get_constant("shift", np.linspace(0, 1, 16).reshape(1, 16))
            self.factor = self.params.get("factor", shape=(1, 16), init="ones", grad_req="null")

    def hybrid_forward(self, F: Any, x: Any, shift: Any, factor: Any) -> Any:  # noqa: N803
        x = F.broadcast_add(self.body(x), shift)
        return self.scores(F.tanh(F.broadcast_mul(x, factor)))


class Nested(Named):
    """Inputs in lists with None among them; outputs nested, None and inputs among them."""

    def hybrid_forward(self, F: Any, pair: Any, rest: Any) -> Any:  # noqa: N803
        first, second = pair
        x = self.body(first) if second is None else self.body(first + second)
        for y in rest:
            x = x * self.body(y[0] if isinstance(y, list) else y)
        return [self.scores(x), [x, [first]]]


class Ignores(Named):
    """Reads one of its inputs only, and has a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.unused = self.params.get("unused", shape=(3,), init="zeros")

    def hybrid_forward(self, F: Any, x: Any, other: Any, unused: Any) -> Any:  # noqa: N803
        return self.scores(self.body(x))


class Shared(Named):
    """A layer used thrice, once through another block that has its parameters."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(12, in_units=16, activation="relu")
            self.twin = nn.Dense(16, in_units=12, activation="tanh", params=self.body.params)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(self.twin(self.first(self.body(self.first(self.body(x))))))


def lambdas() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(16), nn.HybridLambda("tanh"))
        net.add(nn.HybridLambda(lambda F, x: F.concat(x, F.relu(x), dim=1)))  # noqa: N803
        net.add(nn.Dense(10))
    return net


def hybridized_before() -> Any:
    """Parts that were hybridized before, and have run."""
    net = conv_net()
    net.initialize(ctx=CPU)
    net[0].hybridize(static_alloc=True, static_shape=True)
    net[3].hybridize(static_alloc=True)
    net[9].hybridize(inline_limit=0)
    net(images(8)[0])
    return net


class Foreach(Named):
    """A loop with a state, of what a layer computes."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def body(row: Any, state: Any) -> Any:
            state = F.tanh(state + row)
            return state * 2, state

        x = F.tanh(self.body(x)).reshape((8, 8, 16))
        found, _ = F.contrib.foreach(body, x, F.zeros((8, 16)))
        return self.scores(F.tanh(found).reshape((64, 16)))


class ForeachLayers(Named):
    """A loop whose body has layers."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.cell = gluon.rnn.GRUCell(16, input_size=16)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = F.tanh(self.body(x)).reshape((8, 8, 16))
        found, _ = F.contrib.foreach(self.cell, x, [F.zeros((8, 16))])
        return self.scores(F.tanh(found).reshape((64, 16)))


class ForeachTwice(ForeachLayers):
    """Two loops that read the parameters of one cell."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = F.tanh(self.body(x)).reshape((8, 8, 16))
        first, states = F.contrib.foreach(self.cell, x, [F.zeros((8, 16))])
        second, _ = F.contrib.foreach(self.cell, F.tanh(first), states)
        return self.scores(F.tanh(second).reshape((64, 16)))


class WhileLoop(Named):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def step(i: Any, s: Any) -> Any:
            s = F.tanh(F.broadcast_add(s * 1.5, i))
            return s, (i + 1, s)

        x = self.body(x)
        found, (_, last) = F.contrib.while_loop(
            lambda i, s: i < 3, step, (F.zeros((1,)), x.mean(axis=1)), max_iterations=5
        )
        return self.scores(F.broadcast_add(x, F.tanh(last).reshape((64, 1)))), found


class Cond(Named):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.body(x)
        y = F.contrib.cond(x.sum() < 1, lambda: F.tanh(x) * 2, lambda: x * x)
        return self.scores(F.tanh(y))


class CondInForeach(Named):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def body(row: Any, state: Any) -> Any:
            state = F.contrib.cond(
                row.sum() < 0, lambda: F.tanh(state + row), lambda: F.sin(state) * 2
            )
            return state * 2, state

        x = self.body(x).reshape((8, 8, 16))
        found, _ = F.contrib.foreach(body, x, F.zeros((8, 16)))
        return self.scores(F.tanh(found).reshape((64, 16)))


class CondInCond(Named):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.body(x)
        y = F.contrib.cond(
            x.sum() < 1,
            lambda: F.contrib.cond(x.mean() < 0, lambda: F.tanh(x), lambda: x * 2),
            lambda: x * x,
        )
        return self.scores(y)


class UnevenCond(Named):
    """Its branches return different shapes."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.body(x)
        return F.contrib.cond(x.sum() < 1, lambda: x * 2, lambda: F.concat(x, x, dim=1))


class AddedCond(Named):
    """MXNet's executors cannot be bound to it."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = self.body(x)
        return self.scores(F.contrib.cond(x.sum() < 1, lambda: x * 2, lambda: x * x) + F.sin(x))


class TwoSparse(Named):
    """Two embeddings of the same words."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.one = nn.Embedding(50, 12, sparse_grad=True)
            self.two = nn.Embedding(50, 12, sparse_grad=True, params=self.one.params)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(self.body((self.one(x) * self.two(x > 20)).sum(axis=1)))


class Cube(mx.operator.CustomOp):
    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0] ** 3)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], 3 * out_grad[0] * in_data[0] ** 2)


@mx.operator.register("odd_cube")
class CubeProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Cube:
        return Cube()


class UserCode(Named):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        x = F.Custom(self.body(x), op_type="odd_cube")
        return self.scores(F.tanh(F.Custom(x * 2, op_type="odd_cube")))


class SparseUserCode(Named):
    """A sparse gradient, which explicit steps could write, and user code, which they cannot."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.words = nn.Embedding(50, 12, sparse_grad=True)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        looked_up = F.Custom(self.words(x).sum(axis=1), op_type="odd_cube")
        return self.scores(self.body(looked_up))


class Counted(mx.operator.CustomOp):
    """Adds the number of its calls; ``made`` counts such operators."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        Counted.made += 1

    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.calls += 1
        self.assign(out_data[0], req[0], in_data[0] * self.calls)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * self.calls)


@mx.operator.register("odd_counted")
class CountedProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Counted:
        return Counted()


class Squares(mx.operator.CustomOp):
    """A loss: its gradient is that of half its square, whatever comes from above."""

    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], (in_data[0] ** 2).sum(axis=1))
        self.assign(out_data[1], req[1], in_data[0])

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], in_data[0])


@mx.operator.register("odd_squares")
class SquaresProp(mx.operator.CustomOpProp):
    def __init__(self) -> None:
        super().__init__(need_top_grad=False)

    def list_outputs(self) -> list[str]:
        return ["squares", "same"]

    def infer_shape(self, in_shape: Any) -> Any:
        return in_shape, [in_shape[0][:1], in_shape[0]], []

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Squares:
        return Squares()


class CountedBlock(Named):
    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        return self.scores(F.Custom(self.body(x), op_type="odd_counted"))


class OwnLossOnly(Named):
    def hybrid_forward(self, F: Any, x: Any, y: Any) -> Any:  # noqa: N803
        scores = F.broadcast_add(self.scores(self.body(x)), y.reshape((-1, 1)))
        return F.Custom(scores, op_type="odd_squares")[0]


class ForeachRandom(Named):
    """Random numbers before, within and after a loop."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        def body(row: Any, state: Any) -> Any:
            state = F.Dropout(F.tanh(state + row), 0.3)
            return state * 2, state

        x = F.Dropout(self.body(x), 0.2).reshape((8, 8, 16))
        found, _ = F.contrib.foreach(body, x, F.zeros((8, 16)))
        return self.scores(F.Dropout(F.tanh(found), 0.4).reshape((64, 16)))


def sparse_embedding() -> Any:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Embedding(50, 8, sparse_grad=True), nn.Dense(16, activation="tanh"))
        net.add(nn.Dense(10))
    return net


def words() -> tuple[Any, Any]:
    x = mx.nd.floor(mx.nd.random.uniform(0, 50, shape=(16, 6), ctx=CPU))
    return x, mx.nd.floor(mx.nd.random.uniform(0, 10, shape=(16,), ctx=CPU))


def imported() -> Any:
    x = mx.sym.Variable("data")
    x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=16, name="one"), act_type="tanh")
    x = mx.sym.FullyConnected(mx.sym.BatchNorm(x, name="norm"), num_hidden=10, name="two")
    return gluon.SymbolBlock(x, mx.sym.Variable("data"))


def nested_inputs() -> tuple[Any, Any]:
    (a, y), (b, _), (c, _) = vectors(), vectors(), vectors()
    return ([a, None], [b, [c]]), y


def two_inputs() -> tuple[Any, Any]:
    (a, y), (b, _) = vectors(), vectors()
    return (a, b), y


def untrained(ending: str) -> Callable[[Any], None]:
    """Trainer refuses a parameter without a gradient."""

    def prepare(net: Any) -> None:
        for name, parameter in net.collect_params().items():
            if name.endswith(ending):
                parameter.grad_req = "null"

    return prepare


def first_of(outputs: Any, label: Any) -> Any:
    return SOFTMAX(outputs[0], label)


BLOCKS = {
    "branches": Case(Branches, vectors),
    "fixed": Case(Fixed, vectors),
    "nested": Case(Nested, nested_inputs, first_of),
    "ignores": Case(Ignores, two_inputs, prepare=untrained("unused")),
    "shared": Case(Shared, vectors),
    "lambdas": Case(lambdas, vectors),
    "hybridized_before": Case(hybridized_before, lambda: images(8)),
    "imported": Case(imported, vectors, initializer=mx.init.Normal(0.3)),
    "foreach": Case(Foreach, vectors),
    "foreach_layers": Case(ForeachLayers, vectors),
    "foreach_twice": Case(ForeachTwice, vectors),
    "foreach_random": Case(ForeachRandom, vectors),
    "while_loop": Case(WhileLoop, vectors, first_of),
    "user_code": Case(UserCode, vectors),
    "counted": Case(CountedBlock, vectors),
    "own_loss_only": Case(OwnLossOnly, vectors, None),
    "sparse_embedding": Case(sparse_embedding, words),
    "sparse_user_code": Case(SparseUserCode, words),
    "two_sparse": Case(TwoSparse, words),
}
