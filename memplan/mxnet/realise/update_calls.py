"""The updates of parameters within a packed step.

An optimizer's own code makes a call of an operator for each parameter, by MXNet's functions of
Python. Where it is known which operators these are, the updates are calls as those of the step are:
they are made ready once, and bundles of them are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from memplan.mxnet.realise.direct_call import Attributes, attributes, with_attributes
from memplan.mxnet.realise.engine import Handles
from memplan.mxnet.realise.imperative import BackwardCall, Call, PartCalls

NDArray = Any


class UpdateOperator:
    """An operator that updates parameters, and its attributes, which others may have, too."""

    __slots__ = ("_parsed", "attrs", "op")

    def __init__(self, op: str, attrs: Attributes) -> None:
        self.op, self.attrs = op, attrs
        self._parsed: Any = None

    @property
    def parsed(self) -> Any:
        """As MXNet reads the attributes, once for all parameters."""
        if self._parsed is None:
            self._parsed = attributes(self.op, self.attrs)
        return self._parsed


#: By the names of parameters: what updates each of them, and the states that it reads, and writes.
Operators = Mapping[str, tuple[UpdateOperator, tuple[NDArray, ...]]]


class Holder(Protocol):
    """A step whose calls hold the states that they write."""

    def forget_updates(self) -> None:
        """Hold them no longer."""


class Updates(Protocol):
    """Updates parameters within a step, as an optimizer does behind it.

    Within :meth:`step`, ``in_turn`` tells whether an update asks the engine for one operation, does
    not wait for it, and leaves the gradient as it is, and ``by_operators`` whether ``operators``
    make the updates in place of :meth:`update`. These are asked for when the first is due, and the
    same object as in the last step where none of them has changed; ``are_changing`` tells whether
    they have done so in all of the last steps.
    """

    @property
    def in_turn(self) -> bool: ...

    @property
    def by_operators(self) -> bool: ...

    @property
    def are_changing(self) -> bool: ...

    @property
    def operators(self) -> Operators: ...

    def step(self, weights: Mapping[str, NDArray]) -> AbstractContextManager[None]:
        """Within it each of ``weights`` is updated once, in any order."""

    def update(self, name: str, weight: NDArray, gradient: NDArray) -> None:
        """Update the parameter of this name; ``gradient`` is written over afterwards."""

    def serve(self, step: Holder) -> None:
        """From now on tell ``step``, which need not live on, where states have been replaced."""


class UpdateCall:
    """The update of a parameter.

    One that is alone gets a copy of the gradient, which it may keep or write into: the
    gradient may share its memory with a tensor that is still read.
    """

    def __init__(self, updates: Updates, name: str, weight: NDArray, gradient: NDArray) -> None:
        self.name, self.weight, self.updates = name, weight, updates
        self.written = [weight]
        self.outputs: Sequence[NDArray | None] = ()
        #: As of :class:`Call`.
        self.skips: int | None = None
        self._gradient = gradient
        self._call: _ChangingCall | None = None
        self._states: tuple[NDArray, ...] = ()
        #: Those for which the call was made ready.
        self._operators: Operators | None = None

    @property
    def is_alone(self) -> bool:
        """Does it belong in no bundle?"""
        return not self.updates.in_turn

    @property
    def frees(self) -> bool:
        """May the code of an optimizer free an array meanwhile?"""
        return not self.updates.by_operators

    @property
    def may_be_direct(self) -> bool:
        """As of :class:`Call`."""
        return self.updates.by_operators

    @property
    def noperations(self) -> int:
        """As of :class:`Call`."""
        return self._call.noperations if self.updates.by_operators and self._call else 0

    def forget(self) -> None:
        """Hold no states, and know nothing of the steps up to now."""
        self._operators = self._call = self.skips = None
        self._states = ()

    def prepare(self) -> None:
        """Make it ready for the operator of this step: before a bundle, for this may free states.

        MXNet would cut the bundle there. When it is called within one it finds itself ready.
        """
        operators = self.updates.operators
        if operators is self._operators:
            return
        operator, states = operators[self.name]
        call = self._call
        if call is None or states is not self._states or operator.op != call.operator.op:
            arrays = Handles([self.weight, self._gradient, *states]), Handles([self.weight])
            self._call = _ChangingCall(operator, *arrays)
            self._states = states
        elif operator is not call.operator:
            call.change(operator)
        self._operators = operators

    def __call__(self) -> None:
        if self.updates.by_operators:
            self.prepare()
            assert self._call is not None
            self._call()
            return
        gradient = self._gradient
        if self.is_alone:
            gradient = gradient.copy()
            gradient.wait_to_read()
        self.updates.update(self.name, self.weight, gradient)


class _ChangingCall(Call):
    """A call of an ``operator`` that may have other attributes from step to step."""

    __slots__ = ("operator",)

    def __init__(self, operator: UpdateOperator, inputs: Handles, outputs: Handles) -> None:
        super().__init__(operator.op, dict(operator.attrs), inputs, outputs)
        self.operator = operator

    def change(self, operator: UpdateOperator) -> None:
        """From now on it is of this ``operator``, which is the same but for the attributes."""
        if self.noperations:
            self._arguments = with_attributes(self._arguments, operator.parsed)
        else:
            numpy_shapes = self._numpy_shapes
            super().__init__(operator.op, dict(operator.attrs), self._inputs, self._outputs)
            self._numpy_shapes = numpy_shapes  # which depend on no attribute of an update
        self.operator = operator


AnyCall = Call | BackwardCall | PartCalls | UpdateCall
