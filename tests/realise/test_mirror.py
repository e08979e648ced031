"""MXNet's mirroring: predicted exactly, written on a copy, and never where it computes wrongly."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from itertools import zip_longest

import mxnet as mx
import pytest
from mxnet.gluon.model_zoo import vision

from helpers.amounts import long_except
from helpers.executors import ops
from helpers.networks import (
    Network,
    dropout_net,
    hinted_resnet,
    residual_net,
    two_headed_net,
    unrolled_lstm,
)
from helpers.operator_runs import Flags, Symbol, by_name, random_flags
from helpers.planning import flagged
from memplan.memory.blocks import allocate
from memplan.mxnet.realise.measure import executor_description
from memplan.mxnet.realise.mirror import Mirror, annotate
from memplan.mxnet.trace.build import Trace, trace
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.probe import allocated_mib
from memplan.step.mirroring import flaggable, mirror

V = mx.sym.Variable


def zoo(name: str) -> Network:
    scores = getattr(vision, name)()(mx.sym.Variable("data"))
    size = 299 if name == "inception_v3" else 224
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 3, size, size)}


def twins() -> Network:
    """Equal ops on equal inputs, which MXNet merges, and one array that is two gradients."""
    shape = (1 << 20, 4)
    body = V("data") * V("scale", shape=shape)
    first, second = (mx.sym.sin(mx.sym.exp(body)) for _ in "ab")
    body = first * second + V("left", shape=shape) + V("right", shape=shape)
    return mx.sym.tanh(mx.sym.tanh(body)), {"data": shape}


OWN: dict[str, Callable[[], Network]] = {
    "residual": lambda: residual_net(batch=256, size=32),
    "hinted": lambda: hinted_resnet(batch=256, size=32),
    "dropout": lambda: dropout_net(batch=1 << 17),
    "two heads": lambda: two_headed_net(batch=1024, size=32),
    "lstm": lambda: unrolled_lstm(batch=1 << 14),
    "twins": twins,
}
NETWORKS = OWN | {
    name: lambda name=name: zoo(name)
    for name in """alexnet densenet121 inception_v3 mobilenet0_25 mobilenet_v2_0_25 resnet18_v1
    resnet50_v2 squeezenet1_1 vgg11_bn""".split()
}


def executed(traced: Trace, flags: Flags) -> list[tuple[str, str]]:
    """Operator and name of every step of the mirrored schedule, as MXNet names them."""
    flagged = {traced.nodes[op].name for op in flags}

    def name(node: Node) -> str:
        if node.forward is not None:
            base = node.forward.name
            renamed = f"{base}_mirror" if base in flagged else base
        elif node.name.endswith("_copy"):  # of a gradient that is wanted twice
            base, renamed = node.inputs[0][0].name, name(node.inputs[0][0])
        else:
            return node.name
        return renamed + node.name.removeprefix(base)

    seen: set[int] = set()
    result = []
    for op in mirror(traced.graph, flags).ops:
        node = traced.nodes[op]
        result.append((node.op, name(node) + ("_mirror" if op in seen else "")))
        seen.add(op)
    return result


@pytest.mark.parametrize(
    "name", long_except(NETWORKS, [*OWN, "mobilenet0_25", "resnet18_v1", "squeezenet1_1"])
)
def test_predicted_as_mxnet_executes_and_allocates(name: str) -> None:
    symbol, shapes = NETWORKS[name]()
    traced = trace(symbol, shapes=shapes)
    draw = random.Random(name)
    for flags in (frozenset(flaggable(traced.graph)), *(random_flags(traced, draw) for _ in "abc")):
        description = executor_description(annotate(traced, flags), traced)
        pairs = zip_longest(executed(traced, flags), ops(description))
        assert all(predicted == actual for predicted, actual in pairs)
        total = allocated_mib(description)
        assert total >= 20, "too small to tell"
        assert allocate(mirror(traced.graph, flags)).reported_nbytes >> 20 == total


# --- What the annotator writes --------------------------------------------------------------------


def attributes(symbol: Symbol) -> dict[str, dict[str, str]]:
    return {node["name"]: node.get("attrs", {}) for node in json.loads(symbol.tojson())["nodes"]}


def test_the_users_symbol_is_untouched() -> None:
    symbol, shapes = hinted_resnet()
    before = symbol.tojson()
    traced = trace(symbol, shapes=shapes)
    plain = traced.symbol.tojson()
    planned = annotate(traced, by_name(traced, "last_bn", "last_leaky"))
    assert flagged(planned) == {"last_bn", "last_leaky"}
    assert symbol.tojson() == before
    assert traced.symbol.tojson() == plain


def test_hints_are_kept() -> None:
    symbol, shapes = hinted_resnet()
    traced = trace(symbol, shapes=shapes)
    planned = annotate(traced, frozenset(flaggable(traced.graph)))
    hints = {name for name, attrs in attributes(planned).items() if "__mirror_stage__" in attrs}
    assert hints == {op.name for op in traced.graph.ops if op.mirror_stage == "True"} != set()


def test_flags_of_the_user_give_way_to_the_plan() -> None:
    symbol, shapes = dropout_net()
    symbol.get_internals()["relu0_output"]._set_attr(force_mirroring="True")
    traced = trace(symbol, shapes=shapes)
    assert flagged(annotate(traced, by_name(traced, "relu1"))) == {"relu1"}


def test_merged_ops_are_flagged_alike() -> None:
    """MXNet merges equal ops only if their attributes are equal too."""
    symbol, shapes = twins()
    traced = trace(symbol, shapes=shapes)
    (merged,) = [op for op in range(traced.graph.nforward) if traced.nodes[op].op == "sin"]
    assert len(traced.sources[merged]) == 2
    planned = annotate(traced, frozenset({merged}))
    assert len(flagged(planned)) == 2
    executed_ops = [op for op, _ in ops(executor_description(planned, traced))]
    assert executed_ops.count("exp") == 1
    assert executed_ops.count("sin") == 2  # the op and its copy


def test_what_undoes_a_plan_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol, shapes = residual_net()
    traced = trace(symbol, shapes=shapes)
    expected = executed(traced, frozenset())
    assert ops(executor_description(annotate(traced, frozenset()), traced)) == expected
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    with pytest.warns(UserWarning, match="MXNET_BACKWARD_DO_MIRROR is set"):
        Mirror().check_environment()
    planned = annotate(traced, frozenset())
    assert ops(executor_description(planned, traced)) != expected
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Mirror().check_environment()
    assert ops(executor_description(planned, traced)) == expected
