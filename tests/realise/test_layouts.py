"""What oneDNN adds up depends on the layouts that it meets: packed steps meet those of MXNet's own.

An operator that is none of oneDNN's leaves another layout where it writes over its input, which a
plan lets it do earlier than MXNet: a BatchNorm behind it rounds its sums otherwise then. So does
one behind a sum that is written over another of its terms. Where a plan keeps what MXNet writes
over, a copy of it is written over. A Custom op reads the usual layout, and what it reads keeps the
layout that it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.schedules import random_schedule
from helpers.training_runs import bound, differences, planned_steps, random_values, stock_steps
from memplan.mxnet.realise.estimate.layout_copies import copies
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule
from memplan.strategies.base import Problem
from memplan.strategies.chen import ChenSqrt
from memplan.strategies.evict import Evict

Symbol = mx.sym.Symbol
CHANNELS = 16


def gated(x: Symbol, kernel: tuple[int, ...] = (1, 1)) -> Symbol:
    """Squeeze and excitation."""
    means = mx.sym.Pooling(x, global_pool=True, pool_type="avg", kernel=kernel)
    gates = mx.sym.Convolution(means, num_filter=CHANNELS, kernel=(1, 1))
    return mx.sym.broadcast_mul(x, mx.sym.sigmoid(gates))


def of_several_lengths(x: Symbol) -> Symbol:
    """A softmax that MXNet computes without oneDNN, unlike one of rows as long as they are."""
    shape_like = mx.sym.slice_axis(x, axis=3, begin=0, end=1)
    lengths = mx.sym.squeeze(mx.sym.cast(mx.sym.ones_like(shape_like) * 5, dtype="int32"), axis=3)
    return mx.sym.softmax(x, mx.sym.BlockGrad(lengths), use_length=True)


OPERATORS: dict[str, Callable[[Symbol], Symbol]] = {
    "PReLU, as in ArcFace's ResNets": lambda x: mx.sym.LeakyReLU(x, act_type="prelu"),
    "swish": lambda x: x * mx.sym.sigmoid(x),
    "hard swish": lambda x: x * mx.sym.clip(x + 3, a_min=0, a_max=6) / 6,
    "gates": gated,
    "gates of poolings without a kernel": lambda x: gated(x, kernel=()),
    "softmax of rows of several lengths": of_several_lengths,
    "tanh, whose input a plan keeps": mx.sym.tanh,
    "a product, whose input a plan keeps": lambda x: x * 1.5,
}


def convolution(data: Symbol, ndim: int = 2) -> Symbol:
    return mx.sym.Convolution(data, num_filter=CHANNELS, kernel=(3,) * ndim, pad=(1,) * ndim)


def before_norms(operator: Callable[[Symbol], Symbol], *, is_residual: bool) -> Symbol:
    body = convolution(mx.sym.Variable("data"))
    for _ in range(3):
        branch = convolution(mx.sym.BatchNorm(operator(body), fix_gamma=False))
        body = body + branch if is_residual else branch
    return body


def before_sums(operator: Callable[[Symbol], Symbol]) -> Symbol:
    body = convolution(mx.sym.Variable("data"))
    for _ in range(4):
        branch = operator(mx.sym.BatchNorm(body, fix_gamma=False))
        body = body + operator(convolution(branch))
    return body


@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_batchnorm_meets_the_layouts_of_the_unplanned_step(name: str, is_residual: bool) -> None:
    assert not different(before_norms(OPERATORS[name], is_residual=is_residual))


@pytest.mark.parametrize("name", ["swish", "hard swish", "gates", "PReLU, as in ArcFace's ResNets"])
def test_a_sum_is_written_over_the_term_of_the_unplanned_step(name: str) -> None:
    assert not different(before_sums(OPERATORS[name]))


def test_gradients_may_be_read_in_another_order_than_mxnets() -> None:
    """By a softsign last, which leaves another layout if it writes over what it reads."""
    read = mx.sym.BatchNorm(convolution(mx.sym.Variable("data")), fix_gamma=False)
    terms = [
        mx.sym.LeakyReLU(read, act_type="leaky", name="leaky"),
        mx.sym.Activation(read, act_type="softsign", name="softsign"),
    ]
    heads = [convolution(terms[0] + terms[1]), mx.sym.BatchNorm(read, fix_gamma=False)]
    symbol = mx.sym.Group([mx.sym.MakeLoss(mx.sym.square(head)) for head in heads])
    traced = trace(symbol, shapes={"data": (2, 3, 6, 6)}, realisation="packed")
    names = [op.name for op in traced.graph.ops]
    order = list(range(len(names)))
    first, second = sorted(names.index(f"{name}_backward") for name in ("leaky", "softsign"))
    order[first], order[second] = second, first
    values = random_values(traced)
    planned = bound(traced, Schedule.sequence(traced.graph, order), values)
    assert not differences(stock_steps(traced, values, 2), planned_steps(planned, 2))


def test_what_autograd_records_is_written_over_a_copy_of_what_a_plan_keeps() -> None:
    """MXNet writes what the Dropout leaves over the data, of which plans make the product anew."""
    data = convolution(mx.sym.Variable("data"))
    product = convolution(mx.sym.sin(data * 2))
    out = product + mx.sym.BatchNorm(mx.sym.Dropout(data, p=0.3), fix_gamma=False)
    network = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(out, num_hidden=3), name="softmax")
    traced = trace(network, shapes={"data": (4, 3, 8, 8)}, realisation="packed")
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    for seed in range(3):
        planned = planned_steps(bound(traced, random_schedule(traced.graph, seed), values), 2)
        assert not differences(stock, planned), seed


def test_a_dense_layer_leaves_the_layout_of_what_it_is_written_over() -> None:
    """The gradient of its data, where that has more than two dimensions."""
    read = convolution(mx.sym.Variable("data"))
    behind = mx.sym.Convolution(read, num_filter=CHANNELS, kernel=(3, 3), stride=(2, 2))
    heads = [
        mx.sym.FullyConnected(behind, num_hidden=8, flatten=False),
        mx.sym.BatchNorm(read, fix_gamma=False),
        mx.sym.FullyConnected(read, num_hidden=16),
    ]
    symbol = mx.sym.Group([mx.sym.MakeLoss(mx.sym.sin(head)) for head in heads])
    traced = trace(symbol, shapes={"data": (2, 16, 8, 8)}, realisation="packed")
    values = random_values(traced)
    stock = stock_steps(traced, values, 1)
    for seed in range(8):
        planned = planned_steps(bound(traced, random_schedule(traced.graph, seed), values), 1)
        assert not differences(stock, planned), seed


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
def test_a_softmax_of_rows_is_written_over_a_convolution_that_it_reads(
    kind: str, ndim: int
) -> None:
    """Where it is not MXNet ends the process: a plan that keeps what it reads copies that."""
    rows = getattr(mx.sym, kind)(convolution(mx.sym.Variable("data"), ndim), axis=-1, name="rows")
    options = {"shapes": {"data": (3, 8, *[7] * ndim)}}
    symbol = mx.sym.MakeLoss(mx.sym.square(rows))
    traced = trace(symbol, realisation="packed", **options)
    values, order = random_values(traced), list(range(len(traced.graph.ops)))
    again = [op.name for op in traced.graph.ops].index("rows")
    order.insert(again + 2, again)
    planned = planned_steps(bound(traced, Schedule.sequence(traced.graph, order), values), 2)
    assert not differences(stock_steps(traced, values, 2), planned)
    for realisation in ("explicit", "mirror"):  # MXNet itself decides what is written over
        assert not trace(symbol, realisation=realisation, **options).graph.ops[again].recomputable


def _is_run_once(of: Callable[[Symbol], Symbol], realisation: str) -> bool:
    symbol = mx.sym.softmax(of(mx.sym.Variable("data")), axis=-1, name="rows")
    symbol = mx.sym.MakeLoss(mx.sym.square(symbol))
    traced = trace(symbol, shapes={"data": (3, 4, 6, 6)}, realisation=realisation)
    return not next(op for op in traced.graph.ops if op.name == "rows").recomputable


@pytest.mark.parametrize("realisation", ["explicit", "mirror"])
def test_a_softmax_of_scores_may_run_again(realisation: str) -> None:
    """The scores of attention are in the usual layout, also behind convolutions."""

    def scores(data: Symbol) -> Symbol:
        rows = mx.sym.reshape(convolution(data), shape=(-3, 0, 0))
        return mx.sym.batch_dot(rows, rows, transpose_b=True) * 0.5

    def of_four_dimensions(data: Symbol) -> Symbol:
        return mx.sym.reshape(scores(data), shape=(-4, 3, -1, 0, 0))

    def dense(data: Symbol) -> Symbol:
        return mx.sym.FullyConnected(convolution(data), num_hidden=6, flatten=False)

    assert not any(_is_run_once(of, realisation) for of in (scores, of_four_dimensions, dense))


@pytest.mark.parametrize("realisation", ["explicit", "mirror"])
def test_a_softmax_of_what_has_the_layout_of_a_convolution_runs_once(realisation: str) -> None:
    def pooled(data: Symbol) -> Symbol:
        return mx.sym.Pooling(convolution(data), kernel=(2, 2), pool_type="max")

    def second_term(data: Symbol) -> Symbol:
        return mx.sym.exp(mx.sym.broadcast_mul(mx.sym.ones((1,)), mx.sym.relu(convolution(data))))

    def part(data: Symbol) -> Symbol:
        return mx.sym.slice_axis(convolution(data), axis=1, begin=0, end=4)

    def rows(data: Symbol) -> Symbol:
        return mx.sym.reshape(convolution(data), shape=(0, 0, -1))

    found = [_is_run_once(of, realisation) for of in (pooled, second_term, rows)]
    assert all(found)
    assert not _is_run_once(part, realisation)


def test_explicit_steps_slice_no_array_in_the_layout_of_another_shape() -> None:
    """A flat cumsum is written over a convolution, and has its layout: a slice of it would fail."""
    total = mx.sym.cumsum(convolution(mx.sym.Variable("data")))
    symbol = mx.sym.MakeLoss(mx.sym.sin(total) * total)
    traced = trace(symbol, shapes={"data": (4, 16, 6, 6)}, realisation="explicit")
    values = random_values(traced)
    stock = stock_steps(traced, values, 2)
    for seed in range(8):
        schedule = random_schedule(traced.graph, seed, repeated=0.9)
        assert not differences(stock, planned_steps(bound(traced, schedule, values), 2)), seed


def test_where_there_is_one_layout_sums_take_over_any_term() -> None:
    symbol = mx.sym.MakeLoss(mx.sym.mean(before_sums(OPERATORS["PReLU, as in ArcFace's ResNets"])))
    nterms = {}
    for device_type in ("cpu", "gpu"):
        options = {"realisation": "packed", "device_type": device_type}
        graph = trace(symbol, shapes={"data": (4, 3, 14, 14)}, **options).graph
        sums = [op for op in graph.ops if op.kind == "elemwise_add"]
        nterms[device_type] = sum(len(op.handovers) for op in sums)
    assert nterms["cpu"] < nterms["gpu"]


class _Cube(mx.operator.CustomOp):
    """The cube of what it reads; with a state, the mean of this is kept there."""

    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0] ** 2 * in_data[0])
        for mean in aux:
            mean[:] = 0.9 * mean + 0.1 * in_data[0].mean()

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * 3 * in_data[0] ** 2)


class _Straight(_Cube):
    """As if its gradient were 1, whatever it reads."""

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * 1)


class _CubeProp(mx.operator.CustomOpProp):
    def create_operator(self, *_: Any) -> Any:
        return _Cube()


@mx.operator.register("memplan_test_cube")
class _Plain(_CubeProp):
    pass


@mx.operator.register("memplan_test_straight_cube")
class _StraightProp(_CubeProp):
    """Its backward op reads no tensor that the op has read or written."""

    def create_operator(self, *_: Any) -> Any:
        return _Straight()

    def declare_backward_dependency(self, out_grad: Any, in_data: Any, out_data: Any) -> Any:
        return out_grad


@mx.operator.register("memplan_test_cube_with_state")
class _StateProp(_CubeProp):
    def list_auxiliary_states(self) -> list[str]:
        return ["mean"]

    def infer_shape(self, in_shape: Any) -> Any:
        return in_shape, [in_shape[0]], [(1,)]


def custom(x: Symbol, kind: str = "cube") -> Symbol:
    return mx.sym.Custom(x, op_type=f"memplan_test_{kind}")


CUSTOM: dict[str, Callable[[Symbol], Symbol]] = {
    "alone": custom,
    "beside a BatchNorm": lambda x: mx.sym.BatchNorm(x, fix_gamma=False) + custom(x),
    "before a gradient of a BatchNorm": lambda x: custom(mx.sym.BatchNorm(x, fix_gamma=False)),
    "whose gradient reads no tensor": lambda x: custom(x, "straight_cube") + mx.sym.relu(x),
    "with a state": lambda x: custom(x, "cube_with_state"),
    "without a gradient": lambda x: x + mx.sym.BlockGrad(custom(mx.sym.BlockGrad(x))),
}


@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("name", CUSTOM)
def test_a_custom_op_reads_what_onednn_has_written(name: str, is_residual: bool) -> None:
    assert not different(before_norms(CUSTOM[name], is_residual=is_residual))


def different(body: Symbol) -> list[str]:
    """What differs from MXNet in steps that recompute much, and in such that keep some tensors."""
    pooled = mx.sym.Pooling(body, global_pool=True, pool_type="avg", kernel=(1, 1))
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(pooled, num_hidden=5), name="softmax")
    traced = trace(symbol, shapes={"data": (4, 3, 14, 14)}, realisation="packed")
    values = random_values(traced)
    result = []
    for strategy in (Evict(patience=0), ChenSqrt()):
        schedule = strategy.solve(Problem(traced.graph, None)).schedule
        assert schedule is not None
        assert schedule.recomputed
        planned = planned_steps(bound(traced, schedule, values))
        result += differences(stock_steps(traced, values), planned)
    return result


@pytest.mark.parametrize("join", [mx.sym.Concat, mx.sym.elemwise_add])
@pytest.mark.parametrize(("size", "is_beside"), [((8, 8, 8), True), ((8, 8), False)])
def test_volumes_are_joined_and_added_of_copies_beside_the_space(
    size: tuple[int, ...], is_beside: bool, join: Callable[..., mx.sym.Symbol]
) -> None:
    """Which leaves the usual layout: oneDNN joins and adds matrices and pictures only."""

    def activated(data: mx.sym.Symbol, name: str) -> mx.sym.Symbol:
        kernel = {"kernel": (3,) * len(size), "pad": (1,) * len(size)}
        return mx.sym.relu(mx.sym.Convolution(data, num_filter=16, name=name, **kernel))

    first = activated(mx.sym.Variable("data"), "first")
    both = join(first, activated(first, "second"), name="both")
    net = mx.sym.MakeLoss(activated(both, "third"))
    traced = trace(net, shapes={"data": (1, 16, *size)}, realisation="packed")
    found = copies(traced.graph, traced.nodes)
    names = [node.name for node in traced.nodes]
    joined, third = names.index("both"), names.index("third")
    assert (joined in found.beside) is is_beside
    assert (found.temporary_nbytes[joined] > 0) is is_beside
    assert any(found.layouts[third]) is not is_beside
