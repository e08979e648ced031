"""Threads that train by plans take turns: what they have in memory is one step's on each context.

A script may have a thread for every device (GluonNLP's and GluonCV's ``parallel``), and MXNet's
autograd has a state for every thread. A turn ends when a half of a step has been asked of MXNet's
engine, which then works for all devices at once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from memplan.mxnet.realise.wrapped_functions import is_of_wrapped

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

# Where MXNet enters Python in its threads.
_CALLED_BY_MXNET = ("mxnet.operator", "mxnet.autograd")

#: Whose turn it is. A thread that has it may ask for it again.
TURN = threading.RLock()


def in_turn(method: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """``method``, run by one thread at a time, whatever methods there are."""

    @functools.wraps(method)
    def waiting(*args: _Given.args, **options: _Given.kwargs) -> _Result:
        with TURN:
            return method(*args, **options)

    return waiting


def is_mxnets_thread() -> bool:
    """Is this a thread of MXNet's own, in which it runs the code of Custom ops?

    Whoever has the turn may wait for that code, so it must not wait for a turn. Python's
    ``threading`` has started none of these threads, but nor has it those of other libraries.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return False
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
    is_scripts = is_of_wrapped(frame)  # which other libraries may call in threads of theirs
    return not is_scripts and frame.f_globals.get("__name__") in _CALLED_BY_MXNET
