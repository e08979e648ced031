"""Names that MXNet trains are no reason to refuse a network, nor to compute it otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from memplan.errors import ArgumentError
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.load import load_network
from memplan.mxnet.plan_file import load_plan, plan_text
from memplan.mxnet.trace import symbol_json
from memplan.planning.realisation import trace
from memplan.step.schedule import Schedule

ODD = {
    "beyond ASCII": "层é🦜",
    "quotes": "q\"u'o",
    "spaces": " a b ",
    "escapes": "a\tb\nc\rd\\e\\u0041",
    "controls": "\x01\x07\b\f\x1b\x7f",
    "separators": "\u2028\xa0",
    "brackets": "[0]{x}<op>(%s)",
    "commas": "a,b;c:d/e",
    "long": "x" * 300,
    "nobody's": "",
    # What memplan or MXNet adds to a network is called like these.
    "copy": "squash_mirror",
    "reader": "squash_unread",
    "numbered": "squash_0",
    "gradient": "squash_backward",
    "head": "_head_grad_0",
    "sum": "sum_grad",
    "variable": "first_weight",
    "other op": "second",
}

REALISATIONS = [("mirror", "memonger"), ("explicit", "memonger"), ("packed", "evict")]

DATA, LABEL = ("data", (4, 6)), ("softmax_label", (4,))


def network(name: str) -> mx.sym.Symbol:
    """A small network, one op of which is called ``name``."""
    body = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8, name="first")
    body = mx.sym.Activation(body, act_type="tanh", name="to be renamed")
    body = mx.sym.BatchNorm(mx.sym.FullyConnected(body, num_hidden=8, name="second"), name="norm")
    body = mx.sym.Activation(body, act_type="sigmoid", name="squash")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=4), name="softmax")
    data = symbol_json.parse(net)
    for node in data["nodes"]:
        if node["name"] == "to be renamed":
            node["name"] = name
    return symbol_json.load(data)


def trained(module: mx.mod.BaseModule) -> list[bytes]:
    """Outputs, weights and statistics of two steps."""
    module.bind([DATA], [LABEL])
    random = np.random.default_rng(0)
    (executor,) = module._exec_group.execs
    for _, array in sorted(executor.arg_dict.items()):
        array[:] = mx.nd.array(random.normal(size=array.shape))
    module.params_initialized = True
    module.init_optimizer(optimizer="sgd")
    batch = mx.io.DataBatch([mx.nd.array(random.normal(size=DATA[1]))], [mx.nd.arange(4)])
    for _ in range(2):
        module.forward(batch, is_train=True)
        module.backward()
        module.update()
    mx.nd.waitall()
    found = {**executor.arg_dict, **executor.aux_dict}
    inputs = (DATA[0], LABEL[0])
    weights = [found[name].asnumpy().tobytes() for name in sorted(found) if name not in inputs]
    return [module.get_outputs()[0].asnumpy().tobytes(), *weights]


def test_mxnet_takes_these_names_as_they_are() -> None:
    for name in ODD.values():
        names = [node["name"] for node in symbol_json.parse(network(name))["nodes"]]
        assert name in names
        assert "to be renamed" not in names


@pytest.mark.parametrize("name", ODD.values(), ids=ODD)
def test_odd_names_train_as_without_a_plan(name: str, tmp_path: Path) -> None:
    net = network(name)
    expected = trained(mx.mod.Module(net))
    for realisation, strategy in REALISATIONS:
        plan = memplan.plan(
            net, realisation=realisation, strategy=strategy, costs="roofline:cpu", data=DATA[1]
        )
        assert name in [op.name for op in plan.schedule.graph.ops]
        if realisation == "mirror":
            module: Any = mx.mod.Module(plan.symbol)
        else:
            module = memplan.mxnet.Module(net, plan=plan)
            file = tmp_path / "plan.json"
            file.write_text(plan_text(plan), encoding="utf-8")
            assert load_plan(file).schedule == plan.schedule
        assert trained(module) == expected, realisation
        assert plan.report_html()
        assert plan.explain()


def gradients(executor: Any) -> list[bytes]:
    """Of one step."""
    random = np.random.default_rng(0)
    for _, array in sorted(executor.arg_dict.items()):
        array[:] = mx.nd.array(random.normal(size=array.shape))
    executor.forward(is_train=True)
    executor.backward()
    found = executor.grad_dict
    return [found[name].asnumpy().tobytes() for name in ("first_weight", "second_weight")]


def test_a_name_may_have_the_sign_at_which_mxnet_splits_attributes() -> None:
    """MXNet's Module takes no such name, but its executors do."""
    net = network("a$b")
    with pytest.raises(ValueError, match="too many values"):
        net.attr_dict()
    expected = gradients(net.simple_bind(mx.cpu(), data=DATA[1]))
    for realisation, strategy in REALISATIONS:
        options = {"realisation": realisation, "strategy": strategy, "data": DATA[1]}
        plan = memplan.plan(net, costs="roofline:cpu", **options)
        if realisation == "mirror":
            executor = plan.symbol.simple_bind(mx.cpu(), data=DATA[1])
        else:
            executor = TrainExecutor(plan.trace, plan.schedule, ctx=mx.cpu())
        assert gradients(executor) == expected, realisation
    on_gpu = memplan.plan(net, ctx=mx.gpu(0), costs="roofline:v100", data=DATA[1])
    assert on_gpu.realisation == "mirror"


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_a_variable_may_be_named_as_the_gradient_of_an_output(realisation: str) -> None:
    """Beside which there is one: the output is no loss."""
    gradients = []
    for name in ("other", "_head_grad_0"):
        weight = mx.sym.Variable(name, shape=(4, 6))
        net = mx.sym.sin(mx.sym.tanh(mx.sym.Variable("data")) * weight)
        traced = trace(net, shapes={"data": (4, 6)}, realisation=realisation, grad_req="write")
        executor = TrainExecutor(traced, Schedule.unplanned(traced.graph), ctx=mx.cpu())
        executor.arg_dict["data"][:] = 0.3
        executor.arg_dict[name][:] = 0.5
        executor.forward(is_train=True)
        gradients.append([executor.grad_dict[n].asnumpy() for n in ("data", name)])
        assert len(executor.head_grads) == 1
    np.testing.assert_array_equal(*gradients)


