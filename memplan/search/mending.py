"""Short rounds that mend a best sequence that is too large for the memory that counts."""

from __future__ import annotations

from memplan.search.kernels.annealing import BEST_SECONDS
from memplan.search.round_kinds import SHORT_HOT, Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.search.settling import NEAR, settle

# What is too large where live bytes are not what counts is mended by this many rounds of this kind,
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
    return _Mending(search, aim, budget_nbytes, roughly=roughly).run()


class _Mending:
    """The rounds that mend what a search has found, and the bytes that they aim at.

    ``reached`` is the aim in which a round has last found what is too large, but worth mending;
    ``nover`` counts these, ``nlost`` the rounds in a row that have found nothing.
    """

    def __init__(self, search: Rounds, aim: int, budget_nbytes: int, *, roughly: bool) -> None:
        self.search, self.budget_nbytes, self.roughly = search, budget_nbytes, roughly
        self.kind = MENDING if search.is_recreated else MENDING_ANNEALED
        self.first_aim = self.aim = self.reached = aim
        self.ntries = self.nover = self.nlost = 0

    def run(self) -> int:
        """Look whether the best fits, aim lower and make a round, until it does."""
        search = self.search
        while self.ntries < (MENDINGS_OF_NOTHING if search.fitting is None else MENDINGS):
            self.ntries += 1
            is_lost = self._has_found_nothing()
            if self.roughly and (is_lost or search.stop.is_over()):
                self._begin_closely()
                is_lost = False
            self.nlost = self.nlost + 1 if is_lost else 0
            # A round that packs does more than a close look, where no plan is lost without that.
            is_brief = self.kind.recreates and self.ntries == 1 and search.fitting is not None
            over = settle(search, self.budget_nbytes, roughly=self.roughly, briefly=is_brief)
            if not over and not is_lost:
                return self._halfway_to_budget()
            # Once something fits, others may, too: how well they are packed is a matter of luck.
            if not over:
                self.aim = (self.aim + self.reached + 1) // 2
            elif not self._lower(over):
                break
            if not search.stop.is_over():
                self._round()
            elif not self.roughly:
                return self.aim
        if self.roughly:  # the last round has found nothing
            search.offer(search.first, self.budget_nbytes)
        settle(search, self.budget_nbytes)
        # A round that packs judges by what is packed, so that the next may have more bytes.
        return self._halfway_to_budget() if self.kind.recreates else self.aim

    def _has_found_nothing(self) -> bool:
        """Has the last round found nothing, where something would be worth it?"""
        search = self.search
        is_found = search.found.figures[BEST_SECONDS] < search.settled.figures[BEST_SECONDS]
        return self.aim < self.reached and not is_found and not self._is_near()

    def _is_near(self) -> bool:
        """Is what fits nearly as cheap as what is mended?"""
        return self.search.saved(self.search.first) <= NEAR * self.search.unit

    def _begin_closely(self) -> None:
        """Begin again, looking closely: what was over by a rough count may be all that there is."""
        self.search.offer(self.search.first, self.budget_nbytes)
        self.aim = self.first_aim
        self.roughly = False

    def _lower(self, over: int) -> bool:
        """Aim lower, as what was found last is ``over``; False where that is not worth a round."""
        is_near, recreates = self._is_near(), self.kind.recreates
        if is_near and self.ntries > 1 and recreates:
            return False
        if not is_near:
            self.nover, self.reached = self.nover + 1, self.aim
        if recreates and self.ntries <= MENDINGS:
            self.aim -= min((over + 1) // 2, int(MOST_FALL * self.aim))
        elif is_near:
            self.aim -= min(over, int(self.ntries * MENDING_STEP * self.aim))
        else:
            self.aim -= over if self.search.fitting is None else self.nover * over
        return True

    def _round(self) -> None:
        """Look for what fits; else what the round ends with may do so after a closer look."""
        search, found = self.search, self.search.found
        # From what is too large it may find nothing in any aim; what fits is in most.
        begins_fitting = self.nlost > 1 and search.fitting is not None
        start = best_sequence(found) if begins_fitting else search.first
        end = search.round(self.kind, self.aim, start=start, packed_nbytes=self.budget_nbytes)
        is_found = found.figures[BEST_SECONDS] != search.settled.figures[BEST_SECONDS]
        if self.kind.recreates and not is_found:
            search.offer(end, self.budget_nbytes)

    def _halfway_to_budget(self) -> int:
        return (self.aim + self.budget_nbytes + 1) // 2
