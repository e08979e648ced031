"""Blocks that branch on ``autograd.is_training()`` are trained by their training branch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from helpers.block_runs import by_autograd, by_plan, train, train_step
from helpers.blocks import CPU, SOFTMAX, Case, images
from helpers.layouts import without_copies
from helpers.training_runs import differences
from memplan.errors import ArgumentError, UsageError
from memplan.mxnet.gluon import TrainStep, planned
from memplan.mxnet.load import load_network

LossesOf = Callable[[Any, Any, list[mx.Context]], Any]


class DropBlock(gluon.HybridBlock):
    """Drops squares of a picture, in training; in the manner of GluonCV's."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.shape, self.probability = (1, channels, size, size), 0.3

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        if not autograd.is_training() or self.probability <= 0:
            return x
        seeds = F.random.uniform(0, 1, shape=self.shape) < self.probability / 9
        mask = 1 - F.Pooling(seeds, pool_type="max", kernel=(3, 3), pad=(1, 1))
        kept = mask.sum(axis=0, exclude=True).reshape((1, -1, 1, 1))
        return F.broadcast_mul(F.broadcast_mul(x, mask), float(np.prod(self.shape[2:])) / kept)


def convolutions() -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="body_")
    with net.name_scope():
        for _ in range(3):
            net.add(nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    return net


def drop_block_net() -> nn.HybridSequential:
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(convolutions(), DropBlock(8, 8), nn.Conv2D(8, 3, padding=1), DropBlock(8, 8))
        net.add(nn.Dense(10))
    return net


class Detector(gluon.HybridBlock):
    """In the manner of SSD: a list of three in training, else a pair of what is found."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body = convolutions()
            self.scores, self.boxes = nn.Conv2D(3, 3, padding=1), nn.Conv2D(4, 3, padding=1)
            anchors = np.random.default_rng(1).uniform(size=(1, 64, 4))
            self.anchors = self.params.get_constant("anchors", anchors)

    def hybrid_forward(self, F: Any, x: Any, anchors: Any) -> Any:  # noqa: N803
        x = self.body(x)
        scores = F.transpose(self.scores(x), (0, 2, 3, 1)).reshape((0, -1, 3))
        boxes = F.transpose(self.boxes(x), (0, 2, 3, 1)).reshape((0, -1, 4))
        if autograd.is_training():
            return [scores, boxes, anchors.reshape((1, -1, 4))]
        found = F.concat(F.softmax(scores), F.broadcast_add(boxes, anchors), dim=-1)
        return F.contrib.box_nms(found, score_index=0, coord_start=3), scores


class BoxLoss(gluon.loss.Loss):
    """Losses of scores and boxes, by anchors that the block returns in training only."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def hybrid_forward(self, F: Any, outputs: Any, labels: Any) -> Any:  # noqa: N803
        scores, boxes, anchors = outputs
        shifts = F.broadcast_sub(labels[1], anchors)
        return SOFTMAX(scores, labels[0]), F.smooth_l1(boxes - shifts).mean(axis=(1, 2))


class Yolo(gluon.HybridBlock):
    """Computes its losses of pictures and targets while recorded, in the manner of YOLOv3."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.body, self.output = convolutions(), nn.Conv2D(5, 1)

    def hybrid_forward(self, F: Any, x: Any, *targets: Any) -> Any:  # noqa: N803
        if targets and not autograd.is_training():
            raise TypeError("inference only needs pictures")
        raw = F.transpose(self.output(self.body(x)), (0, 2, 3, 1)).reshape((0, -1, 5))
        objectness, centers = raw.slice_axis(-1, 0, 1), raw.slice_axis(-1, 1, 5)
        if not autograd.is_training():
            return F.contrib.box_nms(raw, score_index=0, coord_start=1)
        if not autograd.is_recording():
            return objectness, centers
        with autograd.pause():
            weight = F.stop_gradient(F.sigmoid(objectness) < 0.7)
        found = gluon.loss.SigmoidBCELoss()(objectness, targets[0], weight)
        return found, gluon.loss.L1Loss()(centers, targets[1])


def boxes(batch: int = 4) -> tuple[Any, Any]:
    x, _ = images(8, batch)
    classes = mx.nd.floor(mx.nd.random.uniform(0, 3, shape=(batch, 64), ctx=CPU))
    return x, [classes, mx.nd.random.uniform(shape=(batch, 64, 4), ctx=CPU)]


def targets() -> tuple[Any, Any]:
    x, (classes, places) = boxes()
    return (x, classes.expand_dims(-1) > 1), places


CASES = {
    "drop_block": Case(drop_block_net, lambda: images(8)),
    "detector": Case(Detector, boxes, BoxLoss()),
    "yolo": Case(Yolo, targets, None),
}


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_the_training_branch_is_trained(
    name: str, realisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_copies(monkeypatch)
    case = dataclasses.replace(CASES[name], options={"realisation": realisation})
    steps: list[TrainStep] = []
    assert not differences(train(case, by_autograd(case)), train(case, by_plan(case, steps)))
    [plan] = steps[0].plans.values()
    assert plan.schedule.recomputed


SCOPES = {
    "record": autograd.record,
    "pause": autograd.pause,
    "predict": autograd.predict_mode,
    "train": autograd.train_mode,
}


@pytest.mark.parametrize("name", SCOPES)
def test_the_scope_of_the_caller_changes_nothing(name: str) -> None:
    case = CASES["drop_block"]

    def in_scope(losses_of: LossesOf) -> LossesOf:
        def result(*arguments: Any) -> Any:
            with SCOPES[name]():
                return losses_of(*arguments)

        return result

    assert not differences(train(case, by_autograd(case)), train(case, in_scope(by_plan(case, []))))


def test_planning_before_the_first_batch_is_for_training() -> None:
    net, (x, y) = drop_block_net(), images(8)
    net.initialize(ctx=CPU)
    step = train_step(net)
    plan = step.plan(x.shape, y.shape)
    assert "_random_uniform" in {op.kind for op in plan.schedule.graph.ops}


def test_inference_that_is_recorded_is_refused() -> None:
    net = drop_block_net()
    net.initialize(ctx=CPU)
    step = train_step(net)
    with (
        autograd.record(train_mode=False),
        pytest.raises(ArgumentError, match=r"train_mode=False.*use_global_stats=True"),
    ):
        step(*images(8))


@pytest.mark.parametrize("arguments", [((), {"train_mode": False}), ((None, True, False), {})])
@pytest.mark.parametrize("of_array", [False, True])
def test_gradients_of_inference_are_refused(arguments: Any, of_array: bool) -> None:
    """Nothing is written, and the step may still be finished."""
    args, options = arguments
    net, head = planned(convolutions(), strategy="chen_sqrt"), nn.Dense(1)
    for block in (net, head):
        block.initialize()
        block.collect_params().setattr("grad_req", "add")
    x = mx.nd.ones((2, 3, 8, 8))
    head(net(x))
    with autograd.record():
        loss = head(net(x))
        penalty = (head.weight.data() ** 2).sum()
    with pytest.raises(UsageError, match=r"train_mode=False.*leave train_mode out"):
        loss.backward(*args, **options) if of_array else autograd.backward(loss, *args, **options)
    params = [*net.collect_params().values(), *head.collect_params().values()]
    assert not any(p.grad().asnumpy().any() for p in params if p.grad_req != "null")
    penalty.backward(train_mode=False)  # which goes past the block
    loss.backward(train_mode=True)
    assert all(p.grad().asnumpy().any() for p in head.collect_params().values())


def test_a_graph_cached_in_inference_is_not_trained() -> None:
    """And the graph that training needs is not what inference runs afterwards."""
    case = CASES["drop_block"]
    x, _ = images(8)

    def evaluated(losses_of: LossesOf) -> LossesOf:
        def result(net: Any, *arguments: Any) -> Any:
            net.hybridize()  # autograd's way does so again, and forgets the graph
            before = net(x)
            losses = losses_of(net, *arguments)
            net.hybridize()
            return [losses, before, net(x)]

        return result

    steps: list[TrainStep] = []
    one = train(case, evaluated(by_autograd(case)))
    assert not differences(one, train(case, evaluated(by_plan(case, steps))))


def test_the_command_line_plans_the_training_branch() -> None:
    network = load_network("train.test_training_mode:drop_block_net", shapes={"data": (4, 3, 8, 8)})
    assert "_random_uniform" in network.symbol.tojson()


def less_dropped(net: Any) -> None:
    net[1].probability = 0.1
    net.hybridize()


def nothing_dropped(net: Any) -> None:
    for block in net:
        block.probability = 0.0
    net.hybridize()


def another_layer(net: Any) -> None:
    net.add(nn.Dense(10, in_units=10, prefix="net_added_"))
    net[-1].initialize(mx.init.Xavier(), ctx=CPU)


@pytest.mark.parametrize("change", [less_dropped, nothing_dropped, another_layer])
def test_changed_layers_are_noticed(change: Callable[[Any], None]) -> None:
    """In the second step; shapes that were planned before get a new plan, too."""

    def changed(losses_of: LossesOf) -> LossesOf:
        count = itertools.count()

        def result(net: Any, *arguments: Any) -> Any:
            if next(count) == 1:
                change(net)
            return losses_of(net, *arguments)

        return result

    case = CASES["drop_block"]
    one = train(case, changed(by_autograd(case)))
    assert not differences(one, train(case, changed(by_plan(case, []))))


def test_what_hybridize_leaves_unchanged_keeps_its_plan_and_arrays() -> None:
    net, (x, y) = drop_block_net(), images(8)
    net.initialize(ctx=CPU)
    step = train_step(net, lambda outputs, label: (SOFTMAX(outputs, label) * 2).mean())
    step(x, y)
    [before], [bound] = step.plans.values(), step._bound.values()
    net.hybridize()
    net(x)
    step(x, y)
    [after], [still_bound] = step.plans.values(), step._bound.values()
    assert after is before
    assert still_bound is bound
