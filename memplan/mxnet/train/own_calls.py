"""Calls of a planned block whose class has a ``__call__`` of the script's, which may go past it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet import autograd

from memplan.mxnet.train.arrays.nesting import leaves
from memplan.mxnet.train.arrays.parameters import every_parameter
from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss, is_read

Block = Any


class OwnCalls:
    """Those of one block. A plan is for what its ``forward`` computes, and for nothing beside."""

    def __init__(self) -> None:
        #: How often ``forward`` was called.
        self.nforwards = 0
        self._is_warned_of = False

    def run(self, block: Block, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What its ``__call__`` returns; a warning, once, where that trains it without forward."""
        before = self.nforwards
        outputs = block._memplan_unplanned.__call__(block, *args, **named)
        is_past = self.nforwards == before and not self._is_warned_of
        if is_past and _trains(block, outputs):
            self._is_warned_of = True
            warnings.warn(
                f"planned block {block.name!r} trains unplanned where its __call__ computes "
                f"without its forward; leave the computation to super().__call__(...), which alone "
                f"is planned",
                stacklevel=3,
            )
        return outputs


def _trains(block: Block, outputs: Any) -> bool:
    """Would a loss of these ``outputs`` train parameters of ``block``, by autograd alone?

    Not in inference, nor where the ``__call__`` returns an input, or what it has kept.
    """
    if not (autograd.is_recording() and autograd.is_training()):
        return False
    nested = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    read = ReadByLoss(leaf for leaf in leaves(nested) if isinstance(leaf, mx.nd.NDArray))
    trained = (p for p in every_parameter(block) if p.grad_req != "null")
    return any(is_read(array, read) for p in trained for array in p._data or ())
