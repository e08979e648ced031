"""memplan's Module against mx.mod.Module in the same scripts: equal bit for bit."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
import memplan.mxnet
from helpers.networks import Network, residual_net, two_headed_net
from memplan.errors import ArgumentError, BudgetError, UsageError
from memplan.mxnet.realise.explicit import training_symbol
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.strategies import Outcome, Status

Make = Callable[..., Any]
Result = dict[str, np.ndarray]

CLASSES = 10
MIB = 1 << 20
TWO = [mx.cpu(0), mx.cpu(1)]
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}


def planned(net: mx.sym.Symbol, **options: Any) -> memplan.mxnet.Module:
    """A Module whose plans are the least memory that a quick strategy finds."""
    return memplan.mxnet.Module(net, **{"strategy": "chen_greedy_linear", **options})


class Batches(mx.io.DataIter):
    """The same random numbers in every pass, in batches of these sizes; the first is announced."""

    def __init__(self, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__(sizes[0])
        random = np.random.default_rng(5)
        self.data = [random.normal(size=(size, *shape[1:])).astype("float32") for size in sizes]
        self.labels = [random.integers(0, CLASSES, size).astype("float32") for size in sizes]
        self.provide_data = [mx.io.DataDesc("data", (sizes[0], *shape[1:]))]
        self.provide_label = [mx.io.DataDesc("softmax_label", (sizes[0],))]
        self.reset()

    def reset(self) -> None:
        self.position = 0

    def next(self) -> mx.io.DataBatch:
        if self.position == len(self.data):
            raise StopIteration
        data, label = self.data[self.position], self.labels[self.position]
        self.position += 1
        return mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)], pad=0)


def batches(network: Network, *sizes: int) -> Batches:
    return Batches(network[1]["data"], sizes or (8, 8))


def seed() -> None:
    mx.random.seed(3)
    np.random.seed(3)


def wait(_: Any = None) -> None:
    """Until all is computed: MXNet lets moving statistics be read before they are written."""
    mx.nd.waitall()


def state(module: mx.mod.Module) -> Result:
    """Weights and auxiliary states."""
    wait()
    arguments, states = module.get_params()
    return {name: array.asnumpy() for name, array in {**arguments, **states}.items()}


def differing(one: Result, other: Result) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not np.array_equal(one[name], other[name])]


def fit(make: Make, network: Network, *sizes: int, **options: Any) -> tuple[Any, Result]:
    """The module that a script trains, and all that the script sees."""
    fitting = {"kvstore", "monitor", "epoch_end_callback"}
    module = make(network[0], **{k: v for k, v in options.items() if k not in fitting})
    data = batches(network, *sizes)
    metrics: list[float] = []

    def note(parameters: Any) -> None:
        wait()
        metrics.extend(value for _, value in parameters.eval_metric.get_name_value())

    seed()
    module.fit(
        data,
        eval_data=batches(network, 6, 6),
        eval_metric=["acc", "ce"],
        num_epoch=2,
        initializer=mx.init.Xavier(),
        optimizer_params=SGD,
        batch_end_callback=note,
        eval_batch_end_callback=note,
        **{k: v for k, v in options.items() if k in fitting},
    )
    score = [value for _, value in module.score(data, ["acc", "ce"])]
    result = state(module) | {"metrics": np.array(metrics + score)}
    result["predicted"] = module.predict(batches(network, 8)).asnumpy()
    return module, result


def assert_same(network: Network, *sizes: int, **options: Any) -> memplan.mxnet.Module:
    """Both modules see the same in the same script, and ours recomputes."""
    _, stock = fit(mx.mod.Module, network, *sizes, **options)
    module, ours = fit(planned, network, *sizes, **options)
    assert not differing(stock, ours)
    assert module.plan is not None
    assert module.plan.schedule.recomputed
    return module


def noisy_net(layers: int = 6) -> Network:
    """Dropout between layers that are worth recomputing."""
    body = mx.sym.Variable("data")
    for i in range(layers):
        body = mx.sym.FullyConnected(body, num_hidden=8, name=f"fc{i}")
        for _ in range(3):
            body = mx.sym.tanh(body * 2)
        body = mx.sym.Dropout(body, p=0.3, name=f"dropout{i}")
    scores = mx.sym.FullyConnected(body, num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax"), {"data": (8, 20)}


NETWORKS = {"residual": residual_net(units=2), "noisy": noisy_net()}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_fit_score_and_predict(name: str, context: Any) -> None:
    module = assert_same(NETWORKS[name], context=context)
    assert isinstance(module, mx.mod.Module)
    assert module.plan.trace.shapes["data"][0] == (8 if context == mx.cpu() else 4)


@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_a_smaller_last_batch(context: Any) -> None:
    network = NETWORKS["residual"]
    module = assert_same(network, 8, 8, 5, context=context)
    sizes = {plan.trace.shapes["data"][0] for plan in module._plans.made.values()}
    # Evaluation has seen batches of 6, and of 3 per device, which were not planned unless trained.
    assert sizes == ({8, 5} if context == mx.cpu() else {4, 3, 2})


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_kvstores(kvstore: str | None) -> None:
    assert_same(NETWORKS["residual"], context=TWO, kvstore=kvstore)


def test_the_checkmate_within_a_budget() -> None:
    network = NETWORKS["residual"]
    options = {"strategy": "checkmate", "budget": 0.8, "time_limit": 3}
    _, stock = fit(mx.mod.Module, network, 8, 8, 5)
    module, ours = fit(planned, network, 8, 8, 5, **options)
    assert not differing(stock, ours)
    first, last = module._plans.made.values()
    assert first.schedule.recomputed
    assert first.total_nbytes <= first.budget_nbytes
    # The share is one of the whole batch: the last one needs no recomputation to fit.
    assert last.budget_nbytes == first.budget_nbytes
    assert not last.schedule.recomputed


def steps(module: Any, network: Network, *sizes: int, **options: Any) -> Iterator[Any]:
    """Bound, initialised and trained batch by batch."""
    data = batches(network, *sizes)
    module.bind(data.provide_data, data.provide_label, **options)
    seed()
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params=SGD)
    for batch in data:
        module.forward_backward(batch)
        module.update()
        yield batch


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("context", [mx.cpu(), TWO], ids=["one", "two"])
def test_gradients_of_inputs(grad_req: str, context: Any) -> None:
    network = NETWORKS["residual"]

    def run(make: Make) -> list[Result]:
        module = make(network[0], context=context)
        found = []
        for _ in steps(module, network, inputs_need_grad=True, grad_req=grad_req):
            gradients = module.get_input_grads()[0].asnumpy()
            found.append(state(module) | {"gradient of data": gradients})
        return found

    for stock, ours in zip(run(mx.mod.Module), run(planned), strict=True):
        assert not differing(stock, ours)
        assert np.any(ours["gradient of data"])


def test_added_gradients_outlive_a_change_of_shape() -> None:
    network = NETWORKS["residual"]

    def run(make: Make) -> Result:
        module = make(network[0])
        for _ in steps(module, network, 8, 5, 8, grad_req="add"):
            pass
        return state(module)

    assert not differing(run(mx.mod.Module), run(planned))


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
        loaded = memplan.mxnet.Module.load(*arguments, strategy="chen_greedy_linear", **options)
        assert type(loaded) is memplan.mxnet.Module
        return loaded

    stock = run(mx.mod.Module, mx.mod.Module.load, "stock")
    assert not differing(stock, run(planned, load, "ours"))
    # What is saved is the user's network, for any script, and any script's can be loaded.
    assert not differing(stock, run(planned, mx.mod.Module.load, "for stock"))
    assert not differing(stock, run(mx.mod.Module, load, "of stock"))
    written = (tmp_path / "ours-symbol.json").read_bytes()
    assert written == (tmp_path / "stock-symbol.json").read_bytes()


@pytest.mark.parametrize("sizes", [(8, 8), (8, 5)], ids=["equal", "smaller"])
def test_monitors(sizes: tuple[int, ...]) -> None:
    """They see every op that MXNet runs without a plan, and nothing else."""
    network = NETWORKS["residual"]
    seen: list[list[tuple[int, str, str]]] = []

    class Monitor(mx.mon.Monitor):
        def toc_print(self) -> None:
            seen[-1].extend(self.toc())

    for make in (mx.mod.Module, planned):
        seen.append([])
        fit(make, network, *sizes, monitor=Monitor(1))
    assert [row[:2] for row in sorted(seen[0])] == [row[:2] for row in sorted(seen[1])]
    # Gradients of data and labels are not wanted, and what lies there is not computed.
    unlike = {"first_backward_output0", "softmax_backward_output1"}
    stock, ours = ({row for row in rows if row[1] not in unlike} for rows in seen)
    assert any(name.endswith("relu_output") for _, name, _ in stock)
    assert any("bn_backward_output" in name for _, name, _ in stock)
    assert stock == ours


def _before(graph: TrainingGraph, op: int, again: set[int | None]) -> list[int]:
    source = graph.ops[op].differentiates
    return [source] if source is not None and source in again else []


def test_monitors_of_anchors() -> None:
    """An op that a plan adds has outputs of which no statistics can be taken."""
    body = mx.sym.Variable("data")
    for i in range(4):
        norm = mx.sym.LayerNorm(body, name=f"norm{i}")
        body = body + mx.sym.FullyConnected(mx.sym.relu(norm), num_hidden=12, name=f"fc{i}")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=CLASSES), name="softmax")
    plan = memplan.plan(net, realisation="explicit", strategy="store_all", data=(8, 12))
    # Its mean and deviation are recomputed, its main output is not needed again.
    graph = plan.trace.graph
    again = {next(op.differentiates for op in graph.ops if op.kind == "_backward_LayerNorm")}
    steps = [i for op in range(len(graph.ops)) for i in (*_before(graph, op, again), op)]
    schedule = Schedule.sequence(graph, steps)
    symbol = training_symbol(plan.trace, schedule)
    module = planned(net, plan=dataclasses.replace(plan, schedule=schedule, symbol=symbol))
    module.bind([("data", (8, 12))], [("softmax_label", (8,))])
    assert "anchor" in module._exec_group.execs[0].debug_str()
    module.init_params()
    dtypes = []
    monitor = mx.mon.Monitor(1, stat_func=lambda array: dtypes.append(array.dtype) or array)
    module.install_monitor(monitor)
    monitor.tic()
    module.forward_backward(batches((net, {"data": (8, 12)})).next())
    assert set(dtypes) == {np.float32}


def test_set_params_on_shapes_that_are_not_trained() -> None:
    """They need no plan."""
    network = NETWORKS["residual"]
    module, _ = fit(planned, network)
    nplans = len(module._plans.made)
    values = module.get_params()
    module.forward(batches(network, 2).next(), is_train=False)
    module.set_params(*values)
    assert module.output_shapes == [("softmax_output", (2, CLASSES))]
    assert len(module._plans.made) == nplans


def test_plans_are_remembered() -> None:
    network = NETWORKS["residual"]
    module = planned(network[0], context=TWO)
    for _ in steps(module, network, 8, 4, 8, 4):
        pass
    whole, half = module._plans.made.values()
    assert module.plan is whole
    module.bind(
        batches(network, 4).provide_data, batches(network, 4).provide_label, force_rebind=True
    )
    assert module.plan is half


def test_a_plan_made_before() -> None:
    network = NETWORKS["residual"]
    made = memplan.plan(
        network[0],
        realisation="explicit",
        strategy="chen_sqrt",
        data=(8, *network[1]["data"][1:]),
    )
    _, stock = fit(mx.mod.Module, network)
    module, ours = fit(planned, network, plan=made)
    assert module.plan is made
    assert not differing(stock, ours)
    for options, culprit in (
        ({"fixed_param_names": ["first_weight"]}, "grad_req: 'first_weight'"),
        ({"context": TWO}, r"shapes: 'data' is \(4, 3, 16, 16\) here"),
    ):
        with pytest.raises(ArgumentError, match=culprit):
            fit(planned, network, plan=made, **options)
    with pytest.raises(ArgumentError, match="network"):
        fit(planned, NETWORKS["noisy"], plan=made)
    with pytest.raises(ArgumentError, match=r"takes .* budget of 100\.00 KiB"):
        fit(planned, network, plan=made, budget="100 KiB")
    mirrored = memplan.plan(network[0], strategy="store_all", data=(8, 3, 16, 16))
    for wrong, culprit in ((mirrored, "explicit"), ("made before", "'made before'")):
        with pytest.raises(ArgumentError, match=culprit):
            planned(network[0], plan=wrong)


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


def test_shapes_share_their_memory() -> None:
    def resident_mib() -> float:
        mx.nd.waitall()
        return (
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
        )

    network = residual_net(size=64, filters=32)
    module = planned(network[0])
    found = [resident_mib() for _ in steps(module, network, 16, 12)]
    first, second = (plan.allocated_nbytes / MIB for plan in module._plans.made.values())
    assert second > 0.5 * first > 20
    assert found[1] - found[0] < 0.75 * second


def test_binding_again_frees_the_memory_before() -> None:
    network = NETWORKS["residual"]
    module = planned(network[0])
    for batch in steps(module, network, 8, 5):
        module.forward(batch, is_train=False)
    small = batches(network, 4)
    group = module._exec_group
    held = [weakref.ref(executor._training) for executor in (*group.execs, *group._default_execs)]
    del group
    gc.disable()
    try:
        module.bind(small.provide_data, small.provide_label, force_rebind=True)
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


def test_states_outlive_a_change_of_shape() -> None:
    """Those whose shape is not that of the batch."""
    net, shapes = NETWORKS["residual"]
    net = mx.sym.broadcast_add(net, mx.sym.Variable("state", shape=(1, CLASSES)))

    def run(make: Make) -> list[np.ndarray]:
        module = make(mx.sym.MakeLoss(net), state_names=["state"])
        data = batches((net, shapes), 8, 5)
        module.bind(data.provide_data, data.provide_label)
        seed()
        module.init_params(mx.init.Xavier())
        module.set_states(value=2)
        outputs = []
        for batch in data:
            module.forward_backward(batch)
            outputs.append(module.get_outputs()[0].asnumpy())
        return outputs

    stock, ours = run(mx.mod.Module), run(planned)
    assert all(map(np.array_equal, stock, ours))
    assert np.all(ours[1] >= 2)


def test_inference_takes_the_memory_of_the_gradients() -> None:
    """They are gone then, which is said."""
    network = NETWORKS["residual"]
    module = planned(network[0])
    for batch in steps(module, network):
        module.forward_backward(batch)
        module.forward(batch, is_train=False)
    with pytest.raises(UsageError, match="update"):
        module.update()


def test_update_without_a_step() -> None:
    network = NETWORKS["residual"]
    module = planned(network[0])
    data = batches(network)
    module.bind(data.provide_data, data.provide_label, inputs_need_grad=True)
    module.init_params()
    module.init_optimizer()
    with pytest.raises(UsageError, match="training step"):
        module.update()
    with pytest.raises(UsageError, match="training step"):
        module.get_input_grads()


def test_what_is_refused() -> None:
    net, shapes = two_headed_net()
    module = planned(net, label_names=["early_label", "late_label"])
    labels = [("early_label", (4, 2)), ("late_label", (4,))]
    with pytest.raises(ArgumentError, match=r"'features_output' is no loss.*BlockGrad"):
        module.bind(list(shapes.items()), labels)
    module.bind(list(shapes.items()), labels, for_training=False)

    network = NETWORKS["residual"]
    data = batches(network)
    module = planned(network[0], group2ctxs={"one": mx.cpu(0)})
    with pytest.raises(ArgumentError, match="group2ctxs"):
        module.bind(data.provide_data, data.provide_label)

    module = planned(network[0])
    module.bind(data.provide_data, data.provide_label)
    module.init_params()
    batch = data.next()
    module.forward(batch, is_train=True)
    with pytest.raises(ArgumentError, match="out_grads"):
        module.backward([mx.nd.ones((8, CLASSES))])


def test_only_symbols_are_trained() -> None:
    with pytest.raises(ArgumentError, match=r"HybridSequential.*TrainStep"):
        planned(mx.gluon.nn.HybridSequential())


class Interrupted:
    """A strategy whose user presses Ctrl-C at first."""

    presses = 1

    def solve(self, graph: TrainingGraph, budget_nbytes: int | None) -> Outcome:
        if self.presses:
            self.presses -= 1
            raise KeyboardInterrupt
        return Outcome(Status.FEASIBLE, Schedule.unplanned(graph))


def test_an_interrupt_leaves_the_module_as_it_was() -> None:
    network = NETWORKS["residual"]
    data = batches(network)
    module = planned(network[0], strategy=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        module.bind(data.provide_data, data.provide_label)
    assert not module.binded
    assert module.symbol is network[0]
    module.bind(data.provide_data, data.provide_label)
    assert module.plan is not None


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


def test_an_impossible_budget_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planning.job.LOWEST_SECONDS", 0.5)
    network = NETWORKS["residual"]
    data = batches(network)
    module = planned(network[0], budget="1 kB")
    with pytest.raises(BudgetError) as caught:
        module.bind(data.provide_data, data.provide_label)
    assert caught.value.lowest_nbytes
    assert not module.binded
    assert module.symbol is network[0]


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


WORKER = """
import sys
import mxnet as mx, numpy as np
import memplan.mxnet

