"""The gradient of one parameter, for which a plan has an array, and a script may have others."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from memplan.mxnet.realise.own_autograd import mark_variables
from memplan.mxnet.train.arrays.array_memory import (
    handle_of,
    is_unused,
    other_handle,
    without_memory,
)
from memplan.mxnet.train.arrays.nesting import of_semantics
from memplan.mxnet.train.arrays.withheld import Kind, shown, withhold

NDArray = Any
Parameter = Any


@dataclass
class Held:
    """The gradient of a parameter on one context, where the plan computes one.

    The array that scripts have of it (``p.grad()``) stays one Python object: :meth:`give` changes
    its handle. Scripts and MXNet may put another object or handle there. What is there now may be
    what this gave (:meth:`is_ours`), be left alone since it was lent (:meth:`is_kept`), or come
    from elsewhere than a plan (:meth:`is_replaced`); the parameter may have other data, or no
    gradient (not :meth:`is_of_parameter`), so that scripts alone hold it (:meth:`is_orphaned`).
    """

    parameter: Parameter
    place: int
    request: str
    data: NDArray
    array: NDArray
    #: What this gave last to the parameter's array; one with another handle is of others.
    handle_given: Any = None
    #: The class of the array while it is withheld: nobody may read it.
    kind: Kind | None = None
    #: The parameter's gradients when it was lent one; MXNet makes another list for other arrays.
    list_when_lent: Any = None
    #: The array that it was lent in the step before, if nobody had used that when the step ended.
    spare: NDArray | None = None
    #: Was it still to be used by a trainer when its array was taken?
    was_fresh: bool = False
    #: The series of what this gave last.
    series: int = 0
    #: What the parameter's gradient was when this gave something last: a script may hold it.
    array_given: NDArray | None = None

    @property
    def current(self) -> NDArray | None:
        """What the parameter's gradient is now; None if it has none in this place."""
        arrays = self.parameter._grad or ()
        return arrays[self.place] if self.place < len(arrays) else None

    def to_lend(self) -> NDArray:
        """An array for the gradient, without memory: that of the step before, if nobody used it.

        Most of the time that lending takes MXNet would make another one, and free it.
        """
        spare, self.spare = self.spare, None
        return spare if spare is not None and is_unused(spare) else without_memory(self.array)

    def is_ours(self) -> bool:
        """Has the parameter's array still the handle that this gave?"""
        return self.current is not None and handle_of(self.current) is self.handle_given

    def withhold(self) -> None:
        """Let nobody read the gradient, which is not there."""
        if self.current is not None:
            of = (self.parameter, self.data)
            self.kind = withhold(self.current, self.kind, *of, was_fresh=self.was_fresh)
        self.was_fresh = False

    def show(self) -> None:
        """Let anybody read the gradient, which is there again."""
        if self.current is not None:
            shown(self.current)

    def is_of_parameter(self) -> bool:
        """Has the parameter still this array, in this place, and a gradient?"""
        parameter = self.parameter
        if parameter._grad is None or len(parameter._data) <= self.place:
            return False
        return parameter._data[self.place] is self.data

    def is_replaced(self) -> bool:
        """Has somebody else than a plan given the parameter another array, since this gave one?

        MXNet does where ``grad_req`` is set anew. Who holds the one of before keeps its numbers
        then, and that may be in the memory of the step.
        """
        current = self.current
        if current is None or handle_of(current) is self.handle_given:  # as in most steps
            return False
        return bool(self.series) and self._series_now() != self.series

    def is_orphaned(self) -> bool:
        """Is the gradient no longer that of the parameter: is it replaced, frozen or added to?"""
        data = (self.parameter._data or ())[self.place :]
        is_same = bool(data) and data[0] is self.data and self.parameter.grad_req == self.request
        return not is_same or self.is_replaced()

    def is_kept(self) -> bool:
        """Has the script left parameter and gradient alone since the gradient was lent?"""
        parameter = self.parameter
        is_same = parameter._grad is self.list_when_lent and parameter.grad_req == self.request
        return is_same and self.is_of_parameter()

    def give(self, array: NDArray) -> NDArray | None:
        """Make ``array`` what the parameter's gradient is; what it was.

        The Python object stays: who asked for the gradient before the loop may hold it.
        """
        other = other_handle(array)
        self.series = self._series_now() or next(_SERIES)
        if self.parameter._grad is None:  # it was given up, on the one context where it was
            self.parameter._grad = [None]
        current = self.parameter._grad[self.place]
        if current is None or not (self.is_ours() or shown(current).stype == array.stype):
            self.parameter._grad[self.place] = of_semantics(other)
            self.handle_given = self.parameter._grad[self.place].handle
            self._note_given()
            return current
        self.handle_given = other.handle
        self._note_given()
        handle = shown(current).handle
        current.handle, other.handle = other.handle, handle
        return other

    def move_out(self) -> None:
        """Give the parameter an array of its own for its gradient, with what that is now."""
        gradient = self.parameter._grad[self.place]
        is_fresh = self.data._fresh_grad
        self.give(gradient.copy())
        mark_variables([self.data], [gradient], "write")
        self.data._fresh_grad = is_fresh
        self._note_given(is_of_plan=False)
        self.handle_given = self.array_given = None

    def leave_replaced(self) -> None:
        """Give what a script may hold of before, where MXNet has put another in its place, memory.

        Else it would keep that of the whole step.
        """
        before, self.array_given = self.array_given, None
        if sys.getrefcount(before) <= 2:  # by this name and the call: no script holds it
            return
        if (
            before is not None
            and before is not self.current
            and handle_of(before) is self.handle_given
        ):
            copy = shown(before).copy()
            before.handle, copy.handle = copy.handle, before.handle

    def _note_given(self, *, is_of_plan: bool = True) -> None:
        self.array_given = self.parameter._grad[self.place]
        given = _Given(self.handle_given, self.series, is_of_plan)
        _GIVEN.setdefault(self.parameter, {})[self.place] = given

    def _series_now(self) -> int:
        """The series of what the parameter's gradient is now; 0 where no plan gave that."""
        given, current = _GIVEN.get(self.parameter, {}).get(self.place), self.current
        is_same = given and (current is None or handle_of(current) is given.handle)
        return given.series if given and is_same else 0


@dataclass(frozen=True)
class _Given:
    """What plans gave last to the gradient of a parameter on one context.

    ``series`` numbers what they gave in turn, with nothing of anybody else's in between.
    """

    handle: Any
    series: int
    is_of_plan: bool  #: Else it is the parameter's own, with what was computed in a plan's.


_GIVEN: WeakKeyDictionary[Parameter, dict[int, _Given]] = WeakKeyDictionary()
_SERIES = itertools.count(1)


def is_of_plan(parameter: Parameter, place: int) -> bool:
    """Is its gradient on the context of this ``place`` an array of a plan's?"""
    given = _GIVEN.get(parameter, {}).get(place)
    if given is None or not given.is_of_plan:
        return False
    return handle_of(parameter._grad[place]) is given.handle
