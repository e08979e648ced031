"""Which searches `auto` makes of a graph, and how much work it does in all."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.strategies.base import Problem
from memplan.strategies.spaces.flags import Flags
from memplan.strategies.spaces.space import LARGE, is_slow

# The usual work is for what `search` does, and as much again is for all the rest. Without blocks,
# where moves are quick, there is twice as much. Set on six networks at 30 and 40% of their steps.
TIMES_THE_WORK, TIMES_THE_WORK_WITHOUT_BLOCKS = 2.0, 4.0
# Of more than MOST_ANEW ops one search has twice that, where others have several. Set on SENet-154
# and HRNet near the least.
TIMES_THE_WORK_OF_LONG = 8.0
# In blocks large graphs get more, and everywhere graphs of few ops, whose searches take seconds.
# Set on residual networks of 5,141 and 10,281 ops, and on nine networks of 44 to 152.
TIMES_THE_WORK_OF_SLOW, TIMES_THE_WORK_OF_FEW = 6.0, 6.0

# Graphs of at most this many ops are searched from nothing, too: in live bytes first, with this
# part of the time (in blocks all graphs are), set on random graphs of the tests, and on dense
# blocks of 1,470 ops, whose plan at 20% of the peak took a point more time with it; and at last,
# with this part of the work that is left. Set on six networks at 30 and 40% of their steps, on
# HRNet of 2,283 ops, whose plan takes more time with it, and on rl3_n500 of the published graphs.
MOST_ANEW, ANEW_SHARE, AGAIN_SHARE = 1000, 0.4, 0.5

# Graphs of at most this many ops are searched from nothing this many times, each with this part of
# what is left: a search may end far from the best there, however long it is. And those of at most
# FEW are searched as the strategy `search` does it. Set on random networks of 10 to 95 ops.
FEW, FEW_IN_BLOCKS, TIMES, OFTEN_SHARE = 120, 60, 8, 0.2
# Flags of at most this many ops are annealed as the strategy `search` does it, too, which takes a
# third of the time on the zoo's ResNet-50; and those of at most FEW ops from nothing once more. Set
# on mirrored layers of attention, residual, plain and random networks of 23 to 362 ops.
MOST_FLAGS = 400


@dataclass(frozen=True)
class Searches:
    """The searches of a problem beside that which goes on from the best.

    From nothing: one first (``anew``), one at last (``again``), and short ones (``often``). And
    what the strategy `search` does, over sequences (``as_alone``) or over flags
    (``flags_as_alone``), there from nothing, too (``flags_anew``). ``are_recreated``: they ruin and
    recreate, and a proof gives plans to begin with.
    """

    anew: bool
    again: bool
    often: bool
    as_alone: bool
    flags_as_alone: bool
    flags_anew: bool
    are_recreated: bool

    @classmethod
    def of(cls, problem: Problem) -> Searches:
        """Those for which there is time.

        Annealing over flags begins anew by itself, and with its best; so does ruin and recreate,
        where a proof gives plans, too. In live bytes nothing has to be packed, and on graphs that
        are not too long there is time for all that the strategy `search` does.
        """
        nops, in_blocks = len(problem.graph.ops), bool(problem.memory.match_ranges)
        of_flags = isinstance(problem.space, Flags)
        of_sequences = not (is_large(problem) or of_flags)
        is_short = problem.counts_live and nops <= MOST_ANEW
        return cls(
            anew=of_sequences and (in_blocks or is_short),
            again=of_sequences and nops <= MOST_ANEW and not in_blocks,
            often=of_sequences and nops <= (FEW_IN_BLOCKS if in_blocks else FEW),
            as_alone=of_sequences and nops <= FEW,
            flags_as_alone=of_flags and nops <= MOST_FLAGS,
            flags_anew=of_flags and nops <= FEW,
            are_recreated=of_sequences and not in_blocks,
        )


def is_large(problem: Problem) -> bool:
    """Is there work for one search only, which then begins with the best that is known?"""
    return len(problem.graph.ops) > LARGE


def times_the_work(problem: Problem) -> float:
    """What is done, over the usual work."""
    is_mirrored, in_blocks = isinstance(problem.space, Flags), bool(problem.memory.match_ranges)
    if not is_mirrored and len(problem.graph.ops) <= FEW:
        return TIMES_THE_WORK_OF_FEW
    if not (is_mirrored or in_blocks):
        is_long = MOST_ANEW < len(problem.graph.ops) <= LARGE
        return TIMES_THE_WORK_OF_LONG if is_long else TIMES_THE_WORK_WITHOUT_BLOCKS
    return TIMES_THE_WORK_OF_SLOW if is_slow(problem) else TIMES_THE_WORK
