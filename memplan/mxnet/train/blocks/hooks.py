"""Hooks of the block that a TrainStep trains, which get arrays, as where MXNet calls the block.

Those of a block that is called itself, as a planned one is, MXNet calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.realise.step_scope import recorded
from memplan.mxnet.train.arrays.nesting import as_inputs

Block = Any

# Inputs of the block, and labels.
Part = tuple[tuple[Any, ...], Any]


def has_hooks(block: Block) -> bool:
    """Does MXNet call anything of the script's before or after ``block``?"""
    return bool(block._forward_pre_hooks or block._forward_hooks)


def call_before(step: Any, parts: Iterable[Part]) -> None:
    """Call what the block of a TrainStep calls first, with each of the ``parts`` of a batch.

    ArgumentError for hooks that cannot get what they would get in a call.
    """
    block = step.block
    if not has_hooks(block):
        return
    if type(block).__call__ is not mx.gluon.HybridBlock.__call__:
        raise ArgumentError(
            f"block {block.name!r} has hooks, and a __call__ of its own, and a TrainStep does not "
            f"run that, which would give the hooks their arrays; train the block by planned(block)"
        )
    if block._forward_hooks and not (step.loss is None or step.keep_outputs):
        raise ArgumentError(
            f"block {block.name!r} has forward hooks, which get what it returns, and this "
            f"TrainStep keeps the losses only; make it with keep_outputs=True"
        )
    for part in parts:
        for hook in list(block._forward_pre_hooks.values()):
            recorded(functools.partial(hook, block, _arguments(step, part)))


def call_after(step: Any, parts: Iterable[Part], outputs: Iterable[Any]) -> None:
    """Call what it calls last, with what it has returned for each of the ``parts``.

    One that raises leaves no half of a step, for which a backward pass is to come.
    """
    try:
        for part, returned in zip(parts, outputs, strict=True):
            for hook in list(step.block._forward_hooks.values()):
                recorded(functools.partial(hook, step.block, _arguments(step, part), returned))
    except BaseException:
        step.abandon()
        raise


def _arguments(step: Any, part: Part) -> tuple[Any, ...]:
    """What the block is called with: labels, too, where it computes the loss itself."""
    inputs, labels = part
    return (*inputs, *(as_inputs(labels) if step.loss is None and labels is not None else ()))
