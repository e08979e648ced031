"""What a search begins with: a first round, greedy plans, recomputed slices.

A search for MXNet's blocks first finds plans by their live bytes, which is far faster than to
replay the allocator.
"""

from __future__ import annotations

from memplan.search.kernels.annealing import BEST_LENGTH, BEST_SECONDS
from memplan.search.kernels.arrays import Array
from memplan.search.race import race
from memplan.search.round_kinds import (
    FIRST_RECREATED,
    FIRST_TO_MEND,
    MOST_RECREATED_FIRST,
    Round,
)
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.settling import settle

# Shares of the budget that live bytes are given in the search for a first plan in blocks, and the
# round that each gets.
LIVE_SHARES = (0.95, 0.85, 0.75, 0.65, 0.55, 0.45)
LIVE_ROUND = Round(False, 0.3, 0.5)
# Without a plan in blocks, share of the time for plans by live bytes.
LIVE_TIME_SHARE = 0.3
# Share of the time for a greedy plan, and of that, the share for drops where the peak is.
GREEDY_SHARE, PEAKS_SHARE = 0.3, 0.5
# Where no greedy plan fits, these shares of the budget give others, and bytes that are over it, in
# budgets, cost this many steps. Set on networks that benchmarks/gaps.py calls tuned.
LARGER, EXCESS_SECONDS = (1.1, 1.2, 1.4), 5.0
# Slices begin a search where the others cost more than this many steps: from recomputed slices
# moves of single ops get less far. Set on Darknet-53 at 30% of its step, and on an LSTM.
FAR_COST = 2.0
# Where what is found costs so much more than the step, in steps, rounds recreate from slices, which
# are the cheapest for what they are over: near the least memory of a recurrent network that ends
# far below what begins with nothing. Set on LSTMs of 1,292 ops at 30 to 40% of the step, and of
# 4,812 at 20% of the peak; in graphs of convolutions, whose plans mostly cost less, one such round
# ended above. HRNet's at 30% costs more, and gains by them.
FAR_OVERHEAD, SLICED_SHARE = 0.3, 0.3
# What comes of that is mostly too large where live bytes are not what counts. So it is done so
# often, each time in fewer of them by half of what is over, at least by this share. Set on the
# first of these LSTMs, at 30% of the step: in 0.995 of the budget it costs 11 points more, which is
# still 6 less than what is mended. What was found before, if it is cheaper, is mended beside what
# fits then, which gains on two stacked hourglasses with six losses, at 30% of the step. With a
# third of this share all races of neural Turing machines, at half of the step, ended too large by a
# tenth to half of a percent, which left what stood before: two or three times the overhead.
RACES, LEAST_FALL = 4, 0.006


def begin(search: Rounds, budget_nbytes: int) -> None:
    """Find sequences to begin with, beside those that the search was given."""
    is_begun = bool(search.found.figures[BEST_LENGTH])
    if search.match_ranges and not is_begun:
        search.first = _live_start(search, budget_nbytes)
    elif not search.match_ranges:
        _first_round(search, budget_nbytes, is_begun=is_begun)
        if not is_begun and not search.found.figures[BEST_LENGTH]:
            _greedy_start(search, budget_nbytes)
    if not (search.match_ranges or search.is_enough()):
        _sliced_start(search, budget_nbytes, roughly=not is_begun)


def _first_round(search: Rounds, budget_nbytes: int, *, is_begun: bool) -> None:
    """Of graphs that are not too long, a round from nothing, a short one beside a beginning.

    In a few tenths of a second it mostly finds what costs less than all that greedy eviction does.
    """
    if search.nops > MOST_RECREATED_FIRST:
        return
    if is_begun and settle(search, budget_nbytes):  # so that what fits is not lost
        search.offer(search.first, budget_nbytes)  # it is mended next
        return
    if not search.is_enough():
        is_short = is_begun or search.excess is not None
        search.round(FIRST_TO_MEND if is_short else FIRST_RECREATED, budget_nbytes)


