"""Asks the kernel for huge pages, of which the processor remembers the places of more memory, and
gives pages back to it whose memory stays allocated."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

# The pages that x86-64 has beside those of 4 KiB.
_HUGE_NBYTES = 2 << 20


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Have the kernel take huge pages for these bytes, where it leaves that to who asks.

    That is its default on most distributions. Only pages that lie within the bytes are asked for:
    so nothing more is held. A kernel that has none does nothing.
    """
    _advise(address, nbytes, "MADV_HUGEPAGE", _HUGE_NBYTES)


def give_back_pages(address: int, nbytes: int) -> None:
    """Return the pages that lie within these bytes to the system.

    They are zeros when they are next read or written, and only then the process has them again.
    """
    _advise(address, nbytes, "MADV_DONTNEED", mmap.PAGESIZE)


def _advise(address: int, nbytes: int, advice: str, page_nbytes: int) -> None:
    """Advise the kernel of the whole pages within these bytes; nothing where that is not Linux."""
    begin, end = -(-address // page_nbytes), (address + nbytes) // page_nbytes
    if begin < end:
        with contextlib.suppress(OSError, AttributeError):
            place = ctypes.c_void_p(begin * page_nbytes)
            length = ctypes.c_size_t((end - begin) * page_nbytes)
            ctypes.CDLL("libc.so.6").madvise(place, length, getattr(mmap, advice))
