"""The gradients of Modules on a device as scripts have them: one array each, for all shapes.

MXNet's executors of all shapes keep the gradient of a parameter in one memory, and a script may
take the arrays once, to clip them in every step. Planned steps of each shape have the gradients
elsewhere in their memory: so what a script gets is an array whose handle goes with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from memplan.mxnet.train.arrays.array_memory import other_handle, without_memory
from memplan.mxnet.train.arrays.withheld import refuse, shown

NDArray = Any
Arrays = dict[str, NDArray]
Key = tuple[str, tuple[int, ...], str]

GONE = (
    "the gradient of {!r} is not there: a step, or an inference, of another shape has taken its "
    "memory since the last training step of this one; read gradients right behind the training "
    "step, and call update() there"
)


class ModuleGradients:
    """The arrays for gradients: one for each parameter, and one for each shape of an input."""

    def __init__(self) -> None:
        self._arrays: dict[Key, NDArray] = {}
        #: Those that have memory of their own.
        self._apart: set[Key] = set()
        #: What the step that ran last has computed, and its inputs.
        self._last: Mapping[str, NDArray] = {}
        self._inputs: Collection[str] = ()

    def of(self, keys: Mapping[str, Key]) -> Arrays:
        """The arrays that are known by these ``keys``, as far as there are such."""
        return {name: self._arrays[key] for name, key in keys.items() if key in self._arrays}

    def add(self, computed: Mapping[str, NDArray]) -> None:
        """Have arrays for what a step will compute that is bound now: the last one's stay."""
        for name, array in computed.items():
            self._arrays.setdefault(key_of(name, array), other_handle(array))

    def begin(self, computed: Mapping[str, NDArray], inputs: Collection[str]) -> None:
        """Before a step with these ``inputs``: the arrays are what it has ``computed`` then.

        What it leaves out stays what it was, as in MXNet: of parameters, which other networks on
        the device may have. The inputs of another shape lie in memory that the step writes over.
        """
        if computed is self._last:
            return
        arrays = {key_of(name, array): array for name, array in computed.items()}
        for name, array in self._last.items():
            if (key := key_of(name, array)) in arrays:
                continue
            if name in self._inputs:
                self._give_up(key)
            else:
                self._give(key, array.copy())
                self._apart.add(key)
        for key, array in arrays.items():
            self._give(key, other_handle(array))
        self._apart.difference_update(arrays)
        self._last, self._inputs = computed, inputs

    def clear(self) -> None:
        """The memory of all steps is to be freed: nobody may read the gradients in it."""
        for key in self._arrays.keys() - self._apart:
            self._give_up(key)
        self._last = {}

    def _give(self, key: Key, array: NDArray) -> None:
        """Make ``array``, which nobody else has, what the array for this gradient is."""
        current = shown(self._arrays[key])
        current.handle, array.handle = array.handle, current.handle

    def _give_up(self, key: Key) -> None:
        array = self._arrays[key]
        self._give(key, without_memory(array))
        refuse(array, GONE.format(key[0]))


def key_of(name: str, array: NDArray) -> Key:
    """By what the array for the gradient of an argument is known, or what is computed there."""
    return name, array.shape, np.dtype(array.dtype).name
