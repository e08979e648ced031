"""Plans of several strategies at several budgets, as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from memplan.planning.plan import Attempt
from memplan.util.nbytes import format_nbytes
from memplan.util.tables import text_table

if TYPE_CHECKING:
    from memplan.views.pictures import Figure

COLUMNS = (
    "strategy",
    "budget_nbytes",
    "status",
    "total_nbytes",
    "allocated_nbytes",
    "peak_nbytes",
    "fixed_nbytes",
    "optimizer_nbytes",
    "workspace_nbytes",
    "reserve_nbytes",
    "overhead",
    "lower_bound_overhead",
    "planning_seconds",
    "cut_by_clock",
    "error",
)
"""Of a row as CSV: bytes as integers, overhead and bound as fractions."""


def figures(row: Attempt) -> tuple[str | int | float | None, ...]:
    """The values of :data:`COLUMNS`; None where there is none."""
    start = (row.strategy, row.budget_nbytes, row.status.value)
    end = (row.seconds, row.cut_by_clock, row.error)
    if row.plan is None:
        return (*start, *[None] * (len(COLUMNS) - len(start) - len(end)), *end)
    plan, step = row.plan, row.plan.footprint
    sizes = (step.total_nbytes, step.allocated_nbytes, step.peak_nbytes, step.fixed_nbytes)
    others = (step.optimizer_nbytes, step.workspace_nbytes, step.reserve_nbytes)
    return (*start, *sizes, *others, plan.overhead, plan.lower_bound_overhead, *end)


def to_csv(header: Sequence[str], rows: Iterable[Iterable[str | int | float | None]]) -> str:
    """A table as CSV; floats are written to six digits, None as nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row])
    return text.getvalue()


@dataclass(frozen=True)
class Comparison:
    """Plans of several strategies at several budgets."""

    rows: tuple[Attempt, ...]

    HEADER = ("strategy", "budget", "status", "total", "allocated", "peak", "overhead", "bound")

    def __str__(self) -> str:
        lines = text_table([self.HEADER, *(cells(row) for row in self.rows)], left=(0, 2))
        errors = [f"{row.strategy}: {row.error}" for row in self.rows if row.error is not None]
        return "\n".join([*lines, *dict.fromkeys(errors)])

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Overhead against memory: see :func:`memplan.views.pictures.overhead_against_memory`."""
        from memplan.views import pictures

        return pictures.overhead_against_memory(self, path)

    def to_csv(self) -> str:
        """The table as CSV, with the columns :data:`COLUMNS`."""
        return to_csv(COLUMNS, map(figures, self.rows))


def cells(row: Attempt) -> tuple[str, ...]:
    """What a table says of an attempt, as :attr:`Comparison.HEADER` has it."""
    budget = "least" if row.budget_nbytes is None else format_nbytes(row.budget_nbytes)
    status = row.status.value if row.error is None else "failed"
    if row.plan is None:
        return (row.strategy, budget, status, "-", "-", "-", "-", "-")
    plan = row.plan
    bound = "-" if plan.lower_bound_overhead is None else f"{plan.lower_bound_overhead:.1%}"
    sizes = (plan.total_nbytes, plan.allocated_nbytes, plan.peak_nbytes)
    texts = (*map(format_nbytes, sizes), f"{plan.overhead:.1%}", bound)
    return (row.strategy, budget, status, *texts)
