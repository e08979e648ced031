"""How much of the time and work that is left what goes before the searches of `auto` gets."""

from __future__ import annotations

from memplan.search.round_kinds import MOST_RECREATED_FIRST
from memplan.strategies.base import Problem
from memplan.strategies.spaces.space import LARGE
from memplan.util.stop import Stop

# Part of little time for what is proved: less where live bytes are not what counts, as what is
# proved in fewer of them gives plans only, and least in blocks. Set on the zoo's ResNet-50,
# DenseNet-121 and VGG-16, and on the graphs of benchmarks/published.py.
PROOF_SHARE, PROOF_SHARE_OF_OTHERS = 0.4, 0.25
PROOF_SHARE_IN_BLOCKS = 0.1

# Part of the time and work left for schedules to begin a search with, and of large graphs, where
# moves of the search gain more: set on an unrolled LSTM and a GAN.
BEGINNINGS_SHARE, BEGINNINGS_SHARE_OF_LARGE = 0.45, 0.1

# Of little time that part is smaller on graphs of which a search soon has a good schedule from
# nothing. Set on ten networks at 30 and 40% of their steps, packed, and on ten at 60% in blocks, in
# three seconds of a core: with two thirds of it a plan of a network of hourglasses, packed, cost
# two points more, and plans of inception_v3 in blocks half a point.
LITTLE_FOR_BEGINNINGS = 0.3


def of_proof(problem: Problem, stop: Stop, *, ends_soon: bool) -> Stop:
    """The part for what is proved first; with ``ends_soon`` it ends by itself, in seconds."""
    share = PROOF_SHARE if problem.counts_live else PROOF_SHARE_OF_OTHERS
    share = PROOF_SHARE_IN_BLOCKS if problem.memory.match_ranges else share
    return stop.share_for_little(share) if ends_soon else stop.share(share)


def of_beginnings(problem: Problem, stop: Stop) -> Stop:
    """The part for schedules to begin with."""
    nops = len(problem.graph.ops)
    few = nops > LARGE and not problem.memory.match_ranges
    until = stop.share_of_work(BEGINNINGS_SHARE_OF_LARGE if few else BEGINNINGS_SHARE)
    if nops <= MOST_RECREATED_FIRST:
        until.deadline = min(until.deadline, stop.share_of_work(LITTLE_FOR_BEGINNINGS).deadline)
    return until
