"""MXNet's autograd.grad, which does not reach a parameter through a step in halves.

The graph of autograd begins at what the first half returns. It would leave out of a parameter's
gradient what goes through the block, and say nothing where a loss also reads the parameter itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import mxnet as mx

from memplan.errors import UsageError
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
    mx.autograd.grad = _reaching(mx.autograd.grad)


def _reaching(grad: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(grad)
    def wrapped(heads: Any, variables: Any, *args: Any, **options: Any) -> Any:
        for step in list(_ALL):
            _check(step, list(leaves(variables)))
        return grad(heads, variables, *args, **options)

    return wrapped


def _check(step: Step, variables: list[Any]) -> None:
    """UsageError if one of these is a parameter, and the step in which it was read is open."""
    for name, parameter in step.block.collect_params().items() if step.unfinished else ():
        if any(array is other for array in parameter._data or () for other in variables):
            raise UsageError(
                f"mx.autograd.grad does not reach parameter {name!r} through a planned step of "
                f"block {step.block.name!r}: call backward() on the loss and read the parameter's "
                f"grad(), or train it unplanned"
            )
