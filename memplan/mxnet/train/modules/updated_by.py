"""By what the step of a Module has updated its parameters, looked at until ``update()`` is called.

MXNet updates there, by what is there then: whatever a script has set, replaced or written in
between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.train.arrays.nesting import leaves
from memplan.mxnet.train.arrays.writes import Writes
from memplan.mxnet.train.updates import changed, counts_of, counts_of_steps, inputs_of

NDArray = Any


class UpdatedBy:
    """What enters the updates of a step, as it is at its end."""

    def __init__(self) -> None:
        self._updater: Any = None
        self._before: Mapping[str, Any] = {}
        self._states = _Watched()
        self._parameters = _Watched()
        #: Has a step updated the parameters, and ``update()`` was not called?
        self.is_due = False

    def begin(self, updater: mx.optimizer.Updater, weights: Iterable[NDArray]) -> None:
        """A step has updated these ``weights`` by ``updater``."""
        self.end()
        self._updater, self._before = updater, inputs_of(updater)
        self._states.begin(list(leaves(list(updater.states.values()))))
        self._parameters.begin(list(weights))
        self.is_due = True

    def changed(self, updater: Any) -> list[str]:
        """The names of what was set or written since, or counted by others than steps."""
        if updater is not self._updater:
            return ["updater"]
        names = changed(inputs_of(updater), self._before)
        names += changed(counts_of(updater.optimizer), counts_of_steps(updater.optimizer))
        watched = {"states": self._states, "parameters": self._parameters}
        names += [name for name, arrays in watched.items() if arrays.are_written()]
        return list(dict.fromkeys(names))

    def end(self) -> None:
        """Look no longer."""
        self._states.end()
        self._parameters.end()
        self.is_due = False


class _Watched:
    """Arrays of which it is looked whether somebody writes into them: mostly the same ones."""

    def __init__(self) -> None:
        self._arrays: Sequence[NDArray] = ()
        self._writes = Writes({})

    def begin(self, arrays: Sequence[NDArray]) -> None:
        """Look at these from now on."""
        if list(map(id, arrays)) != list(map(id, self._arrays)):
            self._arrays = arrays
            self._writes = Writes({str(place): array for place, array in enumerate(arrays)})
        self._writes.begin()

    def are_written(self) -> bool:
        return bool(self._writes.written())

    def end(self) -> None:
        self._writes.pause()
