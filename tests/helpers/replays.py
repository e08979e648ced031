"""What the compiled replay says that a sequence costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from memplan.search.kernels.arrays import WRITTEN, graph_arrays
from memplan.search.kernels.replay import UNLIMITED, replay, replay_memory
from memplan.step.graph import TrainingGraph


class Cost(NamedTuple):
    """Bytes of MXNet's blocks and peak of live bytes."""

    allocated_nbytes: int
    peak_nbytes: int


def replayed(graph: TrainingGraph, sequence: Iterable[int], match_range: int) -> Cost:
    """The cost of running these ops in this order; the blocks are those of ``match_range``."""
    arrays, ops = graph_arrays(graph), np.array(list(sequence), dtype=np.int64)
    nwritten = int(np.diff(arrays.start[WRITTEN])[ops].sum())
    memory = replay_memory(arrays, len(ops), nwritten)
    allocated, peak = replay(arrays, memory, ops, len(ops), match_range, UNLIMITED)
    return Cost(int(allocated), int(peak))
