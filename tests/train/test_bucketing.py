"""A planned BucketingModule: the numbers of MXNet's, one search, one memory."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.amounts import long_except
from helpers.buckets import Sentences, network, steps
from helpers.fitting import Result, differing, seed, state
from memplan.errors import ArgumentError, BudgetError
from memplan.mxnet import BucketingModule

BUCKETS = (8, 3, 6, 5, 8, 3)
QUICK = ["packed"]
REALISATIONS = pytest.mark.parametrize("realisation", long_except(["packed", "explicit"], QUICK))
Module = mx.mod.BucketingModule


def options(realisation: str) -> dict[str, Any]:
    """A budget in which the longest bucket recomputes, and a strategy that takes little time."""
    budget = "96%" if realisation == "explicit" else "50%"
    return {"budget": budget, "strategy": "evict:patience=20", "realisation": realisation}


def planned(realisation: str = "packed", **more: Any) -> BucketingModule:
    return BucketingModule(network, 8, **{**options(realisation), **more})


def script(make: Any, folder: Path, **given: Any) -> Result:
    """All that a script sees that fits, scores, saves, loads, predicts and fits again."""
    folder.mkdir()
    data, found = Sentences(BUCKETS), {}
    metrics: list[float] = []

    def note(parameters: Any) -> None:
        metrics.extend(value for _, value in parameters.eval_metric.get_name_value())

    def fit(module: Any, **more: Any) -> None:
        data.reset()
        module.fit(
            data,
            eval_data=Sentences((8, 6, 4)),
            eval_metric=mx.metric.Perplexity(0),
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            initializer=mx.init.Xavier(),
            batch_end_callback=note,
            **more,
        )

    seed()
    module = make(network, default_bucket_key=8, **given)
    fit(module, num_epoch=2)
    found |= state(module)
    metrics += [value for _, value in module.score(data, mx.metric.Perplexity(0))]
    module.save_checkpoint(str(folder / "model"), 2)
    path = str(folder / "model")
    loaded = make.load(path, 2, sym_gen=network, default_bucket_key=8, **given)
    loaded.bind(data.provide_data, data.provide_label)
    metrics += [value for _, value in loaded.score(data, mx.metric.Perplexity(0))]
    fit(loaded, begin_epoch=2, num_epoch=3)
    found |= {f"resumed {name}": array for name, array in state(loaded).items()}
    found["predicted"] = loaded.predict(Sentences((8, 8))).asnumpy()
    return found | {"metrics": np.array(metrics)}


@functools.lru_cache(maxsize=1)  # one run serves all realisations
def stock_script() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return script(Module, Path(folder) / "stock")


@pytest.mark.long
@pytest.mark.parametrize("realisation", long_except(["packed", "explicit", "updating"], QUICK))
def test_the_numbers_are_those_of_mxnet(realisation: str, tmp_path: Path) -> None:
    stock = stock_script()
    ours = script(BucketingModule, tmp_path / "ours", **options(realisation))
    assert len(stock["metrics"]) == 20
    assert not differing(stock, ours)


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "realisation"), [("adam", "updating"), ("nadam", "packed")])
@pytest.mark.filterwarnings("ignore:parameters are updated behind the step")
def test_every_bucket_updates_within_its_step_or_none(optimizer: str, realisation: str) -> None:
    """Nadam needs all gradients at once: buckets that come later are told so, too."""
    found = []
    for module in (Module(network, 8), planned("updating")):
        data = Sentences(BUCKETS)
        seed()
        module.fit(data, num_epoch=1, optimizer=optimizer, initializer=mx.init.Xavier())
        found.append(state(module))
    assert not differing(*found)
    assert {plan.realisation for plan in module.plans.values()} == {realisation}
    assert len(module.plans) == len(set(BUCKETS))


def embedded(key: str) -> tuple[mx.sym.Symbol, list[str], list[str]]:
    """A bag of words; the gradient of the embedding is "sparse", or not."""
    data, weight = mx.sym.Variable("data"), mx.sym.Variable("weight")
    words = mx.sym.Embedding(data, weight, input_dim=12, output_dim=6, sparse_grad=key == "sparse")
    scores = mx.sym.FullyConnected(mx.sym.mean(words, axis=1), num_hidden=5, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax"), ["data"], ["softmax_label"]


@pytest.mark.filterwarnings("ignore:parameters are updated behind the step")
def test_a_bucket_that_cannot_update_within_leaves_the_others_as_they_are() -> None:
    """Those of batch sizes that come later, too: the parameters are updated once in every step."""
    found = []
    ours = BucketingModule(embedded, "dense", realisation="updating", strategy="store_all")
    for module in (Module(embedded, "dense"), ours):
        random = np.random.default_rng(0)
        seed()
        module.bind([("data", (8, 4))], [("softmax_label", (8,))])
        module.init_params(mx.init.Normal(0.5))
        module.init_optimizer()
        for key, nexamples in (("dense", 8), ("sparse", 8), ("dense", 6), ("dense", 8)):
            arrays = random.integers(0, 12, (nexamples, 4)), random.integers(0, 5, nexamples)
            data, label = map(mx.nd.array, arrays)
            batch = mx.io.DataBatch([data], [label], bucket_key=key)
            batch.provide_data = [("data", data.shape)]
            batch.provide_label = [("softmax_label", label.shape)]
            module.forward_backward(batch)
            module.update()
        found.append(state(module))
    assert not differing(*found)
    realisations = {key: plan.realisation for key, plan in ours.plans.items()}
    assert realisations == {"dense": "updating", "sparse": "packed"}


@REALISATIONS
def test_buckets_run_in_one_memory(realisation: str) -> None:
    """No more than the largest holds."""
    module = planned(realisation)
    for _ in steps(module, BUCKETS):
        plans = module.plans
        pool = module._buckets[8]._exec_group.execs[0].device.pool
        assert pool.nbytes <= max(
            p.budget_nbytes - p.total_nbytes + p.allocated_nbytes for p in plans.values()
        )
    assert plans.keys() == {3, 5, 6, 8}
    assert plans[8].schedule.recomputed
    executors = [module._buckets[key]._exec_group.execs[0] for key in plans]
    assert all(executor.device is executors[0].device for executor in executors)
    if realisation == "packed":
        assert len({id(executor.train().memory) for executor in executors}) == 1
        # A shorter bucket calls fewer operators, and so its array may be larger than the first one.
        nbound = [bucket._plans.nbound for bucket in module._buckets.values()]
        assert nbound[2:] == [1, 1]
        assert max(nbound) <= 2


@REALISATIONS
def test_a_bucket_that_is_prepared_leaves_the_outputs_of_the_last_step(realisation: str) -> None:
    """``fit`` prepares the next batch before it looks at the outputs of this one."""
    outputs = []
    for module in (Module(network, 8), planned(realisation)):
        data = Sentences(BUCKETS)
        for number, _ in enumerate(steps(module, BUCKETS), start=1):
            if number < len(BUCKETS):
                module.prepare(data.batches[number])
            outputs.append(module.get_outputs()[0].asnumpy())
    half = len(BUCKETS)
    assert all(map(np.array_equal, outputs[:half], outputs[half:]))


@pytest.mark.parametrize("realisation", long_except(["auto", "packed"], ["auto"]))
def test_monitors_of_buckets_that_are_not_planned_yet(realisation: str) -> None:
    """With "auto" nobody knows yet how they will run."""
    found = []
    for module in (Module(network, 8), planned(realisation)):
        monitor = mx.mon.Monitor(1, pattern="(scores|softmax)_output")
        seen = []
        for number, batch in enumerate(steps(module, (8, 5))):
            if number == 0:
                module.install_monitor(monitor)
            monitor.tic()
            module.forward_backward(batch)
            seen += monitor.toc()
            module.update()
        found.append(seen)
    stock, ours = found
    assert [name for _, name, _ in ours] == ["scores_output", "softmax_output"] * 2
    assert stock == ours


def test_a_bucket_that_is_only_evaluated_is_not_planned() -> None:
    module = planned()
    for _ in steps(module, (8, 5)):
        module.score(Sentences((8, 4)), "acc", reset=False)
    assert module._buckets.keys() == {8, 5, 4}
    assert module.plans.keys() == {8, 5}


def with_predictions(key: str) -> tuple[mx.sym.Symbol, list[str], list[str] | None]:
    """Two buckets, as Keras has them: one that is trained, one without a loss for predictions."""
    hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="hidden")
    hidden = mx.sym.Activation(hidden, act_type="relu", name="relu")
    scores = mx.sym.FullyConnected(hidden, num_hidden=4, name="scores")
    scores = mx.sym.softmax(scores, name="probabilities")
    if key == "predict":
        return scores, ["data"], None
    loss = mx.sym.MakeLoss(-mx.sym.pick(mx.sym.log(scores), mx.sym.Variable("label")))
    return mx.sym.Group([loss, mx.sym.BlockGrad(scores)]), ["data"], ["label"]


def of_bucket(key: str) -> mx.io.DataBatch:
    x = mx.nd.array(np.random.default_rng(2).normal(size=(8, 6)))
    y = mx.nd.array(np.arange(8) % 4)
    labels, shapes = (None, None) if key == "predict" else ([y], [("label", y.shape)])
    return mx.io.DataBatch(
        [x], labels, bucket_key=key, provide_data=[("data", x.shape)], provide_label=shapes
    )


def predictions(module: Any, optimizer: str, **more: Any) -> list[np.ndarray]:
    """Before the optimizer comes, and after each of three steps."""
    seed()
    module.init_params(mx.init.Xavier())
    found = []
    for number in range(4):
        if number == 1:
            module.init_optimizer(optimizer=optimizer, **more)
        if number:
            module.forward_backward(of_bucket("train"))
            module.update()
        module.forward(of_bucket("predict"), is_train=False)
        found.append(module.get_outputs()[0].asnumpy())
    return found


def bound_to(key: str, kind: Any = BucketingModule, **given: Any) -> Any:
    module, batch = kind(with_predictions, key, **given), of_bucket(key)
    module.bind(batch.provide_data, batch.provide_label)
    return module


@pytest.mark.parametrize(
    ("realisation", "budget"),
    [("auto", None), ("packed", "1MiB"), ("explicit", "1MiB"), ("updating", None)],
)
def test_a_default_bucket_without_a_loss_is_there_for_predictions(
    realisation: str, budget: str | None
) -> None:
    module = bound_to("predict", **options(realisation) | {"budget": budget})
    ours = predictions(module, "adam")
    assert all(map(np.array_equal, predictions(bound_to("predict", Module), "adam"), ours))
    assert module.plans.keys() == {"train"}


def test_a_default_bucket_without_a_loss_is_refused_when_it_is_trained() -> None:
    module = bound_to("predict", **options("packed"))
    module.init_params()
    with pytest.raises(ArgumentError, match="'probabilities_output' is no loss"):
        module.forward_backward(of_bucket("predict"))
    module.forward(of_bucket("predict"), is_train=False)
    assert not module.plans


@pytest.mark.parametrize("default", ["train", "predict"])
@pytest.mark.parametrize(("optimizer", "kvstore"), [("nadam", None), ("sgd", "device")])
@pytest.mark.filterwarnings("ignore:parameters are updated behind the step")
def test_a_bucket_for_predictions_where_updates_move_behind_the_step(
    default: str, optimizer: str, kvstore: str | None
) -> None:
    """All that is bound is given up then; what only infers is not planned anew."""
    kvstores = [kvstore and mx.kv.create(kvstore) for _ in range(2)]
    module = bound_to(default, **options("updating") | {"budget": None})
    ours = predictions(module, optimizer, kvstore=kvstores[0])
    stock = predictions(bound_to(default, Module), optimizer, kvstore=kvstores[1])
    assert all(map(np.array_equal, stock, ours))
    assert {key: plan.realisation for key, plan in module.plans.items()} == {"train": "packed"}


@pytest.mark.long
def test_a_bucket_that_cannot_be_planned_leaves_all_as_it_was() -> None:
    module = planned(budget="70%", time_limit=10)
    longer = Sentences((32,)).batches[0]
    for batch in steps(module, (8,)):
        with pytest.raises(BudgetError):
            module.forward_backward(longer)
        module.forward_backward(batch)
        module.update()
    assert module.plans.keys() == {8}
