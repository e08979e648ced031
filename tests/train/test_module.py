"""memplan's Module against mx.mod.Module in the same scripts: equal bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
import memplan.mxnet
from helpers.fitting import (
    CLASSES,
    NETWORKS,
    SGD,
    TWO,
    Make,
    Result,
    assert_same,
    batches,
    differing,
    fit,
    planned,
    seed,
    state,
    steps,
    wait,
)
from helpers.networks import two_headed_net
from helpers.planning import NEVER_SECONDS
from memplan.errors import ArgumentError


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_fit_score_and_predict(name: str, context: Any) -> None:
    module = assert_same(NETWORKS[name], context=context)
    assert isinstance(module, mx.mod.Module)
    assert module.plan.trace.shapes["data"][0] == (8 if context == mx.cpu() else 4)


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_kvstores(kvstore: str | None) -> None:
    assert_same(NETWORKS["residual"], context=TWO, kvstore=kvstore)


def test_the_checkmate_within_a_budget() -> None:
    network = NETWORKS["residual"]
    options = {"strategy": "checkmate", "budget": 0.85, "time_limit": NEVER_SECONDS}
    _, stock = fit(mx.mod.Module, network, 8, 8, 5)
    module, ours = fit(planned, network, 8, 8, 5, **options)
    assert not differing(stock, ours)
    first, last = module._plans.plans.values()
    assert first.schedule.recomputed
    assert first.total_nbytes <= first.budget_nbytes
    # The share is one of the whole batch: the last one needs no recomputation to fit.
    assert last.budget_nbytes == first.budget_nbytes
    assert not last.schedule.recomputed


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_gradients_of_inputs(grad_req: str, context: Any) -> None:
    network = NETWORKS["residual"]

    def run(make: Make) -> list[Result]:
        module = make(network[0], context=context)
        result = []
        for _ in steps(module, network, inputs_need_grad=True, grad_req=grad_req):
            gradients = module.get_input_grads()[0].asnumpy()
            result.append(state(module) | {"gradient of data": gradients})
        return result

    for stock, ours in zip(run(mx.mod.Module), run(planned), strict=True):
        assert not differing(stock, ours)
        assert np.any(ours["gradient of data"])


def test_fixed_parameters() -> None:
    network = NETWORKS["residual"]
    names = ["first_weight", "unit0_a_bn_gamma"]
    module = assert_same(network, fixed_param_names=names)
    assert [module.plan.trace.grad_req[name] for name in names] == ["null", "null"]


def test_nothing_to_train_is_mxnets_own() -> None:
    net, shapes = NETWORKS["noisy"]
    names = [name for name in net.list_arguments() if name not in ("data", "softmax_label")]
    module = planned(net, fixed_param_names=names)
    module.bind([("data", shapes["data"])], [("softmax_label", (8,))])
    assert module.plan is None
    assert isinstance(module._exec_group.execs[0], mx.executor.Executor)


def test_inference_alone_is_mxnets_own() -> None:
    # MXNet's CPU backend cannot bind the residual network for inference alone.
    network = NETWORKS["noisy"]
    trained, _ = fit(planned, network)
    found = []
    for make in (mx.mod.Module, planned):
        module = make(network[0])
        module.bind(batches(network).provide_data, for_training=False)
        module.set_params(*trained.get_params())
        found.append(module.predict(batches(network)).asnumpy())
    assert module.plan is None
    assert isinstance(module._exec_group.execs[0], mx.executor.Executor)
    assert np.array_equal(*found)


def test_its_executors_take_arrays_by_name() -> None:
    """As scripts hand them to MXNet's, which look at other outputs than those of the last batch."""
    network = NETWORKS["noisy"]
    batch = batches(network).next()
    [data], [label] = batch.data, batch.label
    found = []
    for make in (mx.mod.Module, planned):
        module = make(network[0])
        for _ in steps(module, network):
            executor = module._exec_group.execs[0]
            outputs = executor.forward(is_train=True, data=data, softmax_label=label)
            executor.backward()
            found += [outputs[0].asnumpy(), executor.grad_dict["scores_weight"].asnumpy()]
            found += [executor.forward(data=data.asnumpy()[::-1])[0].asnumpy()]
    half = len(found) // 2
    assert all(map(np.array_equal, found[:half], found[half:]))
    with pytest.raises(ArgumentError, match=r"'data' has the shape \(1, 20\)"):
        executor.forward(data=data[:1])


