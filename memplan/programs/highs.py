"""What python-mip lacks of HiGHS: rows all at once, and whether the clock has ended a solve."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Rows:
    """Rows that a solver does not have yet: sums of factor times variable, each with a limit.

    Of all of them in a few lists: python-mip makes objects for each, which takes half of the time
    in which a relaxation is built.
    """

    begins: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(self, terms: Mapping[int, float], limit: float) -> None:
        """Add the row that the sum of ``terms`` is at most ``limit``."""
        self.begins.append(len(self.numbers))
        self.numbers.extend(terms)
        self.factors.extend(terms.values())
        self.limits.append(limit)

    def __iter__(self) -> Iterator[tuple[Sequence[int], Sequence[float], float]]:
        """The variables, factors and limit of each row."""
        ends = [*self.begins, len(self.numbers)][1:]
        for begin, end, limit in zip(self.begins, ends, self.limits, strict=True):
            yield self.numbers[begin:end], self.factors[begin:end], limit

    def pass_to(self, highs: Any, interface: Any) -> None:
        """Give them to ``highs``, a solver of python-mip's, of which ``interface`` is the file."""
        if not self.limits:
            return
        highs._flush()  # the variables that python-mip still has
        nrows, new = len(self.limits), interface.ffi.new
        status = highs._lib.Highs_addRows(
            *(highs._model, nrows, new("double[]", [-math.inf] * nrows)),
            *(new("double[]", self.limits), len(self.numbers), new("int[]", self.begins)),
            *(new("int[]", self.numbers), new("double[]", self.factors)),
        )
        interface.check(status)
        highs._row_committed += nrows  # python-mip makes room for the values of this many


@contextlib.contextmanager
def asking_whether_late(highs: Any) -> Iterator[list[bool]]:
    """Has the clock ended HiGHS's solve? The answer is in the list once it has ended.

    python-mip makes the variables of a relaxation integer again at the end of its ``optimize``, and
    HiGHS forgets the status of a solve by that: so HiGHS is asked before.
    """
    answers = list[bool]()
    give_back_types = highs._reset_var_types

    def ask() -> None:
        status = highs._lib.Highs_getModelStatus(highs._model)
        answers.append(bool(status == highs._lib.kHighsModelStatusTimeLimit))

    def ask_before(types: Sequence[str]) -> None:
        ask()
        give_back_types(types)

    # The clock of HiGHS runs on over all solves of a model, and the limit is on their sum.
    highs._lib.Highs_zeroAllClocks(highs._model)
    highs._reset_var_types = ask_before
    try:
        yield answers
    finally:
        del highs._reset_var_types
        if not answers:
            ask()
