"""What a Module infers: with oneDNN, too, the bits of MXNet's own that is bound to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mxnet as mx
import pytest

from helpers.fitting import Make, Result, differing, planned, seed
from helpers.networks import Network
from memplan.mxnet.realise.bind import READER, WANTED, ArraysToBind, bind_inference
from memplan.mxnet.trace.probe import allocated_mib
from memplan.mxnet.train.pool import inference_need
from memplan.planning.realisation import trace


def gated_net(batch: int = 4, size: int = 8) -> Network:
    """Squeeze-and-excitation: a product by gates, and a sum, before a BatchNorm."""
    body = mx.sym.Variable("data")
    for name in ("first", "second"):
        shortcut = mx.sym.Convolution(body, num_filter=8, kernel=(1, 1), name=f"{name}_shortcut")
        body = mx.sym.Convolution(body, num_filter=8, kernel=(3, 3), pad=(1, 1), name=name)
        gates = mx.sym.Pooling(body, pool_type="avg", global_pool=True)
        gates = mx.sym.FullyConnected(gates, num_hidden=8, name=f"{name}_gates")
        gates = mx.sym.reshape(mx.sym.sigmoid(gates), (-1, 8, 1, 1))
        body = mx.sym.broadcast_mul(body, gates) + shortcut
        body = mx.sym.BatchNorm(body, fix_gamma=False, name=f"{name}_bn")
        body = mx.sym.BatchNorm(mx.sym.sin(body), fix_gamma=False, name=f"{name}_last")
    scores = mx.sym.FullyConnected(body, num_hidden=10, name="scores")
    loss = mx.sym.SoftmaxOutput(scores, name="softmax")
    return mx.sym.Group([loss, mx.sym.BlockGrad(body)]), {"data": (batch, 3, size, size)}


def inferred(make: Make, network: Network, batch: int, **options: object) -> Result:
    """What a module infers of batches of this size between training steps."""
    net, shapes = network
    seed()
    module = make(net, **options)
    module.bind(list(shapes.items()), [("softmax_label", (4,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    result = {}
    for step in range(4):
        data = mx.nd.random.normal(shape=(4, 3, 8, 8))
        module.forward(mx.io.DataBatch([data], [mx.nd.arange(4)]), is_train=True)
        module.backward()
        module.update()
        mx.nd.waitall()
        data = mx.nd.random.normal(shape=(batch, 3, 8, 8))
        module.forward(mx.io.DataBatch([data], [mx.nd.arange(batch)]), is_train=False)
        result[f"{step}"] = module.get_outputs()[1].asnumpy()
    return result


def picked_net() -> Network:
    """What comes behind the product takes no control dependency: MXNet has that for another."""
    body = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(1, 1), name="first")
    body = mx.sym.Convolution(body, num_filter=8, kernel=(1, 1), name="second")
    body = body * mx.sym.sigmoid(body)
    places = mx.sym.reshape(mx.sym.arange(4), (1, 4))
    body = mx.sym.gather_nd(body, places)
    scores = mx.sym.FullyConnected(mx.sym.BatchNorm(body, fix_gamma=False), num_hidden=10)
    loss = mx.sym.SoftmaxOutput(scores, name="softmax")
    heads = [mx.sym.BlockGrad(places), mx.sym.BlockGrad(body), loss]
    return mx.sym.Group(heads), {"data": (4, 3, 8, 8)}


def bound_to_infer(net: mx.sym.Symbol, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """MXNet's description of an executor."""
    traced = trace(net, shapes=shapes, realisation="packed")
    arrays = {n: mx.nd.empty(shape, dtype=traced.dtypes[n]) for n, shape in traced.shapes.items()}
    bound = bind_inference(net, ArraysToBind(mx.cpu(0), arrays, arrays), traced=traced)
    return str(bound.debug_str())


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_ops_that_take_no_control_dependency_follow_what_is_kept(realisation: str) -> None:
    network = picked_net()
    expected = inferred(mx.mod.Module, network, 4)
    assert not differing(expected, inferred(planned, network, 4, realisation=realisation))


