"""Networks of mx.np train through TrainStep, with equal bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest
from mxnet import autograd, gluon, np, npx
from mxnet.gluon import nn

from helpers.amounts import long_unless
from helpers.block_runs import by_autograd, by_plan, gradients, leaves, train, train_step
from helpers.blocks import CASES as LEGACY_CASES
from helpers.blocks import images as legacy_images
from helpers.layouts import without_copies
from helpers.numpy_blocks import CASES, images, resnet, total, vectors
from helpers.training_runs import differences
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.executor import TrainExecutor
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.plan_file import load_plan, plan_text
from memplan.mxnet.trace.request import as_traced, request_of, trace_again


@pytest.fixture(autouse=True)
def _numpy_semantics() -> Iterator[None]:
    npx.set_np()
    try:
        yield
    finally:
        npx.reset_np()


def initialised(net: Any) -> Any:
    net.initialize(mx.init.Xavier())
    return net


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_equal_bits(name: str, realisation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_copies(monkeypatch)
    options = {"realisation": realisation, "strategy": "evict:patience=50"}
    case = dataclasses.replace(CASES[name], options=options)
    steps: list[TrainStep] = []
    assert not differences(train(case, by_autograd(case)), train(case, by_plan(case, steps)))
    [plan] = steps[0].plans.values()
    assert plan.schedule.recomputed


@pytest.mark.parametrize(
    ("name", "optimizer"),
    long_unless(
        itertools.product(["resnet", "translator", "encoder", "scalars"], ["nag", "adam", "lamb"]),
        lambda case: case in (("resnet", "nag"), ("translator", "adam"), ("scalars", "lamb")),
    ),
)
def test_updates_within_the_step(name: str, optimizer: str) -> None:
    case = CASES[name]
    found = []
    for within in (False, True):
        mx.random.seed(3)
        net = case.block()
        net.initialize(case.initializer)
        trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.05})
        step = TrainStep(net, case.loss, strategy="evict:patience=20", trainer=trainer)
        values = {}
        mx.random.seed(7)
        for i, (x, y) in enumerate([case.batch() for _ in range(3)]):
            if within:
                loss = step(x, y, batch_size=4)
            else:
                loss = by_autograd(case)(net, (x, y), list(case.contexts))
                trainer.step(4)
            values |= {f"loss {i} {k}": one.asnumpy() for k, one in enumerate(leaves(loss))}
        values |= {name: p.data().asnumpy() for name, p in net.collect_params().items()}
        found.append(values)
    assert not differences(found[:1], found[1:])
    assert {plan.realisation for plan in step.plans.values()} == {"updating"}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_gradients_are_added_in_micro_batches(realisation: str) -> None:
    def accumulate(net: Any) -> None:
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                parameter.grad_req = "add"

    options = {"realisation": realisation}
    case = dataclasses.replace(
        CASES["scalars"], prepare=accumulate, micro_batches=2, options=options
    )
    assert not differences(train(case, by_autograd(case)), train(case, by_plan(case, [])))


def test_all_arrays_are_of_numpy_semantics() -> None:
    net, (x, y) = initialised(CASES["scalars"].block()), vectors()
    step = train_step(net, total, keep_outputs=True)
    loss = step(x, y, scale=4.0)
    found = [loss, step.outputs, *(p.grad() for p in net.collect_params().values())]
    assert {type(array) for array in found} == {np.ndarray}
    assert loss.shape == ()


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_the_caller_computes_the_loss(realisation: str) -> None:
    """By functions of mx.np, and with a term that depends on a parameter alone."""

    def loss_of(outputs: Any, labels: Any, net: Any) -> Any:
        chosen = npx.pick(npx.log_softmax(outputs), labels)
        return -np.mean(chosen) + 0.1 * np.sum(net.body.bias.data() ** 2)

    def by_hand(net: Any, batch: Any, contexts: Any) -> Any:
        net.hybridize()
        with autograd.record():
            loss = loss_of(net(batch[0]), batch[1], net)
        loss.backward()
        return loss

    steps: list[TrainStep] = []

    def in_halves(net: Any, batch: Any, contexts: Any) -> Any:
        if not steps:
            steps.append(train_step(net, None, realisation=realisation))
        with autograd.record():
            outputs = steps[0].forward(batch[0])
            loss = loss_of(outputs, batch[1], net)
        steps[0].backward(loss)
        assert {type(outputs), type(loss), type(net.body.bias.grad())} == {np.ndarray}
        return loss

    case = CASES["scalars"]
    assert not differences(train(case, by_hand), train(case, in_halves))


class OfScalar(gluon.HybridBlock):
    """One of its inputs is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any, factor: Any) -> Any:  # noqa: N803
        return self.dense(x) * factor


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_inputs_may_be_scalars(realisation: str) -> None:
    net, (x, y) = initialised(OfScalar()), vectors()
    step = train_step(net, total, realisation=realisation)
    for factor in (0.5, 2.0):
        loss = step((x, np.array(factor)), y)
        assert loss.item() == total(net(x, np.array(factor)), y).item()


class WithNoRows(gluon.HybridBlock):
    """A layer of all rows, behind the first ones, which are none."""

    def __init__(self) -> None:
        super().__init__(prefix="rows_")
        with self.name_scope():
            self.body, self.scores = nn.Dense(4), nn.Dense(10)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        rows = self.body(x)
        none = F.np.nan_to_num(F.np.tanh(F.np.split(rows, [0], axis=0)[0]))
        return self.scores(F.np.concatenate([none, rows], axis=0))