def test_checkpoints(tmp_path: Path) -> None:
    network = NETWORKS["residual"]

    def run(make: Make, load: Make, name: str) -> Result:
        prefix = str(tmp_path / name)
        module = make(network[0])
        fit(
            lambda *_: module,
            network,
            epoch_end_callback=mx.callback.module_checkpoint(module, prefix, 1, True),
        )
        again = load(prefix, 1, load_optimizer_states=True)
        again.fit(
            batches(network),
            begin_epoch=1,
            num_epoch=3,
            optimizer_params=SGD,
            batch_end_callback=wait,
        )
        return state(again)

    def load(*arguments: Any, **options: Any) -> Any:
        loaded = memplan.mxnet.Module.load(*arguments, strategy="chen_greedy:linear", **options)
        assert type(loaded) is memplan.mxnet.Module
        return loaded

    stock = run(mx.mod.Module, mx.mod.Module.load, "stock")
    assert not differing(stock, run(planned, load, "ours"))
    # What is saved is the user's network, for any script, and any script's can be loaded.
    assert not differing(stock, run(planned, mx.mod.Module.load, "for stock"))
    assert not differing(stock, run(mx.mod.Module, load, "of stock"))
    written = (tmp_path / "ours-symbol.json").read_bytes()
    assert written == (tmp_path / "stock-symbol.json").read_bytes()


def test_a_plan_made_before() -> None:
    network = NETWORKS["residual"]
    plan = memplan.plan(
        network[0],
        realisation="explicit",
        strategy="chen_sqrt",
        data=(8, *network[1]["data"][1:]),
    )
    _, stock = fit(mx.mod.Module, network)
    module, ours = fit(planned, network, plan=plan)
    assert module.plan is plan
    assert not differing(stock, ours)
    for options, culprit in (
        ({"fixed_param_names": ["first_weight"]}, "grad_req: 'first_weight'"),
        ({"context": TWO}, r"shapes: 'data' is \(4, 3, 16, 16\) here"),
    ):
        with pytest.raises(ArgumentError, match=culprit):
            fit(planned, network, plan=plan, **options)
    with pytest.raises(ArgumentError, match=r"another network: 'fc0_weight' here is 'first_w"):
        fit(planned, NETWORKS["noisy"], plan=plan)
    with pytest.raises(ArgumentError, match=r"takes .* budget of 100\.00 KiB"):
        fit(planned, network, plan=plan, budget="100 KiB")
    mirrored = memplan.plan(network[0], strategy="store_all", data=(8, 3, 16, 16))
    for wrong, culprit in ((mirrored, "explicit"), ("made before", "'made before'")):
        with pytest.raises(ArgumentError, match=culprit):
            planned(network[0], plan=wrong)


def test_a_plan_for_a_network_built_once_more() -> None:
    """MXNet goes on counting the names of ops that have none, unless it is told to begin anew."""

    def network() -> mx.sym.Symbol:
        scores = mx.sym.FullyConnected(mx.sym.tanh(mx.sym.Variable("data")), num_hidden=3, name="a")
        return mx.sym.SoftmaxOutput(scores, name="softmax")

    with mx.name.NameManager():
        options: dict[str, Any] = {"realisation": "packed", "strategy": "store_all"}
        plan = memplan.plan(network(), data=(2, 4), **options)
        second = network()
    with mx.name.NameManager():
        third = network()
    shapes = [("data", (2, 4))], [("softmax_label", (2,))]
    with pytest.raises(ArgumentError, match=r"'tanh1' here is 'tanh0' there\. .*NameManager\(\)"):
        planned(second, plan=plan).bind(*shapes)
    module = planned(third, plan=plan)
    module.bind(*shapes)
    assert module.plan is plan


