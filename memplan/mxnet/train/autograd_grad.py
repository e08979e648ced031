"""MXNet's autograd.grad, which does not reach a parameter through a step in halves.

The graph of autograd begins at what the first half returns. It would leave out of a parameter's
gradient what goes through the block, and say nothing where a loss also reads the parameter itself.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakSet

import mxnet as mx

from memplan.errors import UsageError
from memplan.mxnet.train.named_parameters import named_parameters
from memplan.mxnet.train.nesting import leaves


class Step(Protocol):
    """What trains ``block`` in halves; ``unfinished`` are the steps of which one has run."""

    block: Any
    unfinished: dict[mx.Context, Any]


_ALL: WeakSet[Step] = WeakSet()


def refuse_grad(step: Step) -> None:
    """From now on ``autograd.grad`` asks ``step`` first."""
    _ALL.add(step)
    _wrap()


@functools.cache
def _wrap() -> None:
    """Wrap MXNet's function, the first time."""
    grad = mx.autograd.grad

    @functools.wraps(grad)
    def reaching(heads: Any, variables: Any, *args: Any, **options: Any) -> Any:
        for step in list(_ALL):
            if step.unfinished:
                _check(step.block, list(leaves(variables)))
        return grad(heads, variables, *args, **options)

    mx.autograd.grad = reaching


def _check(block: Any, variables: list[Any]) -> None:
    """UsageError if one of these is a parameter: it was read in a step that is open."""
    for name, parameter in named_parameters(block).items():
        if any(array is other for array in parameter._data or () for other in variables):
            raise UsageError(
                f"mx.autograd.grad does not reach parameter {name!r} through a planned step of "
                f"block {block.name!r}: call backward() on the loss and read the parameter's "
                f"grad(), or train it unplanned"
            )
