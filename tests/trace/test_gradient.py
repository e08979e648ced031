"""The backward pass of uncommon operators and networks, against MXNet's executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.executors import traced_as_mxnet
from helpers.networks import Network
from memplan.errors import TraceError
from memplan.mxnet.trace import op_gradient
from memplan.mxnet.trace.build import trace

BATCH = 1 << 17


def var(name: str = "data", **options: Any) -> mx.sym.Symbol:
    return mx.sym.Variable(name, **options)


def dense(data: mx.sym.Symbol | None = None, units: int = 64) -> mx.sym.Symbol:
    return mx.sym.FullyConnected(var() if data is None else data, num_hidden=units)


def data(*features: int) -> dict[str, tuple[int, ...]]:
    return {"data": (BATCH, *(features or (64,)))}


class _Square(mx.operator.CustomOp):
    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        raise AssertionError("tracing runs nothing")


@mx.operator.register("memplan_test_square")
class _SquareProp(mx.operator.CustomOpProp):
    def create_operator(self, *_: Any) -> _Square:
        return _Square()


@mx.operator.register("memplan_test_pair")
class _PairProp(mx.operator.CustomOpProp):
    """Two arguments, two outputs, a state; the backward pass reads one of each."""

    def list_arguments(self) -> list[str]:
        return ["left", "right"]

    def list_outputs(self) -> list[str]:
        return ["whole", "rows"]

    def list_auxiliary_states(self) -> list[str]:
        return ["state"]

    def infer_shape(self, in_shape: Any) -> Any:
        rows = in_shape[0][0]
        return in_shape, [in_shape[0], (rows, 1)], [(3,)]

    def declare_backward_dependency(self, out_grad: Any, in_data: Any, out_data: Any) -> Any:
        return [out_grad[0], in_data[1], out_data[1]]

    def create_operator(self, *_: Any) -> _Square:
        return _Square()


def custom() -> Network:
    body = mx.sym.Custom(mx.sym.relu(dense()), op_type="memplan_test_square", name="custom")
    return mx.sym.SoftmaxOutput(dense(body)), data()


def custom_with_state() -> Network:
    inputs = var()
    left, right = mx.sym.relu(dense(inputs)), mx.sym.relu(dense(inputs, units=16))
    body = mx.sym.Custom(left, right, op_type="memplan_test_pair", name="custom")
    return mx.sym.broadcast_add(mx.sym.tanh(body[0]), body[1]), data()


def gathered() -> Network:
    picked = mx.sym.gather_nd(mx.sym.relu(dense()), var("places"))
    return mx.sym.MakeLoss(picked), {**data(), "places": (2, 30)}


def embedding() -> Network:
    words = mx.sym.Embedding(var(), input_dim=100, output_dim=32)
    return mx.sym.SoftmaxOutput(dense(words)), data(20)


def fused_rnn() -> Network:
    rnn = mx.sym.RNN(var(), state_size=16, num_layers=2, mode="lstm", p=0.3, name="rnn")
    states: tuple[int, ...] = (2, 4096, 16)
    shapes = {"data": (100, 4096, 20), "rnn_state": states, "rnn_state_cell": states}
    return mx.sym.SoftmaxOutput(dense(mx.sym.reshape(rnn, shape=(-1, 16)))), shapes


def fused_rnn_with_states() -> Network:
    rnn = mx.sym.RNN(
        var(),
        state_size=16,
        num_layers=2,
        mode="gru",
        bidirectional=True,
        state_outputs=True,
        name="rnn",
    )
    heads = [mx.sym.SoftmaxOutput(dense(rnn[0])), mx.sym.BlockGrad(rnn[1])]
    return mx.sym.Group(heads), {"data": (100, 4096, 20), "rnn_state": (4, 4096, 16)}


def foreach() -> Network:
    weight = var("weight", shape=(16, 16))

    def step(item: mx.sym.Symbol, state: mx.sym.Symbol) -> tuple[mx.sym.Symbol, mx.sym.Symbol]:
        state = mx.sym.tanh(mx.sym.dot(state, weight) + item)
        return state, state

    outputs, state = mx.sym.contrib.foreach(step, var(), var("first"))
    heads = [mx.sym.MakeLoss(mx.sym.sum(mx.sym.tanh(outputs))), mx.sym.BlockGrad(state)]
    return mx.sym.Group(heads), {"data": (100, 16384, 16), "first": (16384, 16)}


def several_losses() -> Network:
    body = mx.sym.relu(dense())
    losses = [
        mx.sym.SoftmaxOutput(dense(body)),
        mx.sym.LinearRegressionOutput(dense(body)),
        mx.sym.MakeLoss(mx.sym.sum(mx.sym.square(body))),
    ]
    return mx.sym.Group(losses), data()


def no_loss() -> Network:
    return mx.sym.relu(dense()), data()


def repeated_heads() -> Network:
    body = mx.sym.relu(dense())
    return mx.sym.Group([body, body, mx.sym.tanh(body), body]), data()


def head_that_is_an_argument() -> Network:
    inputs = var()
    return mx.sym.Group([mx.sym.relu(dense(inputs)), inputs]), data()


def head_that_others_read() -> Network:
    body = dense()
    return mx.sym.Group([body, mx.sym.relu(dense(body))]), data()


def no_gradient_arrives() -> Network:
    return mx.sym.BlockGrad(dense()), data()


def constants() -> Network:
    body = dense()
    ones = mx.sym.zeros(shape=(BATCH, 64)) + mx.sym.ones_like(body)
    return body + ones + mx.sym.zeros_like(body) * body, data()


def terms(count: int) -> Callable[[], Network]:
    """``count`` gradients of one tensor: a sum of them at once, or from 8 on one by one."""

    def network() -> Network:
        body = dense()
        return mx.sym.MakeLoss(sum(mx.sym.tanh(body * float(i + 2)) for i in range(count))), data()

    return network


def terms_of_one_node() -> Network:
    """The gradient of the data is ten times the same entry."""
    whole = part = var()
    for _ in range(9):
        whole = whole + part
    return whole, data()


def sums_of_arguments() -> Network:
    several = [var(f"part{i}") for i in range(4)]
    heads = [mx.sym.add_n(*several), mx.sym.add_n(*several[:2])]
    return mx.sym.Group(heads), {f"part{i}": (BATCH, 64) for i in range(4)}


def one_gradient_for_several_arguments() -> Network:
    several = [var(f"part{i}") for i in range(4)]
    return sum(several[1:], several[0]), {f"part{i}": (BATCH, 64) for i in range(4)}


def zero_gradient_of_an_operator_without() -> Network:
    inputs = var()
    finite = mx.sym.multi_all_finite(
        mx.sym.shuffle(dense(inputs)), dense(inputs), num_arrays=2, name="finite"
    )
    return mx.sym.Group([mx.sym.relu(dense(inputs)), mx.sym.BlockGrad(finite)]), data()


def branches() -> Network:
    parts = mx.sym.split(mx.sym.relu(dense()), num_outputs=4, axis=1)
    joined = mx.sym.concat(parts[3], parts[1], mx.sym.L2Normalization(parts[0]), dim=1)
    return mx.sym.SoftmaxOutput(dense(mx.sym.reshape(joined, shape=(-1, 12, 4)))), data()


def normalised() -> Network:
    body = mx.sym.Dropout(mx.sym.LayerNorm(mx.sym.LeakyReLU(dense(), act_type="gelu")))
    return mx.sym.SoftmaxOutput(dense(body)), data()


def broadcast() -> Network:
    body = dense()
    body = mx.sym.broadcast_add(body, mx.sym.sum(body, axis=1, keepdims=True))
    return mx.sym.MakeLoss(mx.sym.where(body > 0, body, body * 2)), data()


def upsampled() -> Network:
    body = mx.sym.Deconvolution(var(), kernel=(2, 2), stride=(2, 2), num_filter=8)
    body = mx.sym.UpSampling(body, scale=2, sample_type="nearest")
    body = mx.sym.Pooling(body, kernel=(3, 3), stride=(2, 2), pool_type="max")
    return mx.sym.SoftmaxOutput(dense(body)), {"data": (64, 3, 32, 32)}


def numpy_operators() -> Network:
    inputs = [var(name).as_np_ndarray() for name in ("data", "weight", "bias")]
    body = mx.sym.npx.fully_connected(mx.sym.np.tanh(inputs[0]), *inputs[1:], num_hidden=8)
    return body * body, data()


NETWORKS = [
    custom,
    custom_with_state,
    gathered,
    embedding,
    fused_rnn,
    fused_rnn_with_states,
    foreach,
    several_losses,
    no_loss,
    repeated_heads,
    head_that_is_an_argument,
    head_that_others_read,
    no_gradient_arrives,
    constants,
    one_gradient_for_several_arguments,
    branches,
    normalised,
    broadcast,
    upsampled,
    numpy_operators,
    sums_of_arguments,
    zero_gradient_of_an_operator_without,
    terms_of_one_node,
]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("everything", [False, True], ids=["default", "write"])
def test_as_mxnet(network: Callable[[], Network], everything: bool) -> None:
    symbol, shapes = network()
    only_inputs = set(symbol.list_arguments()) <= set(shapes)
    traced_as_mxnet(symbol, shapes, grad_req="write" if everything or only_inputs else None)


@pytest.mark.parametrize("count", [2, 7, 8, 12])
def test_many_terms(count: int) -> None:
    result = traced_as_mxnet(*terms(count)())
    sums = [op.kind for op in result.graph.ops if op.name.startswith("sum_grad")]
    assert sums == (["add_n"] if count < 8 else ["_grad_add"] * (count - 1) + ["_copy"])


@pytest.mark.parametrize(
    "like",
    [
        mx.sym.reshape_like,
        lambda whole, shape: whole + mx.sym.ones_like(shape),
        lambda whole, shape: whole + mx.sym.zeros_like(shape),
        lambda whole, shape: whole + mx.sym.contrib.arange_like(shape),
        lambda whole, shape: whole + mx.sym.random.normal_like(shape),
    ],
    ids=["reshape", "ones", "zeros", "arange", "normal"],
)
def test_an_input_read_for_its_shape_only_may_die(
    like: Callable[[mx.sym.Symbol, mx.sym.Symbol], mx.sym.Symbol],
) -> None:
    # ReLU writes its output over its input, of which the last op needs only the shape.
    inputs = var()
    body = mx.sym.exp(inputs)
    twice = mx.sym.transpose(mx.sym.transpose(mx.sym.relu(body)))
    heads = [mx.sym.BlockGrad(like(twice, body)), mx.sym.SoftmaxOutput(dense(inputs, units=2))]
    traced_as_mxnet(mx.sym.Group(heads), data())


def test_mixed_precision() -> None:
    body = mx.sym.relu(dense(mx.sym.Cast(var(), dtype="float16")))
    symbol = mx.sym.SoftmaxOutput(mx.sym.Cast(body, dtype="float32"))
    result = traced_as_mxnet(symbol, data(), type_dict={"data": "float32"})
    assert result.dtypes["data"] == "float32"
    assert "float16" in result.dtypes.values()


def data_dependent() -> mx.sym.Symbol:
    return mx.sym.contrib.boolean_mask(dense(), var("mask"), name="masked")


def while_loop() -> mx.sym.Symbol:
    weight = var("weight", shape=(64, 64))
    _, states = mx.sym.contrib.while_loop(
        lambda count, _: count < 5,
        lambda count, state: ([state], [count + 1, mx.sym.tanh(mx.sym.dot(state, weight))]),
        [var("count", shape=(1,)), var()],
        max_iterations=6,
    )
    return mx.sym.MakeLoss(mx.sym.sum(states[1]))


def condition() -> mx.sym.Symbol:
    body = dense()
    return mx.sym.contrib.cond(mx.sym.sum(body) < 5, lambda: mx.sym.tanh(body), lambda: body * 2)


def uneven_condition() -> mx.sym.Symbol:
    body = dense()
    return mx.sym.contrib.cond(
        mx.sym.sum(body) < 5, lambda: mx.sym.tanh(body), lambda: mx.sym.concat(body, body)
    )


@pytest.mark.parametrize(
    ("network", "kind", "shapes"),
    [
        (while_loop, "_while_loop", [(6, 8, 64), (1,), (8, 64)]),
        (condition, "_cond", [(8, 64)]),
    ],
)
def test_loops_and_branches_return_what_their_bodies_return(
    network: Callable[[], mx.sym.Symbol], kind: str, shapes: list[tuple[int, ...]]
) -> None:
    """Which MXNet does not infer before they run."""
    traced = trace(network(), shapes={"data": (8, 64)})
    [node] = [node for node in traced.nodes if node.op == kind]
    assert [info and info.shape for info in node.infos.outputs] == shapes


@pytest.mark.parametrize(
    ("network", "node"), [(data_dependent, "masked"), (uneven_condition, "_cond")]
)
def test_unknown_shapes_are_refused(network: Callable[[], mx.sym.Symbol], node: str) -> None:
    symbol = network()
    shapes = {"data": (8, 64)} | ({"mask": (8,)} if network is data_dependent else {})
    with pytest.raises(TraceError, match=f"the shape of '{node}.*' .* is not known before it runs"):
        trace(symbol, shapes=shapes)


def norm() -> mx.sym.Symbol:
    rows = mx.sym.np.linalg.norm(dense().as_np_ndarray(), axis=1).as_nd_ndarray()
    return mx.sym.MakeLoss(mx.sym.sum(rows))


def test_a_hidden_output_of_a_shape_that_only_numpy_has() -> None:
    """A norm has two of shape (), which to MXNet is an unknown one without NumPy semantics."""
    symbol = norm()
    with pytest.raises(TraceError, match=r"_npi_norm.* not known before it runs.*npx\.set_np\(\)"):
        trace(symbol, shapes={"data": (8, 64)})
    with mx.util.np_shape(True):  # which set_np() turns on
        trace(norm(), shapes={"data": (8, 64)})
        trace(symbol, shapes={"data": (8, 64)})


def test_a_zero_gradient_waits_for_its_operator() -> None:
    graph = traced_as_mxnet(*zero_gradient_of_an_operator_without()).graph
    zeros = [op for op in graph.ops if op.kind == "zeros_like"]
    assert len(zeros) == 2
    for op in zeros:
        assert op.differentiates in op.after
        assert op.inputs == ()


def test_an_operator_without_gradient_is_named() -> None:
    counts = mx.sym.histogram(dense(), bins=4, range=(0, 1), name="counted")[0]
    with pytest.raises(TraceError, match=r"op 'counted' .*cannot be differentiated.*_histogram"):
        trace(mx.sym.MakeLoss(counts), shapes=data())


def test_a_hint_is_no_reason_to_ask_for_a_gradient_again() -> None:
    body = dense()
    for place in range(4):
        body = mx.sym.Activation(body, act_type="tanh", __mirror_stage__=str(place))
    before = op_gradient._gradient.cache_info().misses
    traced = trace(mx.sym.MakeLoss(body), shapes=data())
    kinds = [node.op for node in traced.nodes].count
    assert kinds("Activation") == 4
    assert op_gradient._gradient.cache_info().misses - before <= len({n.op for n in traced.nodes})
    for node in traced.nodes:
        if node.op == "_backward_Activation":
            assert node.forward is not None
            assert node.attrs["__mirror_stage__"] == node.forward.attrs["__mirror_stage__"]
