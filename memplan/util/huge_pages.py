"""Asks the kernel for huge pages, of which the processor remembers the places of more memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

# The pages that x86-64 has beside those of 4 KiB.
_PAGE_NBYTES = 2 << 20


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Have the kernel take huge pages for these bytes, where it leaves that to who asks.

    That is its default on most distributions. Only pages that lie within the bytes are asked for:
    so nothing more is held. A kernel that has none does nothing.
    """
    begin, end = -(-address // _PAGE_NBYTES), (address + nbytes) // _PAGE_NBYTES
    if begin < end:
        with contextlib.suppress(OSError, AttributeError):
            place = ctypes.c_void_p(begin * _PAGE_NBYTES)
            length = ctypes.c_size_t((end - begin) * _PAGE_NBYTES)
            ctypes.CDLL("libc.so.6").madvise(place, length, mmap.MADV_HUGEPAGE)
