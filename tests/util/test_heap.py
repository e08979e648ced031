"""The C library gives large memory back while it is told to, and keeps it afterwards."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import pytest

from memplan.util.heap import give_back_what_is_free, keep_large


class Mallinfo(ctypes.Structure):
    """glibc's mallinfo2: ``hblkhd`` are the bytes that came from the system one by one."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", *"abcde")
    ]


LIBC = ctypes.CDLL("libc.so.6")
LIBC.malloc.restype = ctypes.c_void_p
LIBC.free.argtypes = [ctypes.c_void_p]
if hasattr(LIBC, "mallinfo2"):
    LIBC.mallinfo2.restype = Mallinfo
else:  # before glibc 2.33
    pytest.skip("this C library does not tell", allow_module_level=True)


def comes_from_the_system(nbytes: int = 24 << 20) -> bool:
    """Does memory of this size come from the system, and go back there?"""
    give_back_what_is_free()  # what is free is used first
    before = LIBC.mallinfo2().hblkhd
    address = LIBC.malloc(nbytes)
    during = LIBC.mallinfo2().hblkhd
    LIBC.free(address)
    return bool(during >= before + nbytes and LIBC.mallinfo2().hblkhd == before)


def test_large_memory_goes_back_or_is_kept() -> None:
    for keeps in (False, True, False, True):
        keep_large(keeps)
        assert comes_from_the_system() is not keeps
        assert not comes_from_the_system(1 << 10)


def test_a_user_s_decision_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_large(True)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "33554432")
    keep_large(False)
    assert not comes_from_the_system()
