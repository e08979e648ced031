"""A process that ends with the one that started it."""

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