@pytest.mark.parametrize("name", ["cls", "net", "job", "costs", "reserve", "time_limit"])
def test_an_input_may_have_the_name_of_an_option(name: str) -> None:
    body = mx.sym.tanh(mx.sym.FullyConnected(mx.sym.Variable(name), num_hidden=8))
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=3), name="softmax")
    module = memplan.mxnet.Module(net, data_names=[name], strategy="chen_sqrt")
    module.bind([(name, (4, 8))], [("softmax_label", (4,))])
    assert module.plan is not None
    assert module.plan.trace.shapes[name] == (4, 8)


@pytest.mark.parametrize("name", ["cls", "job"])
def test_names_that_no_option_has_are_inputs(name: str) -> None:
    body = mx.sym.Variable(name)
    for _ in range(6):
        body = mx.sym.tanh(mx.sym.FullyConnected(body, num_hidden=8) * 2)
    net = mx.sym.SoftmaxOutput(body, name="softmax")
    planned = memplan.plan(net, budget="95%", strategy="memonger", **{name: (64, 8)})
    assert planned.trace.shapes[name] == (64, 8)


@pytest.mark.parametrize("name", ["self", "partial"])
def test_a_name_that_mxnet_cannot_infer_by_is_said(name: str, tmp_path: Path) -> None:
    net = mx.sym.FullyConnected(
        mx.sym.Variable("data"), weight=mx.sym.Variable(name), num_hidden=3, name="odd"
    )
    with pytest.raises(ArgumentError, match=f"a variable of the network is called {name!r}"):
        memplan.plan(net, data=(2, 3))
    net.save(str(tmp_path / "net-symbol.json"))
    mx.nd.save(str(tmp_path / "net-0001.params"), {"arg:odd_bias": mx.nd.zeros(3)})
    with pytest.raises(ArgumentError, match=f"a variable of the network is called {name!r}"):
        load_network(str(tmp_path / "net-symbol.json"), shapes={"data": (2, 3)})


def test_what_mxnet_wrote_is_read_as_json_says() -> None:
    """Where both agree, the two are the same."""
    net = network("plain")
    assert symbol_json.parse(net) == json.loads(net.tojson())
    assert symbol_json.load(json.loads(net.tojson())).tojson() == net.tojson()