def network(prefix):
    body = mx.sym.Variable("data")
    for i in range(6):
        name = f"{prefix}_{i}"
        body = mx.sym.FullyConnected(body, num_hidden=16, name=f"{name}_fc")
        body = mx.sym.BatchNorm(body, fix_gamma=False, name=f"{name}_bn")
        body = mx.sym.relu(body, name=f"{name}_relu")
    return mx.sym.SoftmaxOutput(body, name="softmax")

def planned(net):
    return memplan.mxnet.Module(net, strategy="chen_greedy_linear")

kvstore = mx.kv.create("dist_sync")
random = np.random.default_rng(kvstore.rank)
data, label = random.normal(size=(16, 12)).astype("f4"), random.integers(0, 16, 16).astype("f4")
found = []
for prefix, make in (("a", mx.mod.Module), ("b", planned)):
    mx.random.seed(3), np.random.seed(3)
    module = make(network(prefix))
    module.fit(
        mx.io.NDArrayIter(data, label, batch_size=8), num_epoch=2, kvstore=kvstore,
        initializer=mx.init.Xavier(), optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        batch_end_callback=lambda _: mx.nd.waitall(),
    )
    arguments, states = module.get_params()
    found.append([array.asnumpy() for _, array in sorted({**arguments, **states}.items())])
assert module.plan.schedule.recomputed
np.savez(sys.argv[1], *found[1])
assert all(map(np.array_equal, *found))
kvstore._barrier()
"""


def test_dist_sync(tmp_path: Path) -> None:
    """Two workers on different data hold the same weights, those of mx.mod.Module."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
        "OMP_NUM_THREADS": "1",
    }
    saved = [tmp_path / f"{rank}.npz" for rank in range(2)]
    roles = [("scheduler", "import mxnet", ()), ("server", "import mxnet", ())]
    roles += [("worker", WORKER, (str(path),)) for path in saved]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env=environment | {"DMLC_ROLE": role},
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, code, arguments in roles
    ]
    try:
        for process in reversed(processes):
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    one, other = (dict(np.load(path)) for path in saved)
    weights = [name for name in one if one[name].ndim == 2]
    assert weights
    assert not differing({n: one[n] for n in weights}, {n: other[n] for n in weights})
