"""What a search for the largest batch has tried and found."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.planning.comparison import COLUMNS, Comparison, cells, figures, to_csv
from memplan.planning.plan import Attempt, Plan
from memplan.strategies.base import Status
from memplan.util.nbytes import format_nbytes
from memplan.util.tables import text_table


@dataclass(frozen=True)
class Trial:
    """A batch size that was tried; ``fits`` tells whether its plan keeps budget and overhead."""

    batch_size: int
    attempt: Attempt
    fits: bool


@dataclass(frozen=True)
class BatchSize:
    """The largest batch size found that fits, its plan, and all sizes that were tried.

    ``too_large`` is the smallest size tried that did not fit, or of which every plan found takes
    more time than ``max_overhead`` allows (None: the search ended before one was met): sizes
    between the two were not tried, as time was up, or, if ``interrupted``, as Ctrl-C ended the
    search for them. That a size does not fit is proved only where its attempt says
    "infeasible"; where that has an error, too, no budget helps, as MXNet cannot hold one of its
    arrays.
    """

    batch_size: int
    plan: Plan
    too_large: int | None
    tried: tuple[Trial, ...]
    interrupted: bool = False

    def __str__(self) -> str:
        plan = self.plan
        first = (
            f"Batch size {self.batch_size}: {format_nbytes(plan.total_nbytes)} of "
            f"{format_nbytes(plan.budget_nbytes or 0)} at {plan.overhead:+.1%} time; "
        )
        reason = "Ctrl-C ended the search" if self.interrupted else "time was up"
        if self.too_large is None:
            first += f"larger ones were not tried, as {reason}."
        else:
            [attempt] = [t.attempt for t in self.tried if t.batch_size == self.too_large]
            is_refused = attempt.status is Status.INFEASIBLE and attempt.error is not None
            first += f"{self.too_large} {_why(attempt, is_refused=is_refused)}"
            if self.too_large > self.batch_size + 1:
                first += f", those between were not tried, as {reason}"
            first += f": {attempt.error}." if is_refused else "."
        rows = [
            (str(t.batch_size), "yes" if t.fits else "no", *cells(t.attempt)) for t in self.tried
        ]
        lines = text_table([("batch", "fits", *Comparison.HEADER), *rows], left=(1, 2, 4))
        return "\n".join([first, "", *lines])

    def to_csv(self) -> str:
        """The sizes tried as CSV: ``batch_size``, ``fits``, and the columns of a comparison."""
        rows = ((t.batch_size, int(t.fits), *figures(t.attempt)) for t in self.tried)
        return to_csv(("batch_size", "fits", *COLUMNS), rows)


def _why(attempt: Attempt, *, is_refused: bool) -> str:
    """What became of a size that is too large; ``is_refused`` where MXNet cannot hold it."""
    if attempt.plan is not None:
        return f"was found to fit only at {attempt.plan.overhead:+.1%} time"
    return "is too large for MXNet" if is_refused else "did not fit"
