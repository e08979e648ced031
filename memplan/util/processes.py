"""Processes that end with the one that started them, and how one has ended, in words."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import sys

# From linux/prctl.h: the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1

# The path is that of this process before anything is imported, whatever lies in the folder.
_CODE = r"import sys; sys.path[:] = sys.argv.pop().split('\n'); from {} import main; main()"


def calling_main(module: str, *numbers: int) -> list[str]:
    """The command of a process that calls ``main`` of ``module``.

    Its arguments are the number of this process and ``numbers``; it imports what this one would.
    OSError where Python does not know its own program, as in one that embeds it.
    """
    if not sys.executable:
        raise FileNotFoundError(errno.ENOENT, f"sys.executable is {sys.executable!r}")
    path = "\n".join(entry for entry in sys.path if isinstance(entry, str))
    code = _CODE.format(module)
    return [sys.executable, "-c", code, *map(str, (os.getpid(), *numbers)), path]


def check_can_start() -> None:
    """OSError where as many processes run as may.

    Popen would try ``vfork``, and then ``fork``, for which MXNet stops its threads: where it cannot
    start all of them again, it aborts this process. ``posix_spawn`` tries nothing else, and says by
    another error that it could have started what nobody can execute, a folder.
    """
    try:
        os.posix_spawn(os.sep, [os.sep], {})
    except OSError as error:
        if error.errno != errno.EACCES:
            raise OSError(error.errno, error.strerror) from None


def pipe() -> tuple[int, int]:
    """The ends of a pipe to hand to another process.

    Where stdin is closed, as in a daemon, ``os.pipe`` gives its number to one of them, which the
    other process would have for its own stdin. OSError where as many files are open as may be.
    """
    ends = os.pipe()
    try:
        reader = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            writer = fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:
            os.close(reader)
            raise
    finally:
        for end in ends:
            os.close(end)
    return reader, writer


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
