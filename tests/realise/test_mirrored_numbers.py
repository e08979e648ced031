"""What mirrored networks compute is what MXNet computes; where a copy must be read, it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import mxnet as mx
import pytest

from helpers.networks import (
    Network,
    dropout_net,
    hinted_resnet,
    residual_net,
    two_headed_net,
    unrolled_lstm,
)
from helpers.operator_calls import IMAGE, TABLE, S, V, shelled
from helpers.operator_runs import (
    SEED,
    assert_mirrored_is,
    by_name,
    random_flags,
    some_flags,
    training_run,
)
from memplan.mxnet.profile import profile
from memplan.mxnet.realise.measure import executor_description
from memplan.mxnet.realise.mirror import annotate, unread_ops
from memplan.mxnet.trace.build import trace
from memplan.mxnet.trace.flags import without_flags
from memplan.step.mirroring import flaggable


@pytest.mark.parametrize(
    "network",
    [residual_net, hinted_resnet, dropout_net, two_headed_net, unrolled_lstm],
    ids=lambda network: network.__name__,
)
def test_networks_compute_the_same(network: Callable[[], Network]) -> None:
    symbol, shapes = network()
    traced = trace(symbol, shapes=shapes)
    draw = random.Random(SEED)
    everything = frozenset(flaggable(traced.graph))
    flags = iter([everything, *(random_flags(traced, draw) for _ in range(5))])
    assert_mirrored_is(training_run(symbol, traced), traced, flags)


def test_begin_states_without_a_batch_size_can_be_bound_with_any_flags() -> None:
    cell = mx.rnn.LSTMCell(8, prefix="l_")
    outputs, _ = cell.unroll(3, V("data"), layout="NTC", merge_outputs=False)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(outputs[-1], num_hidden=5), name="softmax")
    traced = trace(net, shapes={"data": (4, 3, 6)})
    candidates = flaggable(traced.graph)
    states = [i for i, op in enumerate(traced.graph.ops) if op.kind == "_zeros"]
    assert states
    assert not set(states) & set(candidates)
    for seed in range(8):
        draw = random.Random(seed)
        flags = frozenset(op for op in candidates if draw.random() < 0.7)
        executor_description(annotate(traced, flags), traced)


DOUBLE = {"data": "float64", "scale": "float64"}
Symbol = mx.sym.Symbol
UNREAD = ("convolution", "grouped", "depthwise", "deconvolution", "convolution, 1D")


@pytest.mark.parametrize("name", UNREAD)
def test_copies_that_must_be_read(name: str) -> None:
    """MXNet's own convolution, which oneDNN does not compute in float64, must write its output."""
    symbol, shapes = shelled(*TABLE[name])
    traced = trace(symbol, shapes=shapes, type_dict=DOUBLE)
    (op,) = (i for i in flaggable(traced.graph) if "onvolution" in traced.graph.ops[i].kind)
    assert unread_ops(traced, frozenset({op}), on_gpu=False) == {op}
    reader = next(i for i in flaggable(traced.graph) if traced.graph.ops[i].name == "reader")
    assert not unread_ops(traced, frozenset({op, reader}), on_gpu=False)
    assert_mirrored_is(training_run(symbol, traced), traced, some_flags(traced))


def test_what_must_be_read_is_told_by_the_kernels_of_the_time_of_planning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan makes its Symbol when that is asked for, and the environment may be another then."""
    symbol, shapes = shelled(*TABLE["convolution"])
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    traced = trace(symbol, shapes=shapes)
    monkeypatch.delenv("MXNET_MKLDNN_ENABLED")
    (op,) = (i for i in flaggable(traced.graph) if "onvolution" in traced.graph.ops[i].kind)
    assert unread_ops(traced, frozenset({op}), on_gpu=False) == {op}


def test_mxnet_fails_where_such_a_copy_is_not_read() -> None:
    """Or there would be no need for a reader."""
    symbol, shapes = shelled(*TABLE["convolution"])
    traced = trace(symbol, shapes=shapes, type_dict=DOUBLE)
    (op,) = (i for i in flaggable(traced.graph) if traced.graph.ops[i].kind == "Convolution")
    traced.symbol.get_internals()[traced.graph.ops[op].name + "_output"]._set_attr(
        force_mirroring="True"
    )
    with pytest.raises(mx.base.MXNetError, match="kWriteTo"):
        training_run(traced.symbol, traced)


def _pooling(data: Symbol) -> Symbol:
    """MXNet's own, as oneDNN does not compute sums."""
    return S.Pooling(data, kernel=(2, 2), pool_type="sum", name="pool")


