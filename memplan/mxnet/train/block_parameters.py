"""The parameters of blocks, and whether a step can train them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.mxnet.train.bound_step import is_derived
from memplan.mxnet.train.nesting import is_recorded

NDArray = Any
Parameter = Any


def trainable(pairs: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Parameters by name; ArgumentError for those that cannot be trained."""
    parameters: dict[str, Parameter] = {}
    for name, parameter in pairs:
        if name in parameters and parameters[name] is not parameter:
            raise ArgumentError(f"two different parameters are named {name!r}; rename one")
        parameters[name] = parameter
        if parameter._stype != "default":
            raise ArgumentError(
                f"parameter {name!r} is sparse, which MXNet's hybridized blocks cannot train; "
                f"make it with stype='default' (its gradient may be sparse)"
            )
        if parameter._grad_stype != "default" and parameter.grad_req == "add":
            raise ArgumentError(
                f"the gradient of {name!r} is sparse, and MXNet cannot add to it: use "
                f"grad_req='write', or make its layer without sparse_grad=True"
            )
    return parameters


def check_arrays(parameters: Iterable[Parameter]) -> None:
    """ArgumentError for a parameter whose array hands its gradient on."""
    for parameter in parameters:
        if any(_hands_on(parameter, array) for array in parameter._data or ()):
            raise ArgumentError(
                f"a script gave parameter {parameter.name!r} an array that was computed under "
                f"autograd.record(), or has a gradient of its own, to which a plan hands nothing "
                f"on; compute it in hybrid_forward, or take planned(block), which leaves such "
                f"steps to MXNet"
            )


class GivenArrays:
    """The parameters of ``block`` that have arrays which a script computed of others.

    So do networks whose weights are drawn or made anew in every step: ``p._data[0] = mean.data() +
    noise``, under ``autograd.record()``. Their gradients go on to what the arrays were made of.
    """

    def __init__(self, block: mx.gluon.Block) -> None:
        self._block = block
        self._arrays: list[NDArray] = []
        self._names: list[str] = []

    def names(self) -> list[str]:
        """Those of them that have such now: arrays that are known are not asked again."""
        pairs = [(p, array) for p in _every(self._block) for array in p._data or ()]
        known = self._arrays
        if len(pairs) != len(known) or any(
            array is not other for (_, array), other in zip(pairs, known, strict=True)
        ):
            self._arrays = [array for _, array in pairs]
            self._names = [p.name for p, array in pairs if _hands_on(p, array)]
        return self._names


def _every(block: mx.gluon.Block) -> Iterator[Parameter]:
    yield from block.params.values()
    for child in block._children.values():
        yield from _every(child)


def _hands_on(parameter: Parameter, array: NDArray) -> bool:
    """Does autograd take the gradient of ``array`` to where ``parameter`` knows nothing of it?

    A parameter that says itself what it is computed from is differentiated as it asks.
    """
    if is_derived(parameter):
        return False
    return is_recorded(array) or (parameter.grad_req == "null" and array.grad is not None)
