"""What holds while the calls of a step are made."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import TypeVar

from mxnet.base import _LIB

T = TypeVar("T")

# What MXNet has not told yet, and where it writes what nobody reads.
_UNTOLD, _UNREAD = -1, ctypes.byref(ctypes.c_int())


class StepScope:
    """Within it no gradient is recorded, layers compute as in training, and no garbage is looked
    for, nor does the engine bundle anything: a bundle of the user's would cut those of a step in
    two. ``was_training`` tells whether whoever entered it was in training mode. With
    ``is_recording`` gradients are recorded.

    MXNet's own scopes take three times as long: 3% of a step of a millisecond. Ctrl-C comes between
    two lines of these functions, too, and must leave nothing as it is within.
    """

    def __init__(self, *, is_recording: bool = False) -> None:
        self._is_recording = int(is_recording)
        self._numbers = [ctypes.c_int(_UNTOLD) for _ in range(3)]
        self._places = [ctypes.byref(number) for number in self._numbers]
        self._collects = False

    @property
    def was_training(self) -> bool:
        return bool(self._numbers[1].value)

    def __enter__(self) -> StepScope:
        recording, training, bundled = self._places
        self._collects = gc.isenabled()
        try:
            gc.disable()
            _LIB.MXAutogradSetIsRecording(self._is_recording, recording)
            _LIB.MXAutogradSetIsTraining(1, training)
            _LIB.MXEngineSetBulkSize(0, bundled)
        except BaseException:
            self.restore()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.restore()
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Set what was set since the scope was entered to what it was before, and only that."""
        recording, training, bundled = self._numbers
        if bundled.value != _UNTOLD:
            _LIB.MXEngineSetBulkSize(bundled, _UNREAD)
        if training.value != _UNTOLD:
            _LIB.MXAutogradSetIsTraining(training, _UNREAD)
        if recording.value != _UNTOLD:
            _LIB.MXAutogradSetIsRecording(recording, _UNREAD)
        if self._collects:
            gc.enable()
        for number in self._numbers:
            number.value = _UNTOLD
        self._collects = False


def recorded(compute: Callable[[], T]) -> T:
    """What ``compute`` returns, with its gradients recorded.

    MXNet's own scope would record on for good where Ctrl-C comes as it is entered or left.
    """
    scope = StepScope(is_recording=True)
    try:
        with scope:
            return compute()
    except BaseException:  # Ctrl-C may have come before the scope was left
        scope.restore()
        raise
