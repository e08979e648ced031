"""The least seconds to run a chain of slices backwards, for all bytes that are held beside it.

The recurrence of Beaumont et al. 2019 (:mod:`memplan.search.chain`), where what the backward pass
holds differs from slice to slice, and what is held is freed after its last reader.
"""

from __future__ import annotations

import numpy as np

from memplan.util.compiled import compiled

# What is held is counted in so many parts of the budget.
PARTS = 240
# So many of them are looked at together.
BLOCK = 16


@compiled
def _keep(chain, parts, unit, seconds, split, s, t):  # type: ignore[no-untyped-def]
    """Slice s runs and keeps what its backward pass reads, until slices s + 1 to t are done."""
    _, kept, _ = parts
    dead_nbytes = chain.read_nbytes[s, t] - chain.read_nbytes[s, s]
    forward = chain.waiting_nbytes[t] + chain.keeping_nbytes[s]
    own = max(forward, chain.backward_nbytes[s] - dead_nbytes)
    for held in range(PARTS + 1):
        rest = held + kept[s, t]
        if own > unit * (PARTS - held) or (t > s and rest > PARTS):
            seconds[s, t, held] = np.inf
        elif t > s:
            seconds[s, t, held] = chain.seconds[s] + seconds[s + 1, t, rest]
        else:
            seconds[s, t, held] = chain.seconds[s]
        split[s, t, held] = s


@compiled
def _store(chain, parts, unit, seconds, split, s, t):  # type: ignore[no-untyped-def]
    """Slices s to k - 1 run, what crosses cut k is stored; slices k to t are done before them.

    The more is held, the more seconds all takes: a block of parts is only looked at where the
    fewest that it may take are less than the most that are known.
    """
    crossing, _, read = parts
    here = seconds[s, t]
    passed, need, fitting = 0.0, 0.0, PARTS
    for k in range(s + 1, t + 1):
        passed += chain.seconds[k - 1]
        need = max(need, chain.crossing_nbytes[s, k - 1, t] + chain.running_nbytes[k - 1])
        while fitting >= 0 and chain.waiting_nbytes[t] + need > unit * (PARTS - fitting):
            fitting -= 1
        more, dead = crossing[s, k, t], read[s, t] - read[s, k - 1]
        behind, before = seconds[k, t], seconds[s, k - 1]
        end = min(fitting, PARTS - more) + 1
        for begin in range(0, end, BLOCK):
            fewest = passed + (behind[begin + more] + before[max(0, begin - dead)])
            if fewest >= here[min(begin + BLOCK, end) - 1]:
                continue
            for held in range(begin, min(begin + BLOCK, end)):
                total = passed + (behind[held + more] + before[max(0, held - dead)])
                if total < here[held]:
                    here[held] = total
                    split[s, t, held] = k


@compiled
def solve_chain(chain, parts, unit, seconds, split):  # type: ignore[no-untyped-def]
    """Fill ``seconds`` and ``split``; ``parts`` are bytes of ``chain`` in parts of ``unit``."""
    nslices = len(chain.seconds)
    for length in range(nslices):
        for s in range(nslices - length):
            _keep(chain, parts, unit, seconds, split, s, s + length)
            _store(chain, parts, unit, seconds, split, s, s + length)
