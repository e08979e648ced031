"""What Linux says of the processor, by which oneDNN chooses its kernels and how they run."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

_AVX512 = frozenset("avx512f avx512bw avx512dq avx512vl".split())

# With one of these in the environment oneDNN uses no more than that.
_WITHOUT_AVX512 = ("SSE41", "AVX", "AVX2")

# Where the size of a core's first cache for data, and of its second one, stands; what is usual.
_CACHES = {1: ("index0", 32 << 10), 2: ("index2", 1 << 20)}

# What oneDNN takes for them where it does not know them.
_GUESSED_CACHES = {1: 32 << 10, 2: 512 << 10}


@functools.cache
def has_avx512() -> bool:
    """Does this machine have what oneDNN's kernels for AVX-512 need, and may it use them?"""
    if os.environ.get("DNNL_MAX_CPU_ISA", "").upper() in _WITHOUT_AVX512:
        return False
    flags = re.search(r"^flags\s*:(.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return flags is not None and set(flags[1].split()) >= _AVX512


@functools.cache
def cache_nbytes(level: int) -> int:
    """A core's first cache for data, or its second one; what is usual where nothing is said."""
    folder, usual_nbytes = _CACHES[level]
    text = _read(Path(f"/sys/devices/system/cpu/cpu0/cache/{folder}/size"))
    kibibytes = re.fullmatch(r"(\d+)K\s*", text)
    return int(kibibytes[1]) << 10 if kibibytes else usual_nbytes


@functools.cache
def cache_nbytes_of_onednn(level: int) -> int:
    """What oneDNN takes for a core's first cache for data, or for its second one.

    It asks Intel's processors, and none else.

    (get_per_core_cache_size of its src/cpu/platform.cpp, and setCacheHierarchy of Xbyak.)
    """
    is_intel = "GenuineIntel" in _read(Path("/proc/cpuinfo"))
    return cache_nbytes(level) if is_intel else _GUESSED_CACHES[level]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
