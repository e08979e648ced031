"""Choosing what to drop, from several beginnings, in the base order and in a better one.

The cheapest beginnings compete (:func:`memplan.search.eviction.improve_best`), whichever order they
have: near the least memory in which a step can run, all depends on the order of its backward pass.
"""

from __future__ import annotations

from memplan.search.by_loss import best_order, loss_by_loss
from memplan.search.eviction import Evictions, Start, improve_best
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule
from memplan.util.stop import Stop

# This many attempts in a row may find nothing cheaper: of several searches, and of one alone.
PATIENCE, PATIENCE_ALONE = 150, 500

# Drops are chosen for all of the budget, and of small graphs for these parts of it.
SLACKS = (0.97, 0.93, 0.85)


class Choosing:
    """A search for each budget that :meth:`solve` is asked; the next mends what the last found.

    With ``few`` it begins with one schedule. Ops may change their order if ``reorder``.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        *,
        recompute_backward: bool,
        reorder: bool,
        seed: int,
        few: bool,
    ) -> None:
        self.seed, self.few = seed, few
        rules = {"reorder": reorder, "recompute_backward": recompute_backward}
        self.reordered = best_order(graph, **rules)
        graphs = [graph]
        if self.reordered.graph is not graph:
            graphs.append(self.reordered.graph)
        self.take_turns = loss_by_loss(graph, **rules).graph is not graph
        if self.take_turns:
            graphs.reverse()  # where losses take turns least is to be dropped
        self.orders = [Evictions(each, 0, recompute_backward=recompute_backward) for each in graphs]
        self.last: Start | None = None

    def solve(self, budget_nbytes: int, stop: Stop) -> Schedule | None:
        """The cheapest schedule found with at most this many live bytes."""
        repairs = self._mended(budget_nbytes, stop)
        online = None
        if not repairs:
            online = self.orders[0].within(budget_nbytes).cheapest_online(stop)
        starts = repairs or self._starts(budget_nbytes, online, stop)
        if not starts:
            return None if online is None else self.reordered.back(online)
        self.last = improve_best(starts, stop, patience=PATIENCE, seed=self.seed)
        alone = self._alone(budget_nbytes, stop) if not repairs else None
        if alone is not None and alone.fit.schedule.seconds < self.last.fit.schedule.seconds:
            self.last = alone
        best = self.last.fit.schedule
        if online is not None and online.seconds < best.seconds:
            best = online
        return self.reordered.back(best)

    def _mended(self, budget_nbytes: int, stop: Stop) -> list[Start]:
        """The last schedule with more drops."""
        if self.last is None:
            return []
        evictions = self.last.evictions.within(budget_nbytes)
        fit = evictions.fit(self.last.fit.drops, stop)
        return [] if fit is None else [Start(evictions, fit)]

    def _alone(self, budget_nbytes: int, stop: Stop) -> Start | None:
        """One search in the base order, as the strategy `evict` does it, where losses take turns.

        It may end far below those that compete, most of which begin with the other order: by 2
        points of 22 on a U-Net of four losses, 288 ops, at 30% of the step.
        """
        if self.few or not self.take_turns:
            return None
        evictions = self.orders[-1].within(budget_nbytes)
        fit = evictions.first(evictions.cheapest_online(stop), stop)
        if fit is None:
            return None
        fit = evictions.improve_or_end(fit, stop, patience=PATIENCE_ALONE, seed=self.seed)
        return Start(evictions, fit)

    def _starts(self, budget_nbytes: int, online: Schedule | None, stop: Stop) -> list[Start]:
        """What a search may begin with; with ``few`` the first of these."""
        result = []
        for number, order in enumerate(self.orders):
            evictions = order.within(budget_nbytes)
            fits = [evictions.first(None if number else online, stop)]
            if not self.few:
                aims = (int(slack * budget_nbytes) for slack in SLACKS)
                fits += [evictions.within(aim).fit((), stop) for aim in aims]
            result += [Start(evictions, fit) for fit in fits if fit is not None]
            if self.few and result:
                break
        return result
