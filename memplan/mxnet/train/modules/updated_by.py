"""By what the step of a Module has updated its parameters, looked at until ``update()`` is called.

MXNet updates there, by what is there then: whatever a script has set, replaced or written in
between.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import mxnet as mx

from memplan.errors import UsageError
from memplan.mxnet.train.arrays.nesting import leaves
from memplan.mxnet.train.arrays.writes import Writes
from memplan.mxnet.train.updates import changed, counts_of, counts_of_steps, inputs_of

NDArray = Any

# What these say depends on the number of updates alone, up to the last for which they have a rate.
_BY_NUMBER = mx.lr_scheduler.PolyScheduler, mx.lr_scheduler.CosineScheduler

# What these say depends on their attributes, too, and on nothing else, as a schedule of the user's
# may.
_KNOWN = (*_BY_NUMBER, mx.lr_scheduler.FactorScheduler, mx.lr_scheduler.MultiFactorScheduler)

_NUMBERS = itertools.count(1)
#: By the numbers of the last steps of Modules whose ``update()`` is still to be called.
_DUE: WeakValueDictionary[int, UpdatedBy] = WeakValueDictionary()


class UpdatedBy:
    """What enters the updates of a step, as it is at its end."""

    def __init__(self) -> None:
        #: That of the step, among all of the process.
        self._number = 0
        self._updater: Any = None
        self._before: Mapping[str, Any] = {}
        self._states: Sequence[NDArray] = ()
        self._watched = _Watched()
        self._turned = False
        #: Has a step updated the parameters, and ``update()`` was not called?
        self.is_due = False

    def begin(
        self, updater: mx.optimizer.Updater, weights: Sequence[NDArray], *, turned: bool
    ) -> None:
        """A step has updated these ``weights`` by ``updater``; has it ``turned`` its schedule?

        That is: has it changed what the schedule has.
        """
        self.end()
        self._turned = turned
        now = inputs_of(updater)
        if now["states"] != self._before.get("states"):
            self._states = list(leaves(list(updater.states.values())))
        self._updater, self._before = updater, now
        self._watched.begin(self._states, weights)
        self.is_due = True
        self._number = next(_NUMBERS)
        _DUE[self._number] = self

    def check(self, updater: Any) -> None:
        """UsageError if ``update()`` by ``updater`` would not be what the last step has done."""
        if not self.is_due:
            raise UsageError(
                "parameters are updated within the training step, and none has run since the last "
                "update()"
            )
        if not self._is_in_turn():
            raise UsageError(
                "another Module with this optimizer, or whose step changed this lr_scheduler, has "
                "trained a step before, and its update() was not called since: steps have updated "
                "the parameters in their own order; call update() in that, or take "
                "realisation='packed'"
            )
        names = self._changed(updater)
        if names:
            raise UsageError(
                f"{', '.join(names)} changed after the training step, which has updated the "
                f"parameters already; set what updates depend on before the step "
                f"(forward_backward), or take realisation='packed'"
            )

    def _is_in_turn(self) -> bool:
        """Was ``update()`` called for every step before on which this one depends?

        MXNet updates in the order of these calls, steps in their own, and what an optimizer says
        depends on the updates before. So it does on a schedule that one of them has changed.
        Whether a later step has, :meth:`_changed` sees.
        """
        others = [reference() for reference in _DUE.valuerefs()]
        earlier = [other for other in others if other and other._number < self._number]
        return not any(map(self._depends_on, earlier))

    def _depends_on(self, other: UpdatedBy) -> bool:
        """Would MXNet's numbers be others without the step before, of ``other``?"""
        optimizer, others = self._updater.optimizer, other._updater.optimizer
        schedule = optimizer.lr_scheduler
        if optimizer is others or schedule is None or schedule is not others.lr_scheduler:
            return optimizer is others
        if type(schedule) in _BY_NUMBER and optimizer.num_update <= schedule.max_update:
            return False
        return other._turned or type(schedule) not in _KNOWN

    def _changed(self, updater: Any) -> list[str]:
        """The names of what was set or written since, or counted by others than steps."""
        if updater is not self._updater:
            return ["updater"]
        names = changed(inputs_of(updater), self._before)
        names += changed(counts_of(updater.optimizer), counts_of_steps(updater.optimizer))
        names += filter(self._watched.are_written, ("states", "parameters"))
        return list(dict.fromkeys(names))

    def end(self) -> None:
        """Look no longer."""
        _DUE.pop(self._number, None)
        self._watched.end()
        self.is_due = False


class _Watched:
    """Arrays of which it is looked whether somebody writes into them: mostly the same ones."""

    def __init__(self) -> None:
        self._arrays: Sequence[NDArray] = ()
        self._writes = Writes({})

    def begin(self, states: Sequence[NDArray], parameters: Sequence[NDArray]) -> None:
        """Look at these from now on."""
        arrays = [*states, *parameters]
        if list(map(id, arrays)) != list(map(id, self._arrays)):
            self._arrays = arrays
            kinds = ["states"] * len(states) + ["parameters"] * len(parameters)
            names = [f"{kind} {place}" for place, kind in enumerate(kinds)]
            self._writes = Writes(dict(zip(names, arrays, strict=True)))
        self._writes.begin()

    def are_written(self, kind: str) -> bool:
        """Was any array of this ``kind``, "states" or "parameters"?"""
        return any(name.startswith(kind) for name in self._writes.written())

    def end(self) -> None:
        self._writes.pause()
