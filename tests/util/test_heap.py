"""The C library gives large memory back while it is told to, and keeps it afterwards."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from memplan.util import heap

if not hasattr(ctypes.CDLL(None), "mallinfo2"):  # before glibc 2.33
    pytest.skip("this C library does not tell", allow_module_level=True)

# What comes from the system tells only in a process in which nothing large was freed before.
ASKING = """
import ctypes, os
from memplan.util.heap import give_back_what_is_free, keep_below

class Mallinfo(ctypes.Structure):  # hblkhd: the bytes that came from the system one by one
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", *"abcde")
    _fields_ = [(name, ctypes.c_size_t) for name in names]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallinfo2.restype = Mallinfo

def comes_from_the_system(nbytes=24 << 20):
    give_back_what_is_free()  # what is free is used first
    before = libc.mallinfo2().hblkhd
    address = libc.malloc(nbytes)
    during = libc.mallinfo2().hblkhd
    libc.free(address)
    return during >= before + nbytes and libc.mallinfo2().hblkhd == before
"""


def answers(code: str) -> str:
    """What a new process prints."""
    command = [sys.executable, "-c", ASKING + code]
    environment = {name: text for name, text in os.environ.items() if name not in heap._DECISIONS}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def test_large_memory_goes_back_or_is_kept() -> None:
    code = """
for nbytes in (0, 32 << 20, 0, 32 << 20):
    keep_below(nbytes)
    print(comes_from_the_system(), comes_from_the_system(1 << 10))
"""
    assert answers(code).split() == ["True", "False", "False", "False"] * 2


def test_memory_of_any_size_may_be_the_least_that_goes_back() -> None:
    code = """
keep_below(8 << 20)
print(comes_from_the_system(), comes_from_the_system(8 << 20), comes_from_the_system(7 << 20))
"""
    assert answers(code).split() == ["True", "True", "False"]


def test_a_user_s_decision_stands() -> None:
    code = """
keep_below(32 << 20)
os.environ["MALLOC_MMAP_THRESHOLD_"] = "33554432"
keep_below(0)
print(comes_from_the_system())
"""
    assert answers(code) == "False"


def test_memory_of_other_threads_is_kept() -> None:
    """Although nothing else lies in its piece of 64 MB."""
    code = """
import resource, threading

libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault for each page of 4 KiB, on any machine

def faults():  # of a piece that is made, used and freed
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    address = libc.malloc(30 << 20)
    ctypes.memset(address, 1, 30 << 20)
    libc.free(address)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

def run():
    for nbytes in (20 << 20, 30 << 20):  # these lie in the first piece
        libc.malloc(nbytes)
    print(faults() > 100, faults() < 100)

keep_below(32 << 20)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    assert answers(code) == "True True"


def test_what_is_free_at_the_ends_of_other_threads_memory_is_returned() -> None:
    code = """
import os, threading
from memplan.util.heap import returning_ends

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

held = [0] * 400  # which lies elsewhere

def run():
    for place in range(400):
        held[place] = libc.malloc(100 << 10)
    for address in held:
        ctypes.memset(address, 1, 100 << 10)
    for address in held:
        libc.free(address)
    has_freed.set()
    again.wait()
    libc.free(libc.malloc(100 << 10))

keep_below(32 << 20)
before, has_freed, again = resident(), threading.Event(), threading.Event()
thread = threading.Thread(target=run)
thread.start()
has_freed.wait()
give_back_what_is_free()
kept = resident() - before > 30 << 20
keep_below(0)
with returning_ends():
    again.set()
    thread.join()
print(kept, resident() - before < 10 << 20)
keep_below(32 << 20)
print(comes_from_the_system())
"""
    assert answers(code).split() == ["True", "True", "False"]
