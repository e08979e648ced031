"""Compiles all that searches and packing use, ahead of time: ``python -m memplan.search.compile``.

Installing memplan runs this. Without it the first plan compiles what it needs. What was compiled is
kept beside the sources, for all who may read them; where that folder cannot be written to, in the
user's ``~/.cache/memplan`` (NUMBA_CACHE_DIR is another one).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys

from memplan.memory.offsets.placement import compile_placement
from memplan.search.eviction import compile_evictions
from memplan.search.flag_annealing import compile_annealing
from memplan.search.online import compile_online
from memplan.search.sequence_search import compile_search
from memplan.util.processes import end_with
from memplan.util.progress import LOGGER


def compile_all() -> None:
    """Compile, or load what was compiled before."""
    compile_search()
    compile_others()


def compile_others() -> None:
    """The same without annealing over sequences, which takes half of the time."""
    compile_evictions()
    compile_online()
    compile_annealing()
    compile_placement()


def _compile_others_silently(parent: int) -> None:
    """In another process than the one that says what it does, and that ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for both, and the other answers
    LOGGER.setLevel(logging.ERROR)
    if end_with(parent):
        compile_others()


def main() -> int:
    """Compile in two processes; the status to exit with, after Ctrl-C that of a shell."""
    others = multiprocessing.Process(
        target=_compile_others_silently, args=[os.getpid()], daemon=True
    )
    try:
        others.start()
        compile_search()
        others.join()
        compile_all()  # whatever the other process could not
    except KeyboardInterrupt:
        print("Interrupted; the first plan compiles the rest.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
