"""Compiles all that searches and packing use, ahead of time: ``python -m memplan.search.compile``.

Installing memplan runs this. Without it the first plan compiles what it needs. What was compiled is
kept beside the sources, for all who may read them; where that folder cannot be written to, in the
user's ``~/.cache/memplan`` (NUMBA_CACHE_DIR is another one).
"""

from __future__ import annotations

from memplan.memory.offsets.placement import compile_placement
from memplan.search.flag_annealing import compile_annealing
from memplan.search.sequence_search import compile_search


def compile_all() -> None:
    """Compile, or load what was compiled before."""
    compile_placement()
    compile_annealing()
    compile_search()


if __name__ == "__main__":
    compile_all()
