"""Sums of variables of a program, each with a factor, and a constant.

A variable is known by its number (:meth:`memplan.programs.solver.Program.variable`). Of
python-mip's own arithmetic nothing is used: it loses a term where a variable occurs twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Linear:
    """The sum of factor times variable over ``terms``, none of them zero, plus ``constant``."""

    terms: Mapping[int, float] = field(default_factory=dict)
    constant: float = 0.0

    @classmethod
    def variable(cls, number: int) -> Linear:
        """The variable of this number."""
        return cls({number: 1.0})

    @classmethod
    def total(cls, addends: Iterable[Linear]) -> Linear:
        """The sum of ``addends``."""
        terms: dict[int, float] = {}
        constant = 0.0
        for addend in addends:
            constant += addend.constant
            for number, factor in addend.terms.items():
                terms[number] = terms.get(number, 0.0) + factor
        return cls({number: factor for number, factor in terms.items() if factor}, constant)

    @property
    def is_constant(self) -> bool:
        return not self.terms

    @property
    def key(self) -> Hashable:
        """Equal for equal sums."""
        return frozenset(self.terms.items()), self.constant

    def value(self, values: Mapping[int, float]) -> float:
        """The sum where the variables have these values."""
        return self.constant + sum(f * values[number] for number, f in self.terms.items())

    def __add__(self, other: Linear | float) -> Linear:
        if isinstance(other, Linear):
            return Linear.total((self, other))
        return Linear(self.terms, self.constant + other)

    def __sub__(self, other: Linear | float) -> Linear:
        return self + -1.0 * other if isinstance(other, Linear) else self + -other

    def __rsub__(self, other: float) -> Linear:
        return -1.0 * self + other

    def __rmul__(self, factor: float) -> Linear:
        terms = {number: factor * f for number, f in self.terms.items()} if factor else {}
        return Linear(terms, factor * self.constant)