def test_nothing_is_read_where_inference_writes_over_no_more_than_training() -> None:
    """A sum of a branch and of the shortcut behind it lies over the branch in both."""
    body = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(1, 1), name="first")
    branch = mx.sym.Convolution(body, num_filter=8, kernel=(1, 1), name="second")
    branch = mx.sym.BatchNorm(branch, fix_gamma=False, name="branch_bn")
    net = mx.sym.MakeLoss(mx.sym.BatchNorm(branch + body, name="bn"))
    assert READER not in bound_to_infer(net, {"data": (4, 3, 8, 8)})
    assert READER in bound_to_infer(*gated_net())


def test_what_is_read_is_read_by_an_operator_of_onednn() -> None:
    """Of what another one reads MXNet keeps a copy in the usual layout."""
    assert "shape_array" not in bound_to_infer(*gated_net())


def flat_net(*, is_written_over: bool) -> Network:
    """What is kept has the layout of pictures, which is that of no rows: no slice reads these."""
    pictures = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=16, kernel=(1, 1), name="one")
    rows = mx.sym.reshape_like(pictures, mx.sym.zeros((4, 1024)))
    rows = mx.sym.square(mx.sym.tanh(rows) if is_written_over else rows)
    loss = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(rows, num_hidden=10), name="softmax")
    others = mx.sym.BlockGrad(mx.sym.BatchNorm(pictures, fix_gamma=False, name="bn"))
    heads = [loss, mx.sym.BlockGrad(rows)] if is_written_over else [loss, others]
    return mx.sym.Group(heads), {"data": (4, 3, 8, 8)}


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("is_written_over", [False, True])
def test_what_is_kept_may_have_the_layout_of_another_shape(
    is_written_over: bool, realisation: str
) -> None:
    network = flat_net(is_written_over=is_written_over)
    expected = inferred(mx.mod.Module, network, 4)
    assert not differing(expected, inferred(planned, network, 4, realisation=realisation))


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("batch", [4, 2])
def test_what_gates_leave_rounds_as_in_an_executor_that_is_bound_to_train(
    batch: int, realisation: str
) -> None:
    """For a batch size that was not trained, too."""
    network = gated_net()
    expected = inferred(mx.mod.Module, network, batch)
    mine = inferred(planned, network, batch, realisation=realisation)
    assert not differing(expected, mine)


def recurrent_net(mode: str, *, has_loop: bool = False) -> Network:
    """A fused recurrent layer over the rows of pictures, and a loop behind it, if any."""
    rows = mx.sym.transpose(mx.sym.mean(mx.sym.Variable("data"), axis=1), axes=(1, 0, 2))
    gates = {"lstm": 4, "rnn_tanh": 1}[mode]
    nweights = gates * 8 * (8 + 8 + 2)
    weight = mx.sym.Variable("weight", shape=(1, nweights), init=mx.init.Uniform(1.0))
    states = ["state", "state_cell"] if mode == "lstm" else ["state"]
    begin = {name: mx.sym.zeros((1, 4, 8)) for name in states}
    how = {"mode": mode, "state_size": 8, "num_layers": 1}
    body = mx.sym.RNN(rows, mx.sym.reshape(weight, (-1,)), **begin, **how)
    if has_loop:
        body, _ = mx.sym.contrib.foreach(lambda row, _: (mx.sym.sin(row), []), body, [])
    body = mx.sym.transpose(body, axes=(1, 0, 2))
    loss = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=10), name="softmax")
    return mx.sym.Group([loss, mx.sym.BlockGrad(body)]), {"data": (4, 3, 8, 8)}


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
@pytest.mark.parametrize("mode", ["lstm", "rnn_tanh"])
def test_recurrent_layers_infer_as_in_an_executor_that_is_bound_to_train(
    mode: str, realisation: str
) -> None:
    network = recurrent_net(mode)
    expected = inferred(mx.mod.Module, network, 4)
    assert not differing(expected, inferred(planned, network, 4, realisation=realisation))


