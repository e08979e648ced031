"""How many threads an operator has on a CPU, as MXNet and the OpenMP that it runs on decide it."""

from __future__ import annotations

import os


def threads() -> int:
    """As many as it is told, or half of the processors on which this process may run.

    ``OMP_NUM_THREADS`` goes before ``MXNET_OMP_MAX_THREADS`` (MXNet's src/engine/openmp.cc), which
    means as many as that, but no more than there are processors. Where ``OMP_NUM_THREADS`` is 0 or
    less, OpenMP takes all processors, and MXNet halves nothing. OpenMP has no more threads than
    ``OMP_THREAD_LIMIT`` in any case.
    """
    nprocessors = len(os.sched_getaffinity(0))
    told, most = _number("OMP_NUM_THREADS"), _number("MXNET_OMP_MAX_THREADS")
    if told is not None:
        nthreads = told if told > 0 else nprocessors
    else:
        most = nprocessors // 2 if most is None else most
        nthreads = max(1, min(nprocessors, most)) if most else nprocessors
    limit = _number("OMP_THREAD_LIMIT")
    return min(nthreads, limit) if limit is not None and limit > 0 else nthreads


def _number(name: str) -> int | None:
    """What the environment says, if it is a whole number."""
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return None
