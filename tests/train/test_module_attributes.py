"""Modules of networks whose ops carry attributes: of AttrScope, or shown to the user's code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import memplan
import memplan.mxnet
from helpers.fitting import CLASSES, differing, fit, planned
from helpers.networks import Network
from memplan.mxnet.plan_file import load_plan, plan_text


class Doubled(mx.operator.CustomOp):
    def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@mx.operator.register("doubled")
class DoubledProp(mx.operator.CustomOpProp):
    """Knows no attributes: MXNet crashes if it is shown one."""

    def __init__(self) -> None:
        super().__init__(need_top_grad=True)

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> Doubled:
        return Doubled()


def network(*, user_code: bool = False) -> Network:
    body = mx.sym.Variable("data")
    if user_code:
        body = mx.sym.Custom(body, op_type="doubled", name="first")
        # Two that differ in nothing but their names.
        body = mx.sym.Custom(body, op_type="doubled") + mx.sym.Custom(body, op_type="doubled")
    for i in range(4):
        body = mx.sym.FullyConnected(body, num_hidden=8, name=f"fc{i}")
        for _ in range(3):
            body = mx.sym.tanh(body * 2)
    if user_code:
        body = mx.sym.Custom(body, op_type="doubled", name="last")
    scores = mx.sym.FullyConnected(body, num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 20)}


def assert_same_by(realisation: str, net: Network) -> None:
    _, stock = fit(mx.mod.Module, net)
    module, ours = fit(functools.partial(planned, realisation=realisation), net)
    assert not differing(stock, ours)
    assert module.plan.schedule.recomputed


def test_user_code_is_shown_its_own_attributes_only() -> None:
    assert_same_by("packed", network(user_code=True))


def test_a_plan_with_user_code_is_written_and_watched(tmp_path: Path) -> None:
    """MXNet cannot write the Symbol of such a step."""
    net, shapes = network(user_code=True)
    options = {"strategy": "chen_greedy:linear", "realisation": "packed"}
    plan = memplan.plan(net, **options, **shapes)
    file = tmp_path / "plan.json"
    file.write_text(plan_text(plan), encoding="utf-8")
    read = load_plan(file)
    assert read.schedule == plan.schedule
    assert read.symbol.list_outputs() == plan.symbol.list_outputs()

    def seen(module: Any) -> set[str]:
        module.bind([("data", (8, 20))], [("softmax_label", (8,))])
        module.init_params()
        monitor = mx.mon.Monitor(1, pattern=".*output")
        module.install_monitor(monitor)
        monitor.tic()
        module.forward_backward(mx.io.DataBatch([mx.nd.ones((8, 20))], [mx.nd.zeros(8)]))
        return {name for _, name, _ in monitor.toc()}

    # MXNet shows the arrays of gradients that it has not computed, too: of the data, of the label.
    not_computed = {"fc0_backward_output0", "softmax_backward_output1"}
    assert seen(memplan.mxnet.Module(net, plan=read)) == seen(mx.mod.Module(net)) - not_computed


@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_groups_of_contexts_without_contexts(realisation: str) -> None:
    """As MXNet does, a plan leaves them alone where ``group2ctxs`` names no contexts."""
    with mx.AttrScope(ctx_group="front"):
        placed = network()
    assert_same_by(realisation, placed)