def test_no_gradient_is_wanted_beside_a_loop() -> None:
    """A loop would keep what each evaluation has computed, for a gradient that never comes."""
    assert WANTED in bound_to_infer(*recurrent_net("lstm"))
    assert WANTED not in bound_to_infer(*recurrent_net("lstm", has_loop=True))


def late_net() -> Network:
    """MXNet runs the sum after the branch that reads the same maximum; the plan's order, before."""

    def convolution(data: mx.sym.Symbol, size: int) -> mx.sym.Symbol:
        pad = (size // 2, size // 2)
        return mx.sym.Convolution(data, num_filter=8, kernel=(size, size), pad=pad)

    stem = convolution(mx.sym.Variable("data"), 3)
    other = convolution(stem, 1)
    largest = mx.sym.maximum(stem, other)
    late = mx.sym.BatchNorm(largest + other, fix_gamma=False)
    branch = convolution(largest, 3)
    body = mx.sym.sin(convolution(branch, 3)) + late
    body = mx.sym.BatchNorm(body + mx.sym.BatchNorm(branch, fix_gamma=False), fix_gamma=False)
    scores = mx.sym.FullyConnected(body, num_hidden=10)
    loss = mx.sym.SoftmaxOutput(scores, name="softmax")
    return mx.sym.Group([loss, mx.sym.BlockGrad(body)]), {"data": (4, 3, 8, 8)}


def test_the_last_reader_is_the_last_in_the_order_in_which_mxnet_trains() -> None:
    network = late_net()
    expected = inferred(mx.mod.Module, network, 4)
    assert not differing(expected, inferred(planned, network, 4))


def test_inference_keeps_what_has_more_dimensions_than_mxnet_slices() -> None:
    """A pixel shuffle."""
    body = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=16, kernel=(1, 1), name="first")
    body = mx.sym.reshape(mx.sym.sin(body), (-1, 4, 2, 2, 8, 8))
    body = mx.sym.transpose(mx.sym.tanh(mx.sym.cos(body)), axes=(0, 1, 4, 2, 5, 3))
    body = mx.sym.BatchNorm(mx.sym.reshape(body, (-1, 4, 16, 16)), fix_gamma=False)
    scores = mx.sym.FullyConnected(body, num_hidden=10)
    loss = mx.sym.SoftmaxOutput(scores, name="softmax")
    network = mx.sym.Group([loss, mx.sym.BlockGrad(body)]), {"data": (4, 3, 8, 8)}
    expected = inferred(mx.mod.Module, network, 4)
    assert not differing(expected, inferred(planned, network, 4))


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_what_is_kept_of_volumes_may_have_been_flattened(realisation: str) -> None:
    """A Flatten of more than four dimensions leaves the layout of the convolution's output."""
    volumes = mx.sym.reshape(mx.sym.Variable("data"), shape=(0, 0, 4, 4, 4))
    volumes = mx.sym.Convolution(volumes, num_filter=16, kernel=(3, 3, 3), pad=(1, 1, 1))
    rows = mx.sym.clip(mx.sym.Flatten(volumes), -1, 1)
    loss = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(rows, num_hidden=10), name="softmax")
    network = mx.sym.Group([loss, mx.sym.BlockGrad(rows)]), {"data": (4, 3, 8, 8)}
    expected = inferred(mx.mod.Module, network, 4)
    assert not differing(expected, inferred(planned, network, 4, realisation=realisation))


def test_a_monitor_sees_what_it_sees_in_mxnet() -> None:
    net, shapes = gated_net()
    seen = []
    for make in (mx.mod.Module, planned):
        module, monitor = make(net), mx.mon.Monitor(1, sort=True)
        module.bind(list(shapes.items()), [("softmax_label", (4,))])
        module.init_params()
        module.install_monitor(monitor)
        monitor.tic()
        data = mx.io.DataBatch([mx.nd.ones(shapes["data"])], [mx.nd.ones(4)])
        module.forward(data, is_train=False)
        seen.append([name for _, name, _ in monitor.toc()])
    assert seen[0] == seen[1]