def _greedy_start(search: Rounds, budget_nbytes: int) -> None:
    """Begin with the cheapest that greedy eviction gives, at the peaks or online, if that fits.

    If none does, with the one that is cheapest for the little that it is too large.
    """
    stop = search.stop.share_of_work(GREEDY_SHARE)
    at_peaks = search.evict(budget_nbytes, stop.share_of_work(PEAKS_SHARE))
    made = [at_peaks, *search.evicted_online(budget_nbytes, stop)]
    sequences = [sequence for sequence in made if sequence is not None]
    for sequence in sequences:
        search.offer(sequence, budget_nbytes)
    if search.found.figures[BEST_LENGTH]:
        return
    sliced = search.sliced(budget_nbytes, stop)
    for sequence in sorted(sliced, key=search.seconds):
        search.offer(sequence, budget_nbytes)
        if search.found.figures[BEST_LENGTH] and not settle(search, budget_nbytes, roughly=True):
            return
    larger = (search.evict(int(share * budget_nbytes), stop) for share in LARGER)
    sequences += [sequence for sequence in larger if sequence is not None]

    def cost(sequence: Array) -> float:
        over = search.live_peak(sequence) / max(1, budget_nbytes) - 1.0
        return search.seconds(sequence) / search.unit + EXCESS_SECONDS * over

    greedy = min(sequences, key=cost, default=None)
    if greedy is None or cost(greedy) > FAR_COST:
        sequences += sliced
    search.first = min(sequences, key=cost, default=search.first)


def _sliced_start(search: Rounds, budget_nbytes: int, *, roughly: bool) -> None:
    """Where what is found is expensive, recreate from slices, cheap for what they are over."""
    if search.found.figures[BEST_SECONDS] <= (1.0 + FAR_OVERHEAD) * search.graph.seconds:
        return
    before = settle(search, budget_nbytes, roughly=roughly)  # so that what fits is not lost
    first = search.first
    sliced = search.sliced(budget_nbytes, search.stop.share_of_work(SLICED_SHARE))
    found, settled = search.found.figures, search.settled.figures
    aim, over = budget_nbytes, 0
    for left in reversed(range(RACES if sliced else 0)):
        if search.stop.is_over():
            break
        race(search, sliced, aim, search.stop.share_of_work(SLICED_SHARE))
        if found[BEST_SECONDS] == settled[BEST_SECONDS]:
            break
        over = settle(search, budget_nbytes, briefly=True) if left else 0  # the last is mended
        if not over:
            if before and left:  # what was too large mostly costs less than this one, mended, too
                search.offer(first, budget_nbytes)
            return
        aim -= max((over + 1) // 2, int(LEAST_FALL * aim))
    if over:  # so is what another one has found, if this one found nothing
        search.offer(search.first, budget_nbytes)


def _live_start(search: Rounds, budget_nbytes: int) -> Array:
    """Of sequences found by live bytes, the best to begin with in blocks."""
    stop = search.stop.share_of_work(LIVE_TIME_SHARE)
    ranked = []
    for done, share in enumerate(LIVE_SHARES):
        until = stop.share_of_work(1.0 / (len(LIVE_SHARES) - done))
        found = search.nothing()
        live_budget = int(share * budget_nbytes)
        greedy = search.evict(live_budget, until.share_of_work(GREEDY_SHARE))
        if greedy is not None:
            found.sequence[: len(greedy)] = greedy
            found.figures[:2] = len(greedy), search.seconds(greedy)
        last = search.round(LIVE_ROUND, live_budget, best=found, stop=until)
        sequence = best_sequence(found)
        if not len(sequence):
            sequence = last
        search.offer(sequence, budget_nbytes)
        over = max(0.0, search.nbytes(sequence)[0] / max(1, budget_nbytes) - 1.0)
        ranked.append((search.seconds(sequence) / search.unit + over, sequence))
        if over == 0.0:
            break
    return min(ranked, key=lambda pair: pair[0])[1]
