"""Choosing what to drop, from several beginnings, in the base order and in a better one.

The cheapest beginnings compete (:func:`memplan.search.eviction.improve_best`), whichever order they
have: near the least memory in which a step can run, all depends on the order of its backward pass.
"""

from __future__ import annotations

from memplan.search.eager import reordered
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
        self.reordered = reordered(graph, reorder=reorder)
        graphs = [graph]
        if self.reordered.graph is not graph:
            graphs.append(self.reordered.graph)
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
            return online
        self.last = improve_best(starts, stop, patience=PATIENCE, seed=self.seed)
        best = self.reordered.back(self.last.fit.schedule)
        return online if online is not None and online.seconds < best.seconds else best

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
        for evictions in (order.within(budget_nbytes) for order in self.orders):
            is_base = evictions.graph is self.reordered.original
            fits = [evictions.first(online if is_base else None, stop)]
            if not self.few:
                aims = (int(slack * budget_nbytes) for slack in SLACKS)
                fits += [evictions.within(aim).fit((), stop) for aim in aims]
            result += [Start(evictions, fit) for fit in fits if fit is not None]
            if self.few and result:
                break
        return result
