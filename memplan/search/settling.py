"""Whether what a search in live bytes has found fits the memory that counts: one packed array.

A sequence is put in an order in which less is alive (:mod:`memplan.search.tidying`), after which it
often fits. One that does not is changed a little, mostly in its order: how well one can be packed
is a matter of luck. Near the least memory of a network plans cost up to a point less by that.
"""

from __future__ import annotations

import time

from memplan.memory.offsets.passes import SMALL
from memplan.search.kernels.annealing import BEST_LENGTH, BEST_NBYTES, BEST_SECONDS
from memplan.search.kernels.packing import Repacking, repack
from memplan.search.kernels.sequence import load
from memplan.search.kernels.state import LENGTH, OP
from memplan.search.rounds import Rounds, best_sequence, copy_best
from memplan.search.tidying import tidied

# What packing costs in work, for every op: where quick placements fit, and where none does.
# Measured on the zoo's ResNet-50 and on an LSTM of 1,700 ops.
PACKING_WORK, FAILING_WORK = 2, 60
# What another order of the runs costs in work, for every op: measured on the same.
TIDYING_WORK = 2
# What does not fit at once is changed: for this many placements at most, and squares of the number
# of buffers summed over these, each of which costs so much work.
MOST_PLACEMENTS, MOST_SQUARES, SQUARE_WORK = 1500, 1_000_000_000, 3e-4
# For this many where a round that packs comes next: all of them take as long as that, and in three
# seconds most of the time. Set on a FCN at 30% of its step, and on ResNeSt-50 and a residual
# attention network at 40%.
BRIEF_PLACEMENTS = 150
# It may take so much longer, over the unplanned step, and by half of the seconds that it saves
# against the one that fits.
EXTRA, EXTRA_SHARE = 5e-4, 0.5
# What saves more than this, over the unplanned step, is worth more: a closer look at its offsets,
# and a lower aim where it does not fit. Set on HRNet, SENet-154 and SE-ResNeXt-50 at 40% of their
# steps of 8 pictures, where a graph of 1,700 ops is looked at some five times in 20 seconds, and on
# inception_v3 of benchmarks/gaps.py and a FCN at 30%.
NEAR = 0.003
# Where nothing fits yet, what is over by at most this share of the budget is looked at so closely,
# too: what fits after all may cost far less than what has that many bytes less. Set on an LSTM at
# 30% of its step, of which a plan at +131% has offsets, and one in 1% less cost 173%.
CLOSE = 0.01


def settle(
    search: Rounds, budget_nbytes: int, *, roughly: bool = False, briefly: bool = False
) -> int:
    """By how many bytes the best is over the budget in the memory that counts.

    ``briefly`` after few changes, and without a longer search for offsets.
    ``roughly`` in no time, but for what is hardly over (CLOSE) where nothing fits; and roughly in
    any case if something fits and there is less time than the longest look has taken. If the best
    is over, it is again what it was when it last was not, and rounds begin with what was too large.
    """
    found, settled = search.found, search.settled
    if search.excess is None or found.figures[BEST_SECONDS] == settled.figures[BEST_SECONDS]:
        return 0
    begin = time.monotonic()
    _tidy(search, budget_nbytes)
    schedule = search.schedule(best_sequence(found))
    over = search.excess(schedule, budget_nbytes, roughly=True)
    if over and not roughly:  # a rough look may have taken the rest of the time
        roughly = search.fitting is not None and _is_late(search)
    is_close = roughly and search.fitting is None and 0 < over <= CLOSE * budget_nbytes
    if is_close:
        over = search.excess(schedule, budget_nbytes)
    if over and not (roughly or search.match_ranges):
        nplacements = BRIEF_PLACEMENTS if briefly else MOST_PLACEMENTS
        change_to_pack(search, budget_nbytes, nplacements)
        schedule = search.schedule(best_sequence(found))
        # A longer search for offsets seldom finds what changes do not.
        is_near = search.saved(best_sequence(found)) <= NEAR * search.unit
        over = search.excess(schedule, budget_nbytes, roughly=is_near or briefly)
    has_failed = over and (is_close or not (roughly or briefly))
    search.longest_look = max(search.longest_look, time.monotonic() - begin)
    search.stop.spend((FAILING_WORK if has_failed else PACKING_WORK) * search.nops)
    if over:
        search.first = best_sequence(found)
        copy_best(settled, found)
    else:
        search.fitting = schedule
        copy_best(found, settled)
    return over


def _tidy(search: Rounds, budget_nbytes: int) -> None:
    """Put the runs of the best in an order in which less is alive, unless it has a higher peak."""
    if search.match_ranges or not search.rules.reorder:
        return
    sequence, figures = tidied(search.model, best_sequence(search.found)), search.found.figures
    search.stop.spend(TIDYING_WORK * search.nops)
    nbytes = search.live_peak(sequence)
    if nbytes <= max(budget_nbytes, figures[BEST_NBYTES]):
        search.found.sequence[: len(sequence)] = sequence
        figures[BEST_NBYTES] = nbytes


def _is_late(search: Rounds) -> bool:
    """Is there too little time for a look as long as the longest?"""
    if search.stop.work_left <= 0.0:
        return True
    return search.stop.is_short_of(search.longest_look)


def change_to_pack(search: Rounds, budget_nbytes: int, nplacements: int = MOST_PLACEMENTS) -> None:
    """Change the best so that it can be packed within the budget, or more nearly so."""
    sequence, figures = best_sequence(search.found), search.found.figures
    most = int(max(budget_nbytes, figures[BEST_NBYTES]))
    load(search.model, search.state, sequence, len(sequence), most)
    extra = EXTRA * search.unit
    if search.settled.figures[BEST_LENGTH]:
        cheaper = search.settled.figures[BEST_SECONDS] - figures[BEST_SECONDS]
        extra = min(extra, EXTRA_SHARE * cheaper)
    seconds = search.state.seconds[0] + extra
    least = int(SMALL * budget_nbytes)
    task = Repacking(budget_nbytes, least, nplacements, MOST_SQUARES, seconds)
    _, nsquares = repack(search.model, search.state, search.packing, task)
    search.stop.spend(SQUARE_WORK * nsquares)
    repacked = search.state.steps[OP, : search.state.totals[LENGTH]].copy()
    search.found.sequence[: len(repacked)] = repacked
    figures[:] = len(repacked), search.seconds(repacked), search.live_peak(repacked)
