"""Short rounds that mend a best sequence that is too large for the memory that counts."""

from __future__ import annotations

from memplan.search.kernels.annealing import BEST_SECONDS
from memplan.search.kernels.arrays import Array
from memplan.search.round_kinds import SHORT_HOT, Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.settling import NEAR, settle

# What is too large where live bytes are not what counts is mended by so many rounds of this kind,
# in which it is packed attempt by attempt, and in blocks and of large graphs of the second, in
# which it is not. They get fewer bytes by half of what is over, but by MOST_FALL of them at most,
# as packed they cost little more than before; where what fits is nearly as cheap there is one. Set
# on SENet-154 at 40% of its step, and on HRNet and a FCN at 30%. Those of the second kind get fewer
# by what is over; where something fits by twice that, and so on, but by at most MENDING_STEP of
# them, twice that, and so on, where that is nearly as cheap: set on an LSTM at 30%. One that finds
# nothing in so few bytes is followed by one in bytes halfway back. Where nothing fits there are
# more of them, which get fewer by all that is over.
MENDING, MENDING_ANNEALED = Round(False, 0.5, 0.1, recreates=True), Round(False, SHORT_HOT, 0.1)
MENDINGS, MENDINGS_OF_NOTHING, MOST_FALL, MENDING_STEP = 4, 8, 0.01, 0.005


def mend(search: Rounds, aim: int, budget_nbytes: int, *, roughly: bool = False) -> int:
    """The live bytes to aim at, where the best was too large for the memory that counts.

    Short rounds mend it, each in fewer bytes than the one before, or in more where one has found
    nothing; what then fits leaves room for a higher aim.
    """
    kind = MENDING if search.is_recreated else MENDING_ANNEALED
    tries, nover, nlost, first_aim, reached = 0, 0, 0, aim, aim
    while tries < (MENDINGS_OF_NOTHING if search.fitting is None else MENDINGS):
        tries += 1
        is_found = search.found.figures[BEST_SECONDS] < search.settled.figures[BEST_SECONDS]
        is_worth = search.saved(search.first) > NEAR * search.unit
        is_lost = aim < reached and not is_found and is_worth
        if roughly and (is_lost or search.stop.is_over()):
            # What was over the budget by a rough count may be all that there is.
            search.offer(search.first, budget_nbytes)
            aim, reached, roughly, is_lost = first_aim, first_aim, False, False
        nlost = nlost + 1 if is_lost else 0
        # A round that packs does more than a close look, where no plan is lost without that.
        briefly = kind.recreates and tries == 1 and search.fitting is not None
        over = settle(search, budget_nbytes, roughly=roughly, briefly=briefly)
        if not over and not is_lost:
            return (aim + budget_nbytes + 1) // 2
        # Once something fits, others may, too: how well a schedule is packed is a matter of luck.
        if not over:
            aim = (aim + reached + 1) // 2
        else:
            is_near = search.saved(search.first) <= NEAR * search.unit
            if is_near and tries > 1 and kind.recreates:
                break
            if not is_near:
                nover, reached = nover + 1, aim
            if kind.recreates and tries <= MENDINGS:
                aim -= min((over + 1) // 2, int(MOST_FALL * aim))
            elif is_near:
                aim -= min(over, int(tries * MENDING_STEP * aim))
            else:
                aim -= over if search.fitting is None else nover * over
        if not search.stop.is_over():
            # From what is too large it may find nothing in any aim; what fits is in most.
            begins_fitting = nlost > 1 and search.fitting is not None
            start = best_sequence(search.found) if begins_fitting else search.first
            _mending_round(search, kind, start, aim, budget_nbytes)
        elif not roughly:
            return aim
    if roughly:  # as above, where the last round has found nothing
        search.offer(search.first, budget_nbytes)
    settle(search, budget_nbytes)
    # What a round that packs ends with is judged as packed, so that the next may have more bytes.
    return (aim + budget_nbytes + 1) // 2 if kind.recreates else aim


def _mending_round(search: Rounds, kind: Round, start: Array, aim: int, budget_nbytes: int) -> None:
    """A round that looks for what fits; else what it ends with may do so after a closer look."""
    found, settled = search.found.figures, search.settled.figures
    end = search.round(kind, aim, start=start, packed_nbytes=budget_nbytes)
    if kind.recreates and found[BEST_SECONDS] == settled[BEST_SECONDS]:
        search.offer(end, budget_nbytes)
