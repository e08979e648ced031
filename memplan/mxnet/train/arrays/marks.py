"""By which numbers autograd knows parameters: other ones since each half of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.mxnet.train.arrays.read_by_loss import ReadByLoss


@dataclass(frozen=True)
class Marks:
    """The ``numbers`` by which autograd knows, or knew, the parameters of these ``names``."""

    numbers: Sequence[int] = ()
    names: Sequence[str] = ()

    def read_by(self, read: ReadByLoss) -> list[str]:
        """The parameters that a loss reads by these numbers."""
        found = [number for number in read.variables if number in self.numbers]
        return [self.names[self.numbers.index(number)] for number in found]


# Those of steps before: no loss must read them.
Earlier = deque[Marks]

# Of so many of them that is known: three for every step, and two more where it is of another shape
# than the one before.
REMEMBERED = 40
