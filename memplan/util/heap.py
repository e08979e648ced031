"""What the C library does with memory that was freed: it keeps it, unless it is told."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

# Numbers of mallopt (malloc.h), and what glibc begins and ends with: memory above the threshold
# comes from the system and goes back there, and glibc raises the threshold to what was freed so.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LEAST_NBYTES, _MOST_NBYTES = 128 << 10, 32 << 20

# glibc gives back an empty piece of this size, of those that threads but the first allocate, unless
# it is to keep as much (heap_trim of its malloc/arena.c). An array that is made for an operator and
# lies alone in a piece would come from the system at every call, page by page: U-Net's steps were
# seen to take a third longer, in some processes.
_PIECE_NBYTES = 64 << 20

# With one of these in the environment a user has decided.
_DECISIONS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_what_is_free() -> None:
    """Have the C library return freed memory; does nothing with one that cannot."""
    with contextlib.suppress(OSError, AttributeError):
        _library().malloc_trim(0)


@functools.lru_cache(maxsize=1)  # nothing is to be done again
def keep_large(keeps: bool) -> None:
    """From now on memory of 128 KiB or more goes back to the system when it is freed, or is kept.

    Going back takes time, but what is made then and kept for good lies close together. What is
    freed later, and kept to be used again, grows into one piece, where it would lie in holes that
    are too small for the next. It is kept up to the size to which glibc goes by itself.
    """
    if any(os.environ.get(name) for name in _DECISIONS):
        return
    _set(_MMAP_THRESHOLD, _MOST_NBYTES if keeps else _LEAST_NBYTES)
    _set(_TRIM_THRESHOLD, 2 * _MOST_NBYTES)
    _set(_TOP_PAD, _PIECE_NBYTES if keeps else _LEAST_NBYTES)


def _set(parameter: int, nbytes: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        _library().mallopt(parameter, nbytes)


def _library() -> Any:
    return ctypes.CDLL("libc.so.6")
