"""Races: short rounds from several sequences, of which the better half goes on, and again.

Where ruin and recreate ends is mostly decided in its first moments: which large tensors it keeps
then it seldom exchanges later, as that takes many changes at once. On HRNet at 30% of its step one
in eight rounds ends two points below the others, and a fifteenth of its time tells. Successive
halving, as of Karnin et al. 2013, "Almost optimal exploration in multi-armed bandits".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from memplan.search.kernels.annealing import BEST_LENGTH, BEST_SECONDS, Best
from memplan.search.kernels.arrays import Array
from memplan.search.round_kinds import Round
from memplan.search.rounds import Rounds, best_sequence
from memplan.util.stop import Stop

# This many begin, with a round of the first kind. The better half makes rounds of the second; the
# better halves of those make rounds each time twice as long. Set on HRNet at 30% of its step.
RUNNERS = 8
BEGUN, CONTINUED = Round(False, 0.3, 0.02, recreates=True), Round(True, 0.3, 0.02, recreates=True)


@dataclass
class _Runner:
    """What was found from one start, and where its last round has ended."""

    best: Best
    end: Array

    @property
    def seconds(self) -> float:
        return float(self.best.figures[BEST_SECONDS])


def race(search: Rounds, starts: Sequence[Array], budget_nbytes: int, stop: Stop) -> None:
    """Race from ``starts``, in turns; the best of all is offered, even after an interrupt."""
    runners = [_Runner(search.nothing(), start) for start in islice(cycle(starts), RUNNERS)]
    try:
        _run(search, runners, budget_nbytes, stop)
    finally:
        sequence = best_sequence(min(runners, key=lambda runner: runner.seconds).best)
        if len(sequence):
            search.offer(sequence, budget_nbytes)


def _run(search: Rounds, runners: list[_Runner], budget_nbytes: int, stop: Stop) -> None:
    """Let the runners run until one is left and has run, or one has found enough."""
    kind = BEGUN
    while runners:
        for runner in runners:
            if stop.is_over():
                return
            best, is_found = runner.best, bool(runner.best.figures[BEST_LENGTH])
            start = None if is_found else runner.end
            runner.end = search.round(kind, budget_nbytes, best=best, start=start, stop=stop)
            if runner.seconds <= search.enough_seconds:
                return
        ranked = sorted(runners, key=lambda runner: runner.seconds)
        runners = ranked[: len(ranked) // 2]
        kind = CONTINUED if kind is BEGUN else kind._replace(length=2.0 * kind.length)
