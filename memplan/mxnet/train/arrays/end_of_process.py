"""The end of a process, which waits for its steps: MXNet may abort one that ends during a step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from typing import Any
from weakref import WeakKeyDictionary

import mxnet as mx

from memplan.mxnet.train.arrays.bound_arrays import BoundArrays
from memplan.planning.process import IDLE_TIMER
from memplan.util.weak_keys import keys_of

NDArray = Any

#: What the steps of executors write, outputs and gradients.
_WRITTEN: WeakKeyDictionary[BoundArrays, list[NDArray]] = WeakKeyDictionary()


def wait_at_exit(executor: BoundArrays, written: list[NDArray]) -> None:
    """From now on a process ends when the steps of ``executor``, which write so, are done."""
    _WRITTEN[executor] = written
    _register()


@functools.cache
def _register() -> None:
    """Before what was registered earlier, such as the end of MXNet's engine."""
    atexit.register(_wait)


def _wait() -> None:
    """Wait for all that MXNet does; for the steps alone where other threads may ask for more.

    MXNet would never be done with what such a thread goes on asking for.
    """
    if not any(one.daemon and one.name != IDLE_TIMER for one in threading.enumerate()):
        mx.nd.waitall()
        return
    for executor in keys_of(_WRITTEN):
        # Some steps update the arguments.
        for array in [*_WRITTEN[executor], *executor.arg_arrays, *executor.aux_arrays]:
            with contextlib.suppress(mx.MXNetError):  # a step has failed, and is over
                array.wait_to_read()
