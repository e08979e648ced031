"""The parameters of blocks, and whether a step can train them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd

from memplan.errors import ArgumentError
from memplan.mxnet.train.array_memory import chunk_of, part_of
from memplan.mxnet.train.bound_step import is_derived
from memplan.mxnet.train.gradients import is_of_plan
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
    """What a script has given the parameters of ``blocks`` that is beyond a plan.

    Networks whose weights are drawn or made anew in every step get arrays that are computed of
    others: ``p._data[0] = mean.data() + noise``, under ``autograd.record()``. Their gradients go on
    to what the arrays were made of. Other scripts collect gradients in one flat array: that of
    every parameter is a view of it, which a plan replaces by an array of its own.
    """

    def __init__(self, blocks: Sequence[mx.gluon.Block]) -> None:
        self._blocks = blocks
        self._known: list[Any] = []
        self._reason = ""
        _count_marks()

    def reason(self) -> str:
        """Why a plan cannot train them, or nothing; arrays that are known are not asked again."""
        parameters = list({id(p): p for block in self._blocks for p in _every(block)}.values())
        now = [a for p in parameters for a in (*(p._data or ()), *(p._grad or ()))]
        now += [p for p in parameters if p.grad_req == "null" and _is_attached(p)]
        now.append(_NMARKED[0])
        known = self._known
        if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
            self._known, self._reason = now, _reason(parameters)
        return self._reason

    def check(self) -> None:
        """ArgumentError for what a plan cannot train."""
        if reason := self.reason():
            raise ArgumentError(
                f"{reason}; or take planned(block), which leaves such steps to MXNet"
            )


def _reason(parameters: Sequence[Parameter]) -> str:
    given = {p.name: p for p in parameters if any(_hands_on(p, a) for a in p._data or ())}
    computed = [name for name, p in given.items() if any(map(is_recorded, p._data))]
    if computed:
        return (
            f"a script gave its parameters arrays whose gradients go on to others "
            f"({_some(computed)}), which is beyond a plan; compute them in hybrid_forward"
        )
    if given:
        return (
            f"a script called attach_grad of the arrays of frozen parameters ({_some(given)}), "
            f"which is beyond a plan; set their grad_req to 'write' instead"
        )
    views = _with_views(parameters)
    if views:
        return (
            f"a script made gradients of its parameters views of other arrays ({_some(views)}), "
            f"into which a plan writes none; concatenate p.grad() after backward, or set grad_req "
            f"to 'add', for p._grad, and the array to zero before every step"
        )
    return ""


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


def _with_views(parameters: Iterable[Parameter]) -> list[str]:
    """The names of those whose gradients share memory with others that a script holds.

    Gradients in the memory of a plan do so, too. MXNet's own have memory of their own each. A
    gradient that autograd alone knows, by ``mark_variables``, counts if it is none of the
    parameter's.
    """
    gradients: list[tuple[str, NDArray]] = []
    for p in parameters:
        for place, array in enumerate(p._grad or ()):
            marked = None if is_derived(p) else p._data[place].grad
            if marked is not None and chunk_of(marked) != chunk_of(array):
                gradients.append((p.name, marked))
            if p.grad_req == "write" and not is_of_plan(p, place):
                gradients.append((p.name, array))
    parts = [(name, part) for name, array in gradients if (part := part_of(array)) is not None]
    count = Counter(part.chunk for _, part in parts)
    return list(dict.fromkeys(n for n, part in parts if count[part.chunk] > 1 or part.begin))


#: How often somebody else than memplan has told autograd where to write gradients.
_NMARKED = [0]


@functools.cache
def _count_marks() -> None:
    mark = autograd.mark_variables

    @functools.wraps(mark)
    def counted(*args: Any, **options: Any) -> None:
        _NMARKED[0] += 1
        mark(*args, **options)

    autograd.mark_variables = counted


def _every(block: mx.gluon.Block) -> Iterator[Parameter]:
    yield from block.params.values()
    for child in block._children.values():
        yield from _every(child)


def _is_attached(parameter: Parameter) -> bool:
    arrays = () if is_derived(parameter) else parameter._data or ()
    return any(array.grad is not None for array in arrays)


def _hands_on(parameter: Parameter, array: NDArray) -> bool:
    """Does autograd take the gradient of ``array`` to where ``parameter`` knows nothing of it?

    A parameter that says itself what it is computed from is differentiated as it asks.
    """
    if is_derived(parameter):
        return False
    return is_recorded(array) or (parameter.grad_req == "null" and array.grad is not None)
