"""What Linux says of the processor, by which oneDNN chooses its kernels and how they run."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

_AVX512 = frozenset("avx512f avx512bw avx512dq avx512vl".split())

# With one of these in the environment, in these letters, oneDNN uses no more than that
# (init_max_cpu_isa of oneDNN 2.4's src/cpu/x64/cpu_isa_traits.cpp).
_WITHOUT_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI")

# Where the size of a core's first cache for data, of its second one, and of the one that cores
# share stands; what is usual.
_CACHES = {1: ("index0", 32 << 10), 2: ("index2", 1 << 20), 3: ("index3", 32 << 20)}

# What oneDNN takes for a core's part of them where it does not know them.
_GUESSED_CACHES = {1: 32 << 10, 2: 512 << 10, 3: 1 << 20}

_CPU = Path("/sys/devices/system/cpu/cpu0")

# The processors of one core.
_SIBLINGS = "topology/thread_siblings_list"


@functools.cache
def has_avx512() -> bool:
    """Does this machine have what oneDNN's kernels for AVX-512 need, and may it use them?"""
    if os.environ.get("DNNL_MAX_CPU_ISA") in _WITHOUT_AVX512:
        return False
    flags = re.search(r"^flags\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return flags is not None and set(flags[1].split()) >= _AVX512


@functools.cache
def cache_nbytes(level: int) -> int:
    """The first cache for data, the second or third one; what is usual where nothing is said."""
    folder, usual_nbytes = _CACHES[level]
    text = _read(_CPU / f"cache/{folder}/size")
    kibibytes = re.fullmatch(r"(\d+)K\s*", text)
    return int(kibibytes[1]) << 10 if kibibytes else usual_nbytes


@functools.cache
def cache_nbytes_of_onednn(level: int) -> int:
    """What oneDNN takes for a core's part of such a cache: it asks Intel's processors alone.

    See get_per_core_cache_size of its src/cpu/platform.cpp, and setCacheHierarchy of Xbyak.
    """
    if "GenuineIntel" not in _read(Path("/proc/cpuinfo")):
        return _GUESSED_CACHES[level]
    sharing = _nprocessors(_CPU / f"cache/{_CACHES[level][0]}/shared_cpu_list")
    return cache_nbytes(level) // max(1, sharing // _nprocessors(_CPU / _SIBLINGS))


def _nprocessors(path: Path) -> int:
    """How many a list such as ``0-3,8`` names; 1 where there is none."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", _read(path))
    return sum(int(end or begin) - int(begin) + 1 for begin, end in spans) or 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
