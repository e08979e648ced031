"""Trains Gluon blocks in halves: the caller computes the loss between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

from helpers.block_runs import by_autograd, leaves, train_step
from helpers.blocks import Case
from memplan.mxnet.gluon import TrainStep, planned


def by_halves(case: Case, made: list[TrainStep]) -> Callable[[Any, Any, list[mx.Context]], Any]:
    """By forward and backward of a TrainStep, which is appended to ``made``."""

    def loss_of(outputs: Any, y: Any) -> Any:
        if isinstance(case.loss, list):
            return [fn(*pair) for fn, *pair in zip(case.loss, outputs, y, strict=True)]
        return case.loss(outputs, y)

    def losses_of(net: Any, batch: Any, contexts: list[mx.Context]) -> Any:
        if not made:
            made.append(train_step(net, None, **case.options))
        x, y = batch
        if contexts[1:]:
            x, y = (gluon.utils.split_and_load(array, contexts) for array in batch)
        with autograd.record():
            outputs = made[0].forward(x)
            pairs = zip(outputs, y, strict=True) if contexts[1:] else [(outputs, y)]
            losses = [loss_of(*pair) for pair in pairs]
        made[0].backward(leaves(losses))
        return losses

    return losses_of


def by_planned(case: Case) -> Callable[[Any, Any, list[mx.Context]], Any]:
    """By the loop of :func:`helpers.block_runs.by_autograd`, with a planned block."""
    plain = by_autograd(case)

    def losses_of(net: Any, batch: Any, contexts: list[mx.Context]) -> Any:
        if not hasattr(net, "planned_step"):
            assert planned(net, **({"strategy": "chen_sqrt"} | case.options)) is net
        losses = plain(net, batch, contexts)
        assert net.planned_step.plans
        assert not net.planned_step.unfinished
        return losses

    return losses_of
