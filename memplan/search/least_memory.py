"""The search for the least memory, greedily and by rounds, of live bytes and of blocks."""

from __future__ import annotations

from memplan.search.beginnings import GREEDY_SHARE, LIVE_TIME_SHARE
from memplan.search.kernels.annealing import BEST_LENGTH
from memplan.search.kernels.arrays import Array
from memplan.search.round_kinds import rounds_to_make
from memplan.search.rounds import Rounds, best_sequence
from memplan.util.stop import Stop

# Without a budget: what part of the memory of a greedy plan the next one is to have, how far below
# the least memory so far a round aims, and what share of the time is left to make that cheaper.
GREEDY_STEP, SHRINK = 0.9, 0.002
CHEAPEN_SHARE = 0.25


def least_memory(search: Rounds, rounds: int | None) -> None:
    """Look for the sequence with the least memory, and leave time to make it cheaper."""
    stop = search.stop.share_of_work(1.0 - CHEAPEN_SHARE)
    search.offer(search.unplanned, None)
    search.offer(search.first, None)
    _least_greedy(search, search.stop.share_of_work(GREEDY_SHARE))
    if search.match_ranges:
        sequence = _least_live(search, rounds, search.stop.share_of_work(LIVE_TIME_SHARE))
        _fewest_blocks(search, sequence, rounds, stop)
    else:
        _least_live(search, rounds, stop)


def _least_greedy(search: Rounds, stop: Stop) -> None:
    """Greedy plans, each with less memory than the one before."""
    budget = search.live_peak(search.first)
    while budget and not stop.is_over():
        budget = int(GREEDY_STEP * budget)
        greedy = search.evict(budget, stop)
        if greedy is None:
            break
        search.offer(greedy, None)


def _least_live(search: Rounds, rounds: int | None, stop: Stop) -> Array:
    """Rounds that lower the peak of live bytes further and further; what takes least."""
    found = search.nothing()
    sequence = best_sequence(search.found)
    found.sequence[: len(sequence)] = sequence
    found.figures[BEST_LENGTH] = len(sequence)
    for done, kind in enumerate(rounds_to_make(rounds)):
        if stop.is_over():
            break
        budget = search.live_peak(best_sequence(found)) - 1
        shrink = SHRINK / (1 + done)
        kind = kind._replace(from_best=True)
        search.round(kind, budget, shrink=shrink, best=found, stop=stop)
        search.offer(best_sequence(found), None)
    return best_sequence(found)


def _fewest_blocks(search: Rounds, least_live: Array, rounds: int | None, stop: Stop) -> None:
    """Rounds in which the bytes of blocks count; the first from the lowest peak of live bytes."""
    for done, kind in enumerate(rounds_to_make(rounds)):
        if stop.is_over():
            break
        kind = kind._replace(from_best=kind.from_best and done > 0)
        sequence = search.start_of(kind, search.found) if kind.from_best else least_live
        search.fewest(kind, sequence, stop)