def test_an_operator_that_must_not_write_over_what_it_reads_may_have_no_elements() -> None:
    case = dataclasses.replace(CASES["scalars"], block=WithNoRows, loss=total, batch=vectors)
    case = dataclasses.replace(case, options={"realisation": "packed", "strategy": "store_all"})
    assert not differences(train(case, by_autograd(case)), train(case, by_plan(case, [])))


class Branches(gluon.HybridBlock):
    """Two layers, and what each of them computes."""

    def __init__(self) -> None:
        super().__init__(prefix="branches_")
        with self.name_scope():
            self.first, self.second = nn.Dense(4), nn.Dense(2)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        hidden = F.np.tanh(self.first(x))
        return hidden, self.second(hidden)


@pytest.mark.parametrize("layers_before", [0, 1])
@pytest.mark.parametrize("make", [Branches, lambda: nn.Dense(4, prefix="branches_")])
def test_an_imported_network_trains(make: Any, layers_before: int, tmp_path: Path) -> None:
    """MXNet's Symbols of mx.np with one output are no lists of it, as its SymbolBlock expects."""
    x, net = np.arange(12).reshape((3, 4)) / 8, initialised(make())
    net.hybridize()
    net(x)
    net.export(str(tmp_path / "net"))
    files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
    found = []
    for plan in (False, True):
        block = nn.HybridSequential(prefix="block_")
        with block.name_scope():
            block.add(*(nn.Dense(4) for _ in range(layers_before)))
        block.initialize(mx.init.One())
        block.add(gluon.SymbolBlock.imports(*files))
        block = block if layers_before else block[0]
        if plan:
            planned(block, realisation="packed", strategy="chen_sqrt")
        with autograd.record():
            loss = sum((output**2).sum() for output in leaves(block(x)))
        loss.backward()
        found.append([gradients(block)])
    assert not differences(*found)


def test_legacy_arrays_are_refused() -> None:
    step = train_step(initialised(resnet()))
    with pytest.raises(ArgumentError, match="as_np_ndarray"):
        step(*legacy_images(8))


def test_numpy_arrays_are_refused_without_their_semantics() -> None:
    net, batch = initialised(resnet()), images(8)
    npx.reset_np()
    with pytest.raises(ArgumentError, match=r"set_np\(\).*as_nd_ndarray"):
        train_step(net)(*batch)


def test_what_legacy_networks_compute_does_not_depend_on_what_came_before() -> None:
    """Nothing that memplan remembers of MXNet's operators is of the other semantics."""
    name = "densenet"
    assert not differences(
        train(CASES[name], by_autograd(CASES[name])), train(CASES[name], by_plan(CASES[name], []))
    )
    npx.reset_np()
    case = LEGACY_CASES["conv"]
    assert not differences(train(case, by_autograd(case)), train(case, by_plan(case, [])))


def test_a_worker_traces_as_the_process_that_asks() -> None:
    """It has legacy semantics, until it is asked."""
    step = train_step(initialised(CASES["scalars"].block()), total)
    [traced] = [step.plan(*vectors()).trace]
    request = request_of(traced, device_type="cpu")
    npx.reset_np()
    again = trace_again(request, form=traced.form, match_range=traced.graph.match_range)
    seconds = [op.seconds for op in traced.graph.ops]
    assert again.graph.with_seconds(seconds).to_json() == traced.graph.to_json()
    with as_traced(again):
        assert mx.util.is_np_shape()
    assert not mx.util.is_np_shape()


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_a_plan_file_is_read_whatever_semantics_are_on(realisation: str, tmp_path: Path) -> None:
    step = train_step(initialised(CASES["scalars"].block()), total, realisation=realisation)
    plan = step.plan(*vectors())
    path = tmp_path / "plan.json"
    path.write_text(plan_text(plan), encoding="utf-8")
    npx.reset_np()
    read = load_plan(path)
    assert plan_text(read) == plan_text(plan)
    with pytest.raises(UsageError, match=r"NumPy semantics.*set_np\(\)"):
        TrainExecutor(read.trace, read.schedule)
    npx.set_np()
    arrays = {name: mx.nd.ones(shape) for name, shape in read.trace.shapes.items()}
    found = [
        TrainExecutor(each.trace, each.schedule, args=arrays).forward(is_train=True)[0].asnumpy()
        for each in (plan, read)
    ]
    assert found[0] == found[1]


def test_the_gradient_of_an_input_of_numpy_by_a_block_without_a_plan() -> None:
    net = nn.HybridSequential()
    net.add(nn.Dense(4, activation="tanh", in_units=6), nn.Dense(3, in_units=4))
    net.initialize()
    net.hybridize()
    x = np.random.normal(size=(5, 6))
    x.attach_grad()
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    expected = x.grad.asnumpy()
    planned(net, strategy="chen_sqrt")
    variable = r"data = mx.sym.Variable\('data'\).as_np_ndarray\(\)"
    with pytest.raises(ArgumentError, match=variable), autograd.record():
        net(x)
    data = mx.sym.Variable("data").as_np_ndarray()
    twin = mx.gluon.SymbolBlock(net(data), [data], net.collect_params())
    with autograd.record():
        loss = (twin(x) ** 2).sum()
    loss.backward()
    assert (expected == x.grad.asnumpy()).all()
