"""Processes that end with the one that started them, and how one has ended, in words."""

from __future__ import annotations

import ctypes
import os
import signal

# From linux/prctl.h: the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> bool:
    """Have this process killed when its ``parent`` ends, however that ends; False if it has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def ending(status: int) -> str:
    """How a process ended whose exit status, as Python's subprocess has it, is ``status``."""
    if status >= 0:
        return f"ended with status {status}"
    why = ", probably as the machine has no memory left" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{why}"
