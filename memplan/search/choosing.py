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

# This many attempts in a row may find nothing cheaper.
PATIENCE = 150

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
        if loss_by_loss(graph, **rules).graph is not graph:
            graphs.reverse()  # where losses take turns least is to be dropped
        self.orders = [Evictions(each, 0, recompute_backward=recompute_backward) for each in graphs]
        self.last: Start | None = None

    def solve(self, budget_nbytes: int, stop: Stop) -> Schedule | None:
        """The cheapest schedule found with at most so many live bytes."""
        repairs = self._mended(budget_nbytes, stop)
        online = None
        if not repairs:
            online = self.orders[0].within(budget_nbytes).cheapest_online(stop)
        starts = repairs or self._starts(budget_nbytes, online, stop)
        if not starts:
            return None if online is None else self.reordered.back(online)
        self.last = improve_best(starts, stop, patience=PATIENCE, seed=self.seed)
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
