"""Whole pages alone are asked for as huge ones, or given back to the kernel."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import mxnet as mx
import pytest

from memplan.mxnet.realise.packed_memory import PackedMemory
from memplan.mxnet.realise.placed_arrays import address_of
from memplan.util.pages import ask_for_huge_pages, give_back_pages

MIB = 1 << 20

ASKS_FOR_HUGE_PAGES = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no huge pages to ask for",
)


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


@ASKS_FOR_HUGE_PAGES
def test_only_whole_pages_within_the_bytes() -> None:
    memory = mmap.mmap(-1, 16 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = -(-address // (2 * MIB)) * 2 * MIB
    ask_for_huge_pages(page + 1, 4 * MIB)
    asked = [has_asked(place) for place in (page, page + 2 * MIB, page + 4 * MIB)]
    assert asked == [False, True, False]


@ASKS_FOR_HUGE_PAGES
@pytest.mark.parametrize("nbytes", [0, 1, 2 * MIB - 1])
def test_nothing_is_asked_for_less_than_a_page(nbytes: int) -> None:
    memory = mmap.mmap(-1, 16 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = -(-address // (2 * MIB)) * 2 * MIB
    ask_for_huge_pages(page, nbytes)
    assert not has_asked(page)


@ASKS_FOR_HUGE_PAGES
def test_the_array_of_packed_steps_is_in_huge_pages() -> None:
    memory = PackedMemory(64 * MIB, mx.cpu())
    array = memory.array(32 * MIB, (4,), "float32")
    assert has_asked(address_of(array))


def test_pages_that_are_given_back_are_zeros() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:] = b"1" * 4 * page
    give_back_pages(address + 1, 3 * page)  # from within the first page to within the last
    assert memory[: 4 * page] == b"1" * page + b"\0" * 2 * page + b"1" * page
    memory[page : 2 * page] = b"2" * page
    assert memory[page : 3 * page] == b"2" * page + b"\0" * page


def test_memory_keeps_what_a_step_has_left() -> None:
    memory = PackedMemory(4 * MIB, mx.cpu())
    whole = memory.array(0, (MIB,), "float32")
    whole[:] = 1
    mx.nd.waitall()
    assert not memory.can_give_back
    memory.end([range(3 * MIB, 3 * MIB + 8), range(0, 0), range(MIB, MIB + 4096)])
    assert memory.can_give_back
    memory.give_back()
    assert not memory.can_give_back
    elements = whole.asnumpy()
    for begin, end in ((3 * MIB, 3 * MIB + 8), (MIB, MIB + 4096)):
        assert (elements[begin // 4 : end // 4] == 1).all()
    assert elements.sum() * 4 <= 6 * mmap.PAGESIZE  # and what shares pages with that, or the ends
    memory.end(())
    memory.begin(())
    assert not memory.can_give_back  # while a step runs
