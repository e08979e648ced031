"""How fast a search is, and so how many moves it makes between two looks at the clock."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.util.stop import JUDGED_AFTER, Stop

# A round makes this many moves at least.
FEWEST_MOVES = 64
# Between two looks at the clock about this many seconds pass.
CHUNK_SECONDS = 0.1


@dataclass
class Speed:
    """How fast moves are: this many were made in this many seconds; how many to make at a time."""

    moves: int = 0
    seconds: float = 0.0
    chunk: int = FEWEST_MOVES

    def note(self, moves: int, seconds: float) -> None:
        """This many moves took this many seconds."""
        self.moves += moves
        self.seconds += seconds
        self.chunk = int(max(20, CHUNK_SECONDS * moves / max(1e-6, seconds)))

    def possible(self, moves: int, stop: Stop) -> int:
        """As many of these moves as there is time for, if enough were made to tell."""
        left = max(0.0, stop.seconds_left)
        if self.seconds <= JUDGED_AFTER * left or self.seconds * moves <= self.moves * left:
            return moves
        stop.cut()
        return max(FEWEST_MOVES, int(self.moves / self.seconds * left))
