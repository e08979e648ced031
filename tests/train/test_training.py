"""Training by a plan is the training without one, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import memplan
from helpers.networks import Network, dropout_net, residual_net, two_headed_net, unrolled_lstm
from helpers.planning import NEVER_SECONDS

BATCH, BATCHES, EPOCHS = 4, 3, 2
SEED = 11
SGD = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}


def all_losses(network: Network) -> Network:
    """Module cannot train a head that is no loss and wants a gradient."""
    net, shapes = network
    return mx.sym.Group([net[0], net[1], mx.sym.BlockGrad(net[2])]), shapes


NETWORKS: dict[str, Callable[[], Network]] = {
    "residual": lambda: residual_net(batch=BATCH),
    "dropout": lambda: dropout_net(batch=BATCH),
    "lstm": lambda: unrolled_lstm(steps=6, batch=BATCH),
    "two heads": lambda: all_losses(two_headed_net(batch=BATCH)),
}
STRATEGIES = memplan.strategies.names("mirror")

# Plans that recompute nothing: the rule gives one that takes more memory than no plan.
NOTHING_TO_GAIN = {
    *((name, "store_all") for name in NETWORKS),
    ("lstm", "chen_sqrt"),
    ("lstm", "chen_greedy"),
}


@dataclass(frozen=True)
class Training:
    """What comes out of a training run."""

    losses: list[float]
    weights: dict[str, mx.nd.NDArray]
    states: dict[str, mx.nd.NDArray]

    def differences(self, other: Training) -> list[str]:
        """What is not the same in ``other``, to the last bit."""
        assert len(self.losses) == len(other.losses)
        pairs = zip(self.losses, other.losses, strict=True)
        found = [f"loss {step}" for step, (mine, others) in enumerate(pairs) if mine != others]
        for mine, others in ((self.weights, other.weights), (self.states, other.states)):
            assert mine.keys() == others.keys()
            found += [
                name
                for name, array in mine.items()
                if array.asnumpy().tobytes() != others[name].asnumpy().tobytes()
            ]
        return found


def iterator(net: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]]) -> mx.io.NDArrayIter:
    """Generated data for the inputs and labels of ``net``; labels are 0 and 1."""
    draw = np.random.default_rng(SEED)
    label_shapes = dict(zip(net.list_arguments(), net.infer_shape(**shapes)[0], strict=True))
    labels = {name: shape for name, shape in label_shapes.items() if name.endswith("_label")}
    return mx.io.NDArrayIter(
        data={
            name: draw.normal(size=(BATCHES * BATCH, *shape[1:])).astype("float32")
            for name, shape in shapes.items()
        },
        label={
            name: draw.integers(0, 2, (BATCHES * BATCH, *shape[1:])).astype("float32")
            for name, shape in labels.items()
        },
        batch_size=BATCH,
    )


def loss() -> mx.metric.EvalMetric:
    """Cross-entropy of class scores, squared error of other outputs; the mean over the heads."""

    def measure(label: np.ndarray, output: np.ndarray) -> float:
        if label.ndim == 1:
            return float(-np.log(output[np.arange(len(label)), label.astype(int)]).mean())
        return float(np.square(label - output).mean())

    # Heads that are no losses come last and have no labels.
    return mx.metric.CustomMetric(measure, allow_extra_outputs=True)


def fit_by_module(net: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]]) -> Training:
    data = iterator(net, shapes)
    module = mx.mod.Module(
        net, [d.name for d in data.provide_data], [d.name for d in data.provide_label]
    )
    losses: list[float] = []
    mx.random.seed(SEED)
    np.random.seed(SEED)
    module.fit(
        data,
        eval_metric=loss(),
        batch_end_callback=note(losses),
        optimizer="sgd",
        optimizer_params=SGD,
        initializer=mx.init.Xavier(),
        num_epoch=EPOCHS,
    )
    return Training(losses, *module.get_params())


def fit_by_feed_forward(net: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]]) -> Training:
    losses: list[float] = []
    mx.random.seed(SEED)
    np.random.seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet says that FeedForward is deprecated
        model = mx.model.FeedForward(
            net, num_epoch=EPOCHS, optimizer="sgd", initializer=mx.init.Xavier(), **SGD
        )
        model.fit(
            iterator(net, shapes),
            eval_metric=loss(),
            batch_end_callback=note(losses),
        )
    return Training(losses, model.arg_params, model.aux_params)


def note(losses: list[float]) -> Callable[[Any], None]:
    """A callback that notes the running loss after every batch."""

    def noted(now: Any) -> None:
        # MXNet does not wait for auxiliary states when it copies them at the end of an epoch.
        mx.nd.waitall()
        losses.append(now.eval_metric.get()[1])

    return noted


FITS = {"Module": fit_by_module, "FeedForward": fit_by_feed_forward}


@lru_cache
def unplanned(name: str, fit: str) -> Training:
    return FITS[fit](*NETWORKS[name]())


@lru_cache
def planned(name: str, strategy: str) -> memplan.Plan:
    """The plan with the least memory: it recomputes all that the strategy can."""
    net, shapes = NETWORKS[name]()
    if strategy in ("auto", "search", "checkmate"):
        strategy += ":effort=0.02"
    return memplan.plan(net, strategy=strategy, time_limit=NEVER_SECONDS, **shapes)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_unplanned_training_trains(name: str, fit: str) -> None:
    """Or it would be no wonder that plans do not change it."""
    training = unplanned(name, fit)
    assert len(training.losses) == EPOCHS * BATCHES
    assert len(set(training.losses)) == len(training.losses)
    assert np.isfinite(training.losses).all()
    assert training.losses[-1] < training.losses[0]
    net, shapes = NETWORKS[name]()
    given = {*shapes, *(n for n in net.list_arguments() if n.endswith("_label"))}
    assert training.weights.keys() == set(net.list_arguments()) - given
    assert training.states.keys() == set(net.list_auxiliary_states())


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_planned_training_is_the_same(name: str, strategy: str, fit: str) -> None:
    plan = planned(name, strategy)
    assert bool(plan.schedule.recomputed) == ((name, strategy) not in NOTHING_TO_GAIN)
    training = FITS[fit](plan.symbol, NETWORKS[name]()[1])
    assert not training.differences(unplanned(name, fit))
