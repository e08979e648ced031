"""What native code of solvers does to the process: a library it loads, lines it prints."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def load_openblas_of_mxnet() -> None:
    """Load the OpenBLAS that MXNet brings, if MXNet is installed, before CBC loads its own.

    The two have one name, so that the first serves both; CBC's lacks functions that MXNet needs,
    which could then no longer be imported in this process.
    """
    spec = importlib.util.find_spec("mxnet")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder).glob("libopenblas.so*"):
            with contextlib.suppress(OSError):  # MXNet will say itself what it lacks
                ctypes.CDLL(str(library))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what CBC's linear solver prints, whatever its verbosity, off the standard output.

    Where that is closed, as in a daemon, nothing is done.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it is None, or closed
        sys.stdout.flush()
    libc.fflush(None)
    try:
        stdout_copy = os.dup(1)
    except OSError:
        stdout_copy = None
    if stdout_copy is None:
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
            libc.fflush(None)
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
