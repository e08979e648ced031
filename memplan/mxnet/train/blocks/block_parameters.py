"""The parameters of blocks, and whether a step can train them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mxnet as mx
from mxnet import autograd

from memplan.errors import ArgumentError
from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.train.arrays.array_memory import (
    chunk_of,
    handle_of,
    is_held_elsewhere,
    memories_in_python,
)
from memplan.mxnet.train.arrays.asked_gradients import follow, marked_gradient
from memplan.mxnet.train.arrays.given_up import is_stand_in
from memplan.mxnet.train.arrays.held import is_of_plan
from memplan.mxnet.train.arrays.nesting import is_recorded
from memplan.mxnet.train.arrays.parameters import every_parameter, is_derived
from memplan.mxnet.train.blocks.named_parameters import by_name
from memplan.util.words import first_of

NDArray = Any
Parameter = Any


def trainable(pairs: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Parameters by name; ArgumentError for those that cannot be trained."""
    parameters = by_name(pairs)
    for name, parameter in parameters.items():
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
    """ArgumentError for a parameter whose array hands its gradient on, or cannot have one."""
    for parameter in parameters:
        if any(_hands_on(parameter, array) for array in parameter._data or ()):
            raise ArgumentError(
                f"a script gave parameter {parameter.name!r} an array that was computed under "
                f"autograd.record(), or has a gradient of its own, to which a plan hands nothing "
                f"on; compute it in hybrid_forward, or take planned(block), which leaves such "
                f"steps to MXNet"
            )
        if _is_unknown(parameter):
            raise ArgumentError(
                f"autograd does not know the array of parameter {parameter.name!r}, as after "
                f"copy.deepcopy of its block, which MXNet cannot train, either; for each parameter "
                f"set grad_req = 'null' and then what it was, which tells autograd of it"
            )


def check_trained(
    parameters: Iterable[Parameter], block: mx.gluon.Block, *, is_planned: bool
) -> None:
    """ArgumentError where no gradient is wanted of all ``parameters`` that ``block`` reads.

    A block that ``is_planned`` runs in the place of that, but its code must not run twice.
    """
    if all(parameter.grad_req == "null" for parameter in parameters):
        other = "set grad_req of those that it does not read to 'null', and it runs unplanned"
        raise ArgumentError(
            f"there is nothing to train: no parameter that {block.name!r} reads wants a gradient; "
            f"{other if is_planned else 'call the block itself'}, or set grad_req of some to "
            f"'write'"
        )


def _is_unknown(parameter: Parameter) -> bool:
    """Has ``parameter`` a gradient that autograd does not know, nor a plan?"""
    arrays = () if is_derived(parameter) or not parameter._grad else parameter._data
    return any(
        marked_gradient(array) is None and not is_of_plan(parameter, place)
        for place, array in enumerate(arrays)
    )


def reason_unknown(block: mx.gluon.Block) -> str:
    """Why MXNet trains no parameter of ``block``, one of which wants a gradient, or nothing.

    Such a copy may be a target network, whose outputs the loss detaches.
    """
    if not all(_is_unknown(p) for p in every_parameter(block) if p.grad_req != "null"):
        return ""
    return (
        "autograd knows no array of its parameters, as after copy.deepcopy of it, so that MXNet "
        "trains none of them; if it is to, set grad_req = 'null' for each, and then what it was"
    )


class GivenArrays:
    """What a script has given the parameters of ``blocks`` that is beyond a plan.

    Networks whose weights are drawn or made anew in every step get arrays that are computed of
    others: ``p._data[0] = mean.data() + noise``, under ``autograd.record()``. Their gradients go on
    to what the arrays were made of. Other scripts have the gradients in arrays of their own, which
    a plan replaces: ``p.data().grad`` of before the loop, or one flat array and views of it.
    """

    def __init__(self, blocks: Sequence[mx.gluon.Block]) -> None:
        self._blocks = blocks
        self._known: list[Any] = []
        self._reason = ""
        _count_marks()
        follow(blocks)

    def reason(self) -> str:
        """Why a plan cannot train them, or nothing; arrays that are known are not asked again."""
        parameters = list(
            {id(p): p for block in self._blocks for p in every_parameter(block)}.values()
        )
        now = [a for p in parameters for a in (*(p._data or ()), *_marks_of_gradients(p))]
        now += [p for p in parameters if p.grad_req == "null" and _is_attached(p)]
        now.append(_NMARKED[0])
        known = self._known
        if len(now) != len(known) or any(a is not b for a, b in zip(now, known, strict=True)):
            self._known, self._reason = now, _reason(parameters)
        return self._reason

    def check(self) -> None:
        """ArgumentError for what a plan cannot train."""
        if reason := self.reason():
            self._known = []  # it is asked again: until the next step the script may forget some
            raise ArgumentError(
                f"{reason}; or take planned(block), which leaves such steps to MXNet"
            )


