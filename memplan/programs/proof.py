"""How much is done to prove something of a step, and what is then known: bounds and schedules."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from memplan.programs.moment_ranking import fullest_between
from memplan.programs.solver import DEFAULT_SOLVER
from memplan.step.schedule import Schedule

# A program may leave this share of the gap that ends a search.
PROGRAM_GAP = 0.1

# Recomputations in a row that take less than this part of the step's time are no reason to look at
# what was full before them. Set on high_resolution of benchmarks/gaps.py at 30%.
RECOMPUTED = 0.004


@dataclass(frozen=True)
class Fact:
    """A schedule within the budget, or None, and what every schedule within it takes at least.

    An infinite bound means that no schedule is within the budget. With ``in_order`` it holds among
    the schedules that keep the order in which ops first run, and in each stage, up to one of these
    runs, recompute in this order, too, an op once at most.
    """

    schedule: Schedule | None
    bound_seconds: float
    in_order: bool = False


@dataclass(frozen=True)
class ProofOptions:
    """How a program is solved: by which ``solver``, and whether backward ops may run again.

    Checkmate's relaxation is rounded at ``thresholds`` thresholds; at most ``search_share`` of the
    time goes into a better first schedule. ``effort`` times the usual work is done, which may end
    where no schedule can be cheaper by more than ``gap_seconds``. ``nmoments`` are looked at one by
    one; others are added while ops times moments are at most ``size``, and until HiGHS has looked
    ``looks`` times, times the effort and the number of variables, at whether to end
    (in ``moment_refinement`` alone). With ``enough_seconds`` nothing is done for schedules: the
    bound alone is raised, as far as that, and the moments of ``candidates`` are looked at beside
    others. Unless ``reorder`` no schedules are given whose ops first run in another order.
    """

    solver: str = DEFAULT_SOLVER
    recompute_backward: bool = False
    thresholds: int = 12
    search_share: float = 0.3
    effort: float = 1.0
    gap_seconds: float = 0.0
    nmoments: int = 8
    size: float = math.inf
    looks: float = math.inf
    enough_seconds: float | None = None
    candidates: tuple[int, ...] = ()
    reorder: bool = True

    def of_bound_alone(self, best: Schedule | None) -> ProofOptions:
        """The same for a bound alone, as far as one ends a search that has found ``best``.

        Where that had no room, others may have none, either: these moments are its candidates.
        """
        if best is None:
            return dataclasses.replace(self, enough_seconds=math.inf)
        candidates = fullest_between(best, RECOMPUTED * best.graph.seconds)
        enough = best.seconds - self.gap_seconds
        return dataclasses.replace(self, enough_seconds=enough, candidates=candidates)

    @property
    def program_gap(self) -> float:
        """The gap in seconds that a single program may leave."""
        return PROGRAM_GAP * self.gap_seconds