def test_parameters_shared_with_another_module() -> None:
    network = NETWORKS["noisy"]

    def run(make: Make) -> list[Any]:
        first, second, third = (make(network[0]) for _ in range(3))
        small = batches(network, 4)
        for number, _ in enumerate(steps(first, network)):
            if not number:
                second.bind(small.provide_data, small.provide_label, shared_module=first)
                third.bind(small.provide_data, for_training=False, shared_module=first)
            second.forward_backward(small.next())
            second.update()
            small.reset()
        return [state(first), third.predict(small).asnumpy()]

    (stock, expected), (ours, found) = run(mx.mod.Module), run(planned)
    assert not differing(stock, ours)
    assert np.array_equal(expected, found)


@pytest.mark.parametrize("evaluating", [mx.mod.Module, planned], ids=["ordinary", "planned"])
@pytest.mark.parametrize("realisation", ["packed", "explicit"])
def test_another_module_evaluates_on_its_parameters(realisation: str, evaluating: Make) -> None:
    """Between a step and its update, too."""
    body = mx.sym.Variable("data")
    for i in range(3):
        body = mx.sym.Convolution(body, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{i}")
        body = mx.sym.relu(mx.sym.BatchNorm(body, name=f"norm{i}"))
    body = mx.sym.Pooling(body, global_pool=True, kernel=(1, 1), pool_type="avg")
    scores = mx.sym.FullyConnected(body, num_hidden=CLASSES, name="scores")
    network = mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 3, 12, 12)}

    def run(make: Make, other: Make = mx.mod.Module) -> list[Any]:
        first, second = make(network[0]), other(network[0])
        data, outputs = batches(network), []
        shapes = (data.provide_data, data.provide_label)
        first.bind(*shapes)
        seed()
        first.init_params(mx.init.Xavier())
        first.init_optimizer()
        second.bind(*shapes, for_training=False, shared_module=first)
        for batch in data:
            first.forward_backward(batch)
            second.forward(batch, is_train=False)
            first.update()
            outputs += [array.asnumpy() for array in second.get_outputs()]
        return [state(first), *outputs]

    ours = run(lambda net: planned(net, realisation=realisation, strategy="chen_sqrt"), evaluating)
    (stock, *expected), (found, *others) = run(mx.mod.Module), ours
    assert not differing(stock, found)
    assert all(map(np.array_equal, expected, others))


def test_several_losses_and_labels() -> None:
    net, shapes = two_headed_net(batch=8)
    net = mx.sym.Group([net[0], net[1], mx.sym.BlockGrad(net[2])])
    labels = {"early_label": (8, 2), "late_label": (8,)}

    def run(make: Make) -> Result:
        module = make(net, label_names=list(labels))
        module.bind(list(shapes.items()), list(labels.items()))
        seed()
        module.init_params(mx.init.Xavier())
        module.init_optimizer()
        random = np.random.default_rng(1)
        for _ in range(3):
            data = [mx.nd.array(random.normal(size=shape)) for shape in shapes.values()]
            label = [mx.nd.array(random.integers(0, 2, shape)) for shape in labels.values()]
            module.forward_backward(mx.io.DataBatch(data, label))
            module.update()
        outputs = {f"output {i}": array.asnumpy() for i, array in enumerate(module.get_outputs())}
        return state(module) | outputs

    assert not differing(run(mx.mod.Module), run(planned))


@pytest.mark.parametrize("sparse_weight", [False, True])
def test_sparse_gradients(sparse_weight: bool) -> None:
    weight = mx.sym.Variable("words_weight", stype="row_sparse" if sparse_weight else None)
    words = mx.sym.abs(mx.sym.Variable("data")) * 10
    body = mx.sym.Embedding(words, weight, input_dim=50, output_dim=8, sparse_grad=True)
    for _ in range(3):
        body = mx.sym.tanh(mx.sym.FullyConnected(body, num_hidden=8, flatten=False) * 2)
    scores = mx.sym.FullyConnected(mx.sym.mean(body, axis=1), num_hidden=CLASSES)
    network = mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 20)}
    module = assert_same(network)
    assert module._exec_group.execs[0].grad_dict["words_weight"].stype == "row_sparse"