def _marks_of_gradients(parameter: Parameter) -> Iterator[Any]:
    """What tells the gradients of ``parameter`` from others: True for each that is a plan's.

    It is the handle of the array, not the array: that would have its memory while a step runs that
    gives the gradient up, and an id would be that of another array then.
    """
    for place, array in enumerate(parameter._grad or ()):
        yield is_of_plan(parameter, place) or handle_of(array)


def _reason(parameters: Sequence[Parameter]) -> str:
    given = {p.name: p for p in parameters if any(_hands_on(p, a) for a in p._data or ())}
    computed = [name for name, p in given.items() if any(map(is_recorded, p._data))]
    if computed:
        return (
            f"a script gave its parameters arrays whose gradients go on to others "
            f"({first_of(computed, 1)}), which is beyond a plan; compute them in hybrid_forward"
        )
    if given:
        return (
            f"a script called attach_grad of the arrays of frozen parameters "
            f"({first_of(given, 1)}), which is beyond a plan; set their grad_req to 'write' instead"
        )
    held = _held(parameters)
    if held:
        return (
            f"a script has gradients of its parameters in other arrays than p.grad() "
            f"({first_of(held, 1)}), such as views of one array, or what p.data().grad gave "
            f"before, into which a plan writes none; ask for p.grad() behind each backward, and "
            f"forget others"
        )
    return ""


def _held(parameters: Iterable[Parameter]) -> list[str]:
    """The names of those whose gradients a script has in other arrays than ``p.grad()``.

    They are views, or what ``p.data().grad`` was. A gradient that autograd alone knows, by
    ``mark_variables`` or ``attach_grad``, counts if somebody has it.
    """
    if next(_held_now(parameters), None) is None:
        return []
    mx.nd.waitall()
    time.sleep(0.01)  # the engine frees what it has done a moment later
    held = list(dict.fromkeys(_held_now(parameters)))
    if not held:
        return []
    # MXNet itself may have them, too: a static graph has the gradients that it has computed, and
    # an array of which an exception has kept Python from giving the handle back is there for good.
    others = memories_in_python(array for p in held for array in p._grad)
    return [p.name for p in held if not others.isdisjoint(_memories_of_gradients(p))]


def _held_now(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    for p in parameters:
        for place, array in enumerate(p._grad or ()):
            marked = None if is_derived(p) else marked_gradient(p._data[place])
            is_other = marked is not None and chunk_of(marked) != chunk_of(array)
            if is_other and is_held_elsewhere(marked, is_asked=True):
                yield p
            del marked  # which has the memory, too
            is_replaced = p.grad_req == "write" and not is_of_plan(p, place)
            if is_replaced and is_held_elsewhere(array, is_asked=False):
                yield p


def _memories_of_gradients(parameter: Parameter) -> Iterator[int]:
    """Where its gradients are, and where autograd would write them."""
    marked = () if is_derived(parameter) else map(marked_gradient, parameter._data)
    yield from (chunk_of(a) for a in (*parameter._grad, *marked) if a is not None)


#: How often somebody else than memplan has told autograd where to write gradients.
_NMARKED = [0]


@functools.cache
def _count_marks() -> None:
    for module in (autograd, mx.contrib.autograd):
        wrap(module, "mark_variables", _counted)
    for kind in (mx.nd.NDArray, mx.np.ndarray):
        if "attach_grad" in vars(kind):
            wrap(kind, "attach_grad", _counted)


def _counted(mark: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(mark)
    def counted(*args: Any, **options: Any) -> None:
        _NMARKED[0] += 1
        mark(*args, **options)

    return counted


def _is_attached(parameter: Parameter) -> bool:
    """Has a script attached a gradient to an array of frozen ``parameter``?"""
    arrays = () if is_derived(parameter) else parameter._data or ()
    marked = (marked_gradient(array) for array in arrays)
    return any(m is not None and not is_stand_in(parameter, m) for m in marked)


def _hands_on(parameter: Parameter, array: NDArray) -> bool:
    """Does autograd take the gradient of ``array`` to where ``parameter`` knows nothing of it?

    A parameter that says itself what it is computed from is differentiated as it asks.
    """
    if is_derived(parameter):
        return False
    return is_recorded(array) or (parameter.grad_req == "null" and _is_attached(parameter))