def test_a_pooling_of_which_others_read_only_the_shape_can_be_flagged() -> None:
    """The backward op of a flagged one reads the output of the copy."""
    data = S.broadcast_mul(V("data"), V("scale", shape=(1, 1, 1, 1)))
    symbol = S.broadcast_add(S.zeros_like(_pooling(data)), S.mean(S.sin(data), keepdims=True))
    traced = trace(symbol, shapes={"data": IMAGE})
    alone = by_name(traced, "pool")
    assert alone <= set(flaggable(traced.graph))
    assert_mirrored_is(training_run(symbol, traced), traced, iter([alone, *some_flags(traced)]))


def test_a_pooling_of_whose_copy_only_the_shape_is_read_can_be_flagged() -> None:
    """It has no backward op, as nobody wants the gradient of the data."""
    pooled = _pooling(V("data"))
    like = S.ones_like(pooled, name="like")
    product = S.broadcast_mul(like, V("scale", shape=(1, 1, 1, 1)), name="product")
    symbol = S.Group([S.sin(pooled), S.sin(product)])
    traced = trace(symbol, shapes={"data": IMAGE}, grad_req={"data": "null", "scale": "write"})
    flags = by_name(traced, "pool", "like", "product")
    assert unread_ops(traced, flags, on_gpu=False) == by_name(traced, "pool")
    assert_mirrored_is(training_run(symbol, traced), traced, iter([flags]))


def test_a_pooling_whose_output_others_read_needs_no_reader() -> None:
    pooled = _pooling(S.broadcast_mul(V("data"), V("scale", shape=(1, 1, 1, 1))))
    for symbol in (S.sin(pooled), S.BlockGrad(pooled), S.Group([S.zeros_like(pooled), pooled])):
        traced = trace(symbol, shapes={"data": IMAGE})
        assert not unread_ops(traced, frozenset(flaggable(traced.graph)), on_gpu=False)


def test_outputs_keep_their_names_behind_a_reader() -> None:
    body = S.broadcast_mul(V("data"), V("scale", shape=(1, 1, 1, 1)))
    symbol = S.Convolution(body, kernel=(3, 3), num_filter=3, name="last")
    traced = trace(symbol, shapes={"data": IMAGE}, type_dict=DOUBLE)
    (op,) = by_name(traced, "last")
    planned = annotate(traced, frozenset({op}))
    assert planned.list_outputs() == ["last_output"]
    assert planned.list_arguments() == symbol.list_arguments()
    assert_mirrored_is(training_run(symbol, traced), traced, iter([frozenset({op})]))


def test_profile_needs_no_readers() -> None:
    symbol, shapes = residual_net(units=1)
    table = profile(symbol, ctx=mx.cpu(), type_dict={"data": "float64"}, repeats=1, **shapes)
    graph = trace(symbol, shapes=shapes, type_dict={"data": "float64"}).graph
    assert table.seconds.keys() == {op.signature for op in graph.ops}


def test_a_plan_with_readers_is_planned_again_as_the_network_it_was() -> None:
    """Else every planning would leave its identity ops, and other names, to the next one."""
    symbol, shapes = shelled(*TABLE["convolution"])
    traced = trace(symbol, shapes=shapes, type_dict=DOUBLE)
    (op,) = (i for i in flaggable(traced.graph) if "onvolution" in traced.graph.ops[i].kind)
    planned = annotate(traced, frozenset({op}))
    name = traced.graph.ops[op].name
    assert f"{name}_unread_output" in planned.get_internals().list_outputs()
    assert without_flags(mx.sym.load_json(planned.tojson())).tojson() == symbol.tojson()
