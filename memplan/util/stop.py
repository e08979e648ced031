"""When a search must end, whatever it has: a ceiling on time that says whether it was reached."""

from __future__ import annotations

import math
import time


class Stop:
    """A time of time.monotonic() at which a search ends.

    What bounds a search is a number of moves or rounds: then the same seed gives the same result
    on any machine. Where the clock has ended or shortened it, ``cut_by_clock`` is true.
    """

    def __init__(self, deadline: float, *, part_of: Stop | None = None) -> None:
        self.deadline: float = deadline if part_of is None else min(deadline, part_of.deadline)
        self._part_of = part_of
        self._cut = False

    @classmethod
    def after(cls, seconds: float) -> Stop:
        """This many seconds from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def at(cls, deadline: float | Stop) -> Stop:
        """At this time of time.monotonic(); a Stop is returned as it is."""
        return deadline if isinstance(deadline, Stop) else cls(deadline)

    @property
    def cut_by_clock(self) -> bool:
        """Has the clock ended or shortened the search, or a part of it?"""
        return self._cut

    @property
    def seconds_left(self) -> float:
        """Seconds until the search must end; negative if it is late."""
        return self.deadline - time.monotonic()

    def is_over(self) -> bool:
        """Is time up? To be asked where there is more to do: if it is up, the search was cut."""
        if self.seconds_left > 0.0:
            return False
        self.cut()
        return True

    def end(self) -> None:
        """End the search, and what it is a part of, now: it was interrupted."""
        self.deadline = -math.inf
        self.cut()
        if self._part_of is not None:
            self._part_of.end()

    def cut(self) -> None:
        """Time is too short for what was to be done."""
        self._cut = True
        if self._part_of is not None:
            self._part_of.cut()

    def share(self, part: float) -> Stop:
        """A stop for a part of the search, which has this share of the time that is left."""
        return Stop(time.monotonic() + part * self.seconds_left, part_of=self)
