"""Environment variables that MXNet reads, some of them set for the time of a bind only."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from memplan.errors import ArgumentError

MATCH_RANGE = "NNVM_EXEC_MATCH_RANGE"
DEFAULT_MATCH_RANGE = 16
MAX_MATCH_RANGE = 2**31 - 1  # MXNet reads it as an int

# The environment belongs to all threads: while one binds under its own, the others wait.
_LOCK = threading.RLock()


def onednn_is_enabled() -> bool:
    """Does MXNet compute by oneDNN on a CPU, where that knows an operator?"""
    return os.environ.get("MXNET_MKLDNN_ENABLED", "1").lower() not in ("0", "false")


def is_by_onednn(device_type: str) -> bool:
    """Does MXNet compute by oneDNN on this kind of device, where that knows an operator?"""
    return device_type == "cpu" and onednn_is_enabled()


def onednn_has_recurrent_layers() -> bool:
    """May it be oneDNN that computes fused recurrent layers? They have a variable of their own."""
    return (os.environ.get("MXNET_USE_MKLDNN_RNN") or "1") != "0"


def generators_of_random_numbers() -> int:
    """How many of them MXNet has on CPUs, of which an op that draws gets the next one in turn."""
    return int(os.environ.get("MXNET_CPU_PARALLEL_RAND_COPY") or "1")


def fewest_summed_in_place() -> int:
    """Of how many parts MXNet adds up a gradient one by one, in place; fewer are one ``add_n``."""
    return int(os.environ.get("MXNET_EXEC_INPLACE_GRAD_SUM_CAP") or "8")


def engine_has_one_worker() -> bool:
    """Does one thread of MXNet's engine run all operators of a CPU, and nothing but these?

    The default engine has threads for each device, one for a CPU if it is not told otherwise.
    ``ThreadedEngine`` has many for all, ``NaiveEngine`` runs an operator in the thread that calls.
    """
    if os.environ.get("MXNET_ENGINE_TYPE", "") in ("ThreadedEngine", "NaiveEngine"):
        return False
    return os.environ.get("MXNET_CPU_WORKER_NTHREADS", "1") in ("", "1")


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Environment variable ``name`` is ``value`` within, and what it was afterwards.

    Threads that use this module wait for each other.
    """
    with _LOCK:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


@contextlib.contextmanager
def match_range(value: int | None) -> Iterator[None]:
    """MXNet's allocator works under NNVM_EXEC_MATCH_RANGE ``value`` within.

    None leaves MXNet what the process has set, and keeps other threads' settings out. Raises
    ArgumentError for anything but a whole number from 0 (no block serves twice).
    """
    if value is None:
        with _LOCK:
            yield
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_MATCH_RANGE:
        raise ArgumentError(f"match_range must be a whole number from 0, got {value!r}")
    # A user's search over ranges would end at another than this one.
    with variable(MATCH_RANGE, str(value)), variable("NNVM_AUTO_SEARCH_MATCH_RANGE", "0"):
        yield


def current_match_range() -> int:
    """NNVM_EXEC_MATCH_RANGE, under which MXNet binds in this thread (16 unless set).

    While another thread binds under a value of its own, this one waits: that value is none of the
    process's. Raises ArgumentError for what MXNet cannot use.
    """
    with _LOCK:
        text = os.environ.get(MATCH_RANGE, "")
    try:
        # MXNet takes an empty variable for an unset one, and under a negative number a bind never
        # returns.
        value = int(text) if text else DEFAULT_MATCH_RANGE
    except ValueError:
        value = -1
    if not 0 <= value <= MAX_MATCH_RANGE:
        raise ArgumentError(
            f"the environment variable {MATCH_RANGE} must be a whole number from 0 to "
            f"{MAX_MATCH_RANGE}, got {text!r}: MXNet cannot bind under it"
        )
    return value
