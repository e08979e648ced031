"""The kernel is asked for huge pages where a whole one fits, and only there."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import mxnet as mx
import pytest

from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.placed_arrays import address_of
from memplan.util.huge_pages import ask_for_huge_pages

MIB = 1 << 20

if not Path("/sys/kernel/mm/transparent_hugepage").exists():
    pytest.skip("this kernel has no huge pages to ask for", allow_module_level=True)


def has_asked(address: int) -> bool:
    """Is the byte at ``address`` in memory for which huge pages were asked for ("hg")?"""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        place = line.split(maxsplit=1)[0]
        if "-" in place:
            begin, end = (int(number, 16) for number in place.split("-"))
            inside = begin <= address < end
        elif inside and place == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"no memory at {address:x}")


def test_only_whole_pages_within_the_bytes() -> None:
    memory = mmap.mmap(-1, 16 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = -(-address // (2 * MIB)) * 2 * MIB
    ask_for_huge_pages(page + 1, 4 * MIB)
    asked = [has_asked(place) for place in (page, page + 2 * MIB, page + 4 * MIB)]
    assert asked == [False, True, False]


@pytest.mark.parametrize("nbytes", [0, 1, 2 * MIB - 1])
def test_nothing_is_asked_for_less_than_a_page(nbytes: int) -> None:
    memory = mmap.mmap(-1, 16 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = -(-address // (2 * MIB)) * 2 * MIB
    ask_for_huge_pages(page, nbytes)
    assert not has_asked(page)


def test_the_array_of_packed_steps_is_in_huge_pages() -> None:
    memory = PackedMemory(64 * MIB, mx.cpu())
    array = memory.array(32 * MIB, (4,), "float32")
    assert has_asked(address_of(array))
