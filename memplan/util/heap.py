"""Tells the C library to return freed memory to the system, which it would keep, or to keep it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any

# Numbers of mallopt (malloc.h), and what glibc begins and ends with: memory above the threshold
# comes from the system and goes back there, and glibc raises the threshold to what was freed so.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LEAST_NBYTES = 128 << 10

#: What is smaller is kept when it is freed, at most: glibc by itself keeps no more, either.
KEPT_NBYTES = 32 << 20

# All threads but the first allocate from pieces of this size, and glibc returns a piece as soon as
# it is empty, unless M_TOP_PAD is as large (heap_trim of its malloc/arena.c). An array that is made
# for an operator and lies alone in a piece would come from the system at every call, page by page:
# U-Net's steps were seen to take a third longer, in some processes.
_PIECE_NBYTES = 64 << 20

# With one of these in the environment the user has decided, and nothing is set here.
_DECISIONS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_what_is_free() -> None:
    """Have the C library return freed memory; does nothing with one that cannot."""
    with contextlib.suppress(OSError, AttributeError):
        _library().malloc_trim(0)


@functools.lru_cache(maxsize=1)  # what is set already is not set again
def keep_below(nbytes: int) -> None:
    """Keep memory of less than ``nbytes`` when it is freed, and return what is larger.

    What is smaller than 128 KiB is kept in any case. ``nbytes`` is up to :data:`KEPT_NBYTES`.
    Returning memory to the system takes time, but leaves no holes: what is allocated meanwhile for
    good, such as workspaces in the first steps of training, lies close together. Keeping it saves
    that time, and what is kept after those first steps is one piece, not holes too small for the
    next array.
    """
    if _is_decided():
        return
    _set(_MMAP_THRESHOLD, max(nbytes, _LEAST_NBYTES))
    _set(_TRIM_THRESHOLD, 2 * KEPT_NBYTES)
    _set(_TOP_PAD, _PIECE_NBYTES if nbytes > _LEAST_NBYTES else _LEAST_NBYTES)


@contextlib.contextmanager
def returning_ends() -> Iterator[None]:
    """Within, a thread that frees 64 KiB returns what is free at the end of its memory, too.

    :func:`give_back_what_is_free` returns that of the first thread alone (mtrim of glibc's
    malloc/malloc.c), and all else that is free. ``keep_below(0)`` comes before.
    """
    if not _is_decided():
        _set(_TRIM_THRESHOLD, _LEAST_NBYTES)
    try:
        yield
    finally:
        if not _is_decided():
            _set(_TRIM_THRESHOLD, 2 * KEPT_NBYTES)


def _is_decided() -> bool:
    return any(os.environ.get(name) for name in _DECISIONS)


def _set(parameter: int, nbytes: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        _library().mallopt(parameter, nbytes)


def _library() -> Any:
    return ctypes.CDLL("libc.so.6")