def test_what_inference_must_not_write_over_counts() -> None:
    body = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=16, kernel=(1, 1), name="first")
    branch = mx.sym.Convolution(body, num_filter=16, kernel=(1, 1), name="second")
    branch = mx.sym.LeakyReLU(branch, act_type="prelu", name="slopes")
    net = mx.sym.MakeLoss(mx.sym.BatchNorm(body + branch, name="bn"))
    traced = trace(net, shapes={"data": (64, 16, 32, 32)}, realisation="packed")
    arrays = {n: mx.nd.empty(shape, dtype=traced.dtypes[n]) for n, shape in traced.shapes.items()}
    to_bind = ArraysToBind(mx.cpu(0), arrays, arrays)
    bound = bind_inference(net, to_bind, traced=traced)
    nmib = allocated_mib(bound.debug_str())
    assert sum(inference_need(traced, "cpu").blocks) >> 20 == nmib
    assert nmib > allocated_mib(bind_inference(net, to_bind).debug_str())


def scores(inputs: mx.sym.Symbol) -> mx.sym.Symbol:
    layer = mx.sym.FullyConnected(inputs, num_hidden=6, no_bias=True)
    return mx.sym.SoftmaxOutput(layer, name="softmax")


def label_shown() -> mx.sym.Symbol:
    outputs = scores(mx.sym.Variable("data"))
    return mx.sym.Group([outputs, outputs.get_internals()["softmax_label"]])


def shown_behind_a_loss() -> mx.sym.Symbol:
    """The first loss could update its layer before the second output is computed."""
    data = mx.sym.Variable("data")
    return mx.sym.Group([scores(data), mx.sym.BlockGrad(mx.sym.square(data))])


def shape_of_pooled() -> mx.sym.Symbol:
    body = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, flatten=False)
    pooled = mx.sym.Pooling(body, global_pool=True, pool_type="max", kernel=(1,), name="pool")
    places = mx.sym.BlockGrad(mx.sym.contrib.arange_like(pooled, axis=1))
    return mx.sym.Group([scores(body), places, mx.sym.BlockGrad(mx.sym.zeros_like(pooled))])


def outputs_of(make: Make, net: mx.sym.Symbol, dtype: str, **options: object) -> Result:
    """All outputs of training steps, and of inference between them."""
    seed()
    module = make(net, **options)
    shapes = {"data": (4, 3, 6), "softmax_label": (4,)}
    data, label = (mx.io.DataDesc(name, shape, dtype) for name, shape in shapes.items())
    module.bind([data], [label])
    module.init_params(mx.init.Xavier())
    module.init_optimizer()
    result = {}
    for step in range(4):
        data = mx.nd.random.normal(shape=(4, 3, 6), dtype=dtype)
        module.forward(mx.io.DataBatch([data], [mx.nd.arange(4)]), is_train=step % 2 == 0)
        if step % 2 == 0:
            module.backward()
            module.update()
        for place, array in enumerate(module.get_outputs()):
            result[f"{step}: {place}"] = array.asnumpy()
    return result


@pytest.mark.parametrize("realisation", ["packed", "explicit", "updating"])
@pytest.mark.parametrize(
    ("network", "dtype"),
    [
        (label_shown, "float32"),
        (shown_behind_a_loss, "float32"),
        (shape_of_pooled, "float32"),
        (shape_of_pooled, "float64"),
    ],
)
def test_outputs_beside_a_loss(
    network: Callable[[], mx.sym.Symbol], dtype: str, realisation: str
) -> None:
    expected = outputs_of(mx.mod.Module, network(), dtype)
    ours = outputs_of(planned, network(), dtype, realisation=realisation, budget="1GiB")
    assert not differing(expected, ours)