@pytest.mark.parametrize("has_squares", [False, True])
def test_sparse_inputs_and_weights_stay_sparse(has_squares: bool) -> None:
    """MXNet's optimizers leave alone the rows of a sparse weight that have no gradient.

    With squares it is the factorization machine of MXNet's examples: MXNet has their sum for
    sparse weights only.
    """
    words = mx.sym.Variable("data", stype="csr")
    weight = mx.sym.Variable("first_weight", stype="row_sparse", shape=(20, 8))
    body = mx.sym.sparse.dot(words, weight)
    if has_squares:
        squares = mx.sym._internal._square_sum(weight, axis=1, keepdims=True)
        body = mx.sym.broadcast_sub(body * body, mx.sym.dot(words.square(), squares))
    for _ in range(3):
        body = mx.sym.FullyConnected(body, num_hidden=8)
        for _ in range(3):
            body = mx.sym.tanh(body * 2)
    body = mx.sym.FullyConnected(body, num_hidden=CLASSES)
    net = mx.sym.SoftmaxOutput(body, name="softmax")

    def run(make: Make) -> Result:
        module, random = make(net), np.random.default_rng(0)
        module.bind([("data", (8, 20))], [("softmax_label", (8,))])
        seed()
        module.init_params(mx.init.Xavier())
        module.init_optimizer(optimizer_params=SGD)
        for numbers in random.normal(size=(3, 8, 20)):
            data = mx.nd.array(np.where(numbers > 1.5, numbers, 0)).tostype("csr")
            module.forward_backward(mx.io.DataBatch([data], [mx.nd.arange(8)]))
            module.update()
        return state(module)

    assert not differing(run(mx.mod.Module), run(planned))


@pytest.mark.long
def test_a_network_of_the_zoo_in_a_whole_script(tmp_path: Path) -> None:
    """A padded last batch, callbacks, weights of another script, uneven devices, compression."""
    net = mx.gluon.model_zoo.vision.get_model("mobilenetv2_0.25", classes=CLASSES, prefix="net_")
    net = mx.sym.SoftmaxOutput(net(mx.sym.Variable("data")), name="softmax")
    random = np.random.default_rng(2)
    x = random.normal(size=(12, 3, 32, 32)).astype("float32")
    y = random.integers(0, CLASSES, 12).astype("float32")

    def run(make: Make) -> Result:
        options = {"work_load_list": [3, 5], "compression_params": {"type": "2bit"}}
        module = make(net, context=TWO, **options)
        prefix = str(tmp_path / type(module).__module__)
        seed()
        module.fit(
            mx.io.NDArrayIter(x, y, 8),
            mx.io.NDArrayIter(x, y, 8),
            kvstore="device",
            num_epoch=1,
            initializer=mx.init.Xavier(),
            optimizer="adam",
            eval_metric=mx.metric.CompositeEvalMetric(["acc", "ce"]),
            batch_end_callback=[mx.callback.Speedometer(8, 1), wait],
            epoch_end_callback=mx.callback.do_checkpoint(prefix),
        )
        result = state(module)
        other = make(net)
        other.bind([("data", (5, 3, 32, 32))], for_training=False)
        other.set_params(*mx.model.load_checkpoint(prefix, 1)[1:])
        result["predicted"] = other.predict(mx.io.NDArrayIter(x, None, 5)).asnumpy()
        other.bind([("data", x.shape)], [("softmax_label", y.shape)], force_rebind=True)
        other.init_optimizer(kvstore=None, optimizer_params=SGD)
        other.forward_backward(mx.io.DataBatch([mx.nd.array(x)], [mx.nd.array(y)]))
        other.update()
        return result | {f"tuned {name}": array for name, array in state(other).items()}

    assert not differing(run(mx.mod.Module), run(planned))


@pytest.mark.parametrize("context", [mx.cpu(0), mx.cpu(1)], ids=str)
def test_mxnet_leaves_the_ops_as_planned(context: mx.Context) -> None:
    """Its CPU backend joins ops in inference, which a training step looks like."""
    module = planned(NETWORKS["residual"][0], context=context)
    for batch in steps(module, NETWORKS["residual"]):
        module.forward(batch, is_train=False)
    executor = module._exec_group.execs[0]
    for description in (executor.debug_str(), executor._inference.debug_str()):
        assert "Op:Convolution" in description
        assert "sg_mkldnn" not in description
    assert {array.context for array in executor.outputs} == {context}
