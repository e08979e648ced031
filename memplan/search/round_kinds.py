"""Kinds of rounds, and in which order a search makes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

# A short round first; then again and again all kinds in turn, each time longer.
FIRST_ROUND, LENGTHEN = 0.05, 1.5
# What is left when there is too little for a round improves the best at this temperature.
SHORT_HOT = 0.04


class Round(NamedTuple):
    """How a round goes: from the best sequence, or from the first; how hot, how long.

    With ``recreates`` it does not anneal: it takes back many recomputations at a time, and chooses
    anew, from the unplanned step where it does not begin with the best.
    """

    from_best: bool
    hot: float
    length: float
    recreates: bool = False


SHORT = Round(True, SHORT_HOT, FIRST_ROUND)
# In MXNet's blocks, and for the least memory.
ANNEALING_ROUNDS = (
    Round(False, 0.3, 0.5),
    Round(False, 0.15, 1.0),
    Round(False, 0.5, 1.0),
    Round(True, 0.1, 1.0),
)
# In live bytes a search begins with this.
FIRST_RECREATED = Round(False, 2.0, 0.3, recreates=True)
# Where what is found may have to be mended, something is found sooner.
FIRST_TO_MEND = Round(False, 2.0, 0.1, recreates=True)
# In larger graphs one attempt to recreate looks at too much: set on an LSTM and a GAN of 4,800 ops.
MOST_RECREATED = 3000
# In graphs of more ops than this a search begins with the plans of greedy eviction, which takes
# less time than a first round. Set on memonger's ResNet in its least memory, and on a tree of LSTM
# cells; on an LSTM of 1,300 ops a first round finds the cheaper plan.
MOST_RECREATED_FIRST = 1500


def rounds_to_make(limit: int | None) -> Iterator[Round]:
    """The rounds of a search, at most ``limit``, at least the first."""
    yield SHORT
    for number in itertools.count(1) if limit is None else range(1, limit):
        cycle, place = divmod(number - 1, len(ANNEALING_ROUNDS))
        kind = ANNEALING_ROUNDS[place]
        yield kind._replace(length=kind.length * LENGTHEN**cycle)
