"""What the complete search may conclude; without any of it the search is slow and as right."""

from __future__ import annotations

from typing import NamedTuple


class Inferences(NamedTuple):
    """What the search may conclude. Every choice of them finds the same capacities feasible.

    ``canonical``: buffers are placed by ascending offset, ties by rank, so that no placement is
    tried in two orders (Moffitt 2023).
    ``floors``: the buffers of a section that lie at a floor or higher must fit above it, for each
    of its floors; without it only the lowest floor counts.
    ``lifting``: a buffer that was passed over lies on a buffer still to be placed, which raises
    its floor.
    ``dominance``: no buffer is placed at or above the top of another, still to be placed, that
    could lie entirely below it (Moffitt 2023).
    ``twins``: of buffers of one size and one lifetime, the first is placed first.
    ``parts``: what is left to place is solved in parts that share no section (Moffitt 2023).
    ``sorting``: every part is ranked anew, by what is left of its sections.
    ``jumping``: where a part has no solution, the search goes back to the last placement that
    raised a floor of the part.
    """

    canonical: bool = True
    floors: bool = True
    lifting: bool = True
    dominance: bool = True
    twins: bool = True
    parts: bool = True
    sorting: bool = True
    jumping: bool = True
