"""Several good sequences at once: others are made from nothing, and each is improved in turn.

A search that goes on from its best alone stays near that: plans of a high-resolution network at 30%
of its step differed by two points between seeds. What was annealed from the unplanned step costs
more at first, but keeps and drops other things; ruin and recreate then mends it in a short round.
Both begin in the usual order of the ops or in that of :mod:`memplan.search.low_order`, as a search
seldom gets from one order of branches to another. With the latter, plans of two siamese networks
and of U-Nets at three scales cost up to two points less at 40% of the step; sequences of a
high-resolution network at 30% that are made from the usual order cost two points less.
An elite set as of Glover 1998, "A template for scatter search and path relinking", without its
combinations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from memplan.search.kernels.annealing import BEST_LENGTH, BEST_NBYTES, BEST_SECONDS, Best
from memplan.search.kernels.arrays import Array
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds, best_sequence, copy_best

# This many are kept.
MOST = 4
# The rounds of turns, set on high_resolution, deep_high_resolution, ssd and inception_v3 of
# benchmarks/gaps.py at 30% of the step: what makes another sequence and what mends it, twice; what
# improves an elite, and what mends that.
ANNEALED, RECREATED = Round(False, 0.2, 0.3), Round(False, 2.0, 0.5, recreates=True)
MENDED = Round(True, 0.3, 0.3, recreates=True)
IMPROVED, ANNEALED_AGAIN = Round(True, 1.0, 0.3, recreates=True), Round(True, 0.1, 0.3)
MENDED_AGAIN = Round(True, 0.3, 0.1, recreates=True)
# Turns that make others are so much longer whenever all turns have been made; those of an elite
# whenever one has found nothing cheaper.
LENGTHEN, LENGTHEN_STALLED = 1.2, 1.5
# An elite is improved before a cheaper one that has stalled so often more, for all of the ranks
# between the cheapest and the most expensive.
RANKS = 3.0
# Where what is found must be packed, too, a turn gets this part of what is left: the rest is for
# mending what does not fit. Set on HRNet at 30% of its step, where one turn took all.
TURN_SHARE = 0.5
# What differs by less, over the unplanned step, takes equally long: seconds are summed in an order.
EQUAL = 1e-9


class Turn(Enum):
    """What a turn does: it anneals or recreates a sequence from nothing, or improves an elite."""

    ANNEAL = auto()
    RECREATE = auto()
    IMPROVE = auto()


TURNS = (
    *(Turn.IMPROVE, Turn.IMPROVE, Turn.ANNEAL, Turn.RECREATE),
    *(Turn.IMPROVE, Turn.IMPROVE, Turn.ANNEAL),
)


@dataclass
class Elite:
    """A sequence, and how many turns have found nothing cheaper from it."""

    best: Best
    nstalled: int = 0

    @property
    def seconds(self) -> float:
        """What the sequence takes."""
        return float(self.best.figures[BEST_SECONDS])


@dataclass
class _Order:
    """An unplanned step that sequences are made from; what the cheapest of them takes."""

    unplanned: Array
    seconds: float = math.inf


class Elites:
    """The elites of a search, cheapest first."""

    def __init__(self, search: Rounds) -> None:
        self.search = search
        self.members: list[Elite] = []
        self.until = search.stop
        self.nmade = 0
        self.orders = [_Order(search.unplanned), _Order(search.low)]

    def turn(self, number: int, budget_nbytes: int) -> None:
        """Make this turn; if it finds what is cheaper than all, that is the best of the search."""
        self.take_found()
        stop = self.search.stop
        self.until = stop if self.search.excess is None else stop.share_of_work(TURN_SHARE)
        cycle, place = divmod(number, len(TURNS))
        turn = TURNS[place] if self.members else Turn.ANNEAL
        if turn is Turn.IMPROVE:
            self._improve(self.next(), budget_nbytes)
        else:
            kind = ANNEALED if turn is Turn.ANNEAL else RECREATED
            self._make(kind._replace(length=kind.length * LENGTHEN**cycle), budget_nbytes)

    def take_found(self) -> None:
        """What the search has found is one of them; what is cheaper has turned out not to fit."""
        found, seconds = self.search.found, float(self.search.found.figures[BEST_SECONDS])
        least = seconds - EQUAL * self.search.unit
        self.members = [elite for elite in self.members if elite.seconds >= least]
        if found.figures[BEST_LENGTH]:
            self.add(found)

    def add(self, best: Best) -> None:
        """Keep a copy of ``best`` as an elite, if it is cheap enough and none takes as long."""
        seconds, equal = float(best.figures[BEST_SECONDS]), EQUAL * self.search.unit
        if any(abs(elite.seconds - seconds) <= equal for elite in self.members):
            return
        kept = self.search.nothing()
        copy_best(best, kept)
        self.members = sorted([*self.members, Elite(kept)], key=lambda elite: elite.seconds)[:MOST]

    def next(self) -> Elite:
        """The cheapest, unless it has stalled more often than others."""
        ranks = RANKS / len(self.members)
        place = min(range(len(self.members)), key=lambda i: self.members[i].nstalled + ranks * i)
        return self.members[place]

    def _make(self, kind: Round, budget_nbytes: int) -> None:
        """Another sequence from nothing, mended."""
        best, order = self.search.nothing(), self._next_order()
        with self._offering(best, budget_nbytes):
            end = self._round(kind, order.unplanned, best, budget_nbytes)
            self._round(MENDED, end, best, budget_nbytes)
            self._round(MENDED, None, best, budget_nbytes)
        order.seconds = min(order.seconds, float(best.figures[BEST_SECONDS]))
        if best.figures[BEST_LENGTH]:
            self.add(best)

    def _next_order(self) -> _Order:
        """Each once, then more often the one from which cheaper sequences were made.

        The usual one is second, as what a search begins with has mostly that order.
        """
        self.nmade += 1
        if self.nmade <= len(self.orders):
            return self.orders[-self.nmade]
        cheaper, other = sorted(self.orders, key=lambda order: order.seconds)
        return cheaper if self.nmade % 3 else other

    def _improve(self, elite: Elite, budget_nbytes: int) -> None:
        """Look for what is cheaper near an elite."""
        search, best, seconds = self.search, elite.best, elite.seconds
        longer = LENGTHEN_STALLED**elite.nstalled
        if seconds <= search.found.figures[BEST_SECONDS] + EQUAL * search.unit:
            # It fits: what is near it may have as many bytes.
            budget_nbytes = max(budget_nbytes, int(best.figures[BEST_NBYTES]))
        with self._offering(best, budget_nbytes):
            self._round(_longer(IMPROVED, longer), None, best, budget_nbytes)
            end = self._round(_longer(ANNEALED_AGAIN, longer), None, best, budget_nbytes)
            self._round(_longer(MENDED_AGAIN, longer), end, best, budget_nbytes)
        if elite.seconds >= seconds:
            elite.nstalled += 1
        # It may have become another one.
        equal = EQUAL * search.unit
        others = [other for other in self.members if abs(other.seconds - elite.seconds) > equal]
        self.members = sorted([*others, elite], key=lambda elite: elite.seconds)

    def _round(
        self, kind: Round, start: Array | None, best: Best, budget_nbytes: int
    ) -> Array | None:
        """A round, if the turn is not over; its end."""
        if self.until.is_over():
            return None
        return self.search.round(kind, budget_nbytes, best=best, start=start, stop=self.until)

    @contextmanager
    def _offering(self, best: Best, budget_nbytes: int) -> Iterator[None]:
        """What is found meanwhile is the search's, even if that is interrupted."""
        try:
            yield
        finally:
            sequence = best_sequence(best)
            if len(sequence):
                # Free of the errors of adding up, as the search counts it.
                best.figures[BEST_SECONDS] = self.search.seconds(sequence)
                self.search.offer(sequence, budget_nbytes)


def _longer(kind: Round, times: float) -> Round:
    return kind._replace(length=times * kind.length)
