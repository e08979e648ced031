"""MXNet's autograd.grad, which does not reach a parameter through a step in halves.

The graph of autograd begins at what the first half returns. It would leave out of a parameter's
gradient what goes through the block, and say nothing where a loss also reads the parameter itself.
Nor does it reach one from a loss that was recorded before a step marked the parameters anew, or one
whose gradient was given up.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import mxnet as mx

from memplan.errors import UsageError
from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.arrays.array_memory import memory_of
from memplan.mxnet.train.arrays.given_up import given_up
from memplan.mxnet.train.arrays.nesting import leaves, listed
from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss, name_of
from memplan.mxnet.train.blocks.named_parameters import named_parameters
from memplan.util.weak_keys import keys_of

if TYPE_CHECKING:
    from memplan.mxnet.train.arrays.gradients import Gradients
    from memplan.mxnet.train.first_half import FirstHalf

Block = Any
NDArray = Any

#: The steps of which the first half has run, with the blocks: finished ones, too, whose graphs may
#: have been retained.
_HALVES: WeakKeyDictionary[FirstHalf, weakref.ref[Block]] = WeakKeyDictionary()

#: The gradients of what is bound.
_GRADIENTS: WeakKeyDictionary[Gradients, None] = WeakKeyDictionary()


def refuse_grad(half: FirstHalf, block: Block) -> None:
    """From now on ``autograd.grad`` of a loss refuses the parameters of ``block`` through it."""
    _HALVES[half] = weakref.ref(block)
    _wrap()


def refuse_grad_across(gradients: Gradients) -> None:
    """From now on ``autograd.grad`` refuses parameters that were marked anew since the loss."""
    _GRADIENTS[gradients] = None
    _wrap()


@functools.cache
def _wrap() -> None:
    """Wrap MXNet's function, the first time."""
    wrap(mx.autograd, "grad", _refusing)


def _refusing(grad: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(grad)
    def refusing(heads: Any, variables: Any, *args: Any, **options: Any) -> Any:
        heads, variables = listed(heads), listed(variables)
        read = ReadByLoss(leaves(heads))
        for half in keys_of(_HALVES):
            if half.is_read(read):
                _check(half, list(leaves(variables)))
        asked = {name for name in map(name_of, leaves(variables)) if name is not None}
        for gradients in keys_of(_GRADIENTS):
            gradients.check_asked(read, asked)
        _check_given_up(list(leaves(variables)))
        return grad(heads, variables, *args, **options)

    return refusing


def _check_given_up(variables: list[NDArray]) -> None:
    """UsageError if one of these has no gradient, for a reason that MXNet does not know."""
    asked = {_known_by(array) for array in variables if isinstance(array, mx.nd.NDArray)}
    for parameter, array in given_up():
        if _known_by(array) in asked:
            raise UsageError(
                f"mx.autograd.grad does not reach parameter {parameter.name!r}: "
                f"TrainStep(trainer=...) updates the parameters within the step, and has given "
                f"their gradients up; for each that is asked set grad_req = 'null' and then "
                f"'write', which makes one, and record the loss after that, or give TrainStep no "
                f"trainer"
            )


def _known_by(array: NDArray) -> Any:
    """What tells ``array`` from others, whatever handle this is; its memory where that is all."""
    name = name_of(array)
    return memory_of(array) if name is None else name


def _check(half: FirstHalf, variables: list[NDArray]) -> None:
    """UsageError if one of these is a parameter, through whatever handle: the step has read it."""
    block: Block = _HALVES[half]()
    asked = {name_of(array) for array in variables} - {None}
    for name, parameter in {} if block is None else named_parameters(block).items():
        if any(name_of(array) in asked for array in parameter._data or ()):
            raise UsageError(
                f"mx.autograd.grad does not reach parameter {name!r} through a planned step of "
                f"block {block.name!r}: call backward() on the loss and read the parameter's "
                f"grad(), or train it unplanned"
            )
    half.bound.gradients.check(ReadByLoss(variables))  # handles of before the step
