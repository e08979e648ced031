"""When a search must end: after so much work, or at a ceiling on time that says when it cut."""

from __future__ import annotations

import math
import time

# Of so many seconds that are left a part gets no more than its share; what is left beyond them it
# may take, as its work ends it before. They are the time in which benchmarks/gaps.py plans, for
# parts of searches that may use all of that, and most of it for what takes a few seconds: on a
# machine that is three times slower it takes no more than two fifths of the time.
SHARED_OF_SEARCHES, SHARED_OF_LITTLE = 30.0, 24.0


class Stop:
    """The work that a search may do, and a time of time.monotonic() at which it ends in any case.

    Work is counted in units of about a move of the search over sequences; with it the same seed
    gives the same result on any machine. Where the clock has ended or shortened the search, or a
    part of it, ``cut_by_clock`` is true.
    """

    def __init__(
        self, deadline: float, *, work: float = math.inf, part_of: Stop | None = None
    ) -> None:
        self.deadline: float = deadline if part_of is None else min(deadline, part_of.deadline)
        self.work_left: float = work if part_of is None else min(work, part_of.work_left)
        self._part_of = part_of
        self.cut_by_clock = False

    @classmethod
    def after(cls, seconds: float, *, work: float = math.inf) -> Stop:
        """This many seconds from now, or after this much work."""
        return cls(time.monotonic() + seconds, work=work)

    @property
    def seconds_left(self) -> float:
        """Seconds until the search must end; negative if it is late."""
        return self.deadline - time.monotonic()

    def is_over(self) -> bool:
        """Must the search end? Ask only where work is left: out of time, it counts as cut."""
        if self.work_left <= 0.0:
            return True
        if self.seconds_left > 0.0:
            return False
        self.cut()
        return True

    def is_short_of(self, seconds: float) -> bool:
        """Is there less time left than this? Ask only where it would be used: then it is cut."""
        if self.seconds_left >= max(0.0, seconds):
            return False
        self.cut()
        return True

    def spend(self, work: float) -> None:
        """This much work was done."""
        self.work_left -= work
        if self._part_of is not None:
            self._part_of.spend(work)

    def end(self) -> None:
        """End the search, and what it is a part of, now: it was interrupted."""
        self.deadline = -math.inf
        self.cut()
        if self._part_of is not None:
            self._part_of.end()

    @property
    def is_ended(self) -> bool:
        """Has :meth:`end` been called? The clock alone never says so."""
        return self.deadline == -math.inf

    def cut(self) -> None:
        """Time is too short for what was to be done."""
        self.cut_by_clock = True
        if self._part_of is not None:
            self._part_of.cut()

    def with_work(self, work: float) -> Stop:
        """A stop for a part of the search that may do this much, whatever is left for the whole."""
        stop = Stop(self.deadline, part_of=self)
        stop.work_left = work
        return stop

    def share(self, part: float) -> Stop:
        """A stop for a part of the search, with this share of the time and the work that is left.

        What the part does not use is left to the whole.
        """
        return Stop(
            time.monotonic() + part * self.seconds_left,
            work=part * self.work_left,
            part_of=self,
        )

    def share_of_work(self, part: float) -> Stop:
        """As :meth:`share`, but where work is bounded only the first seconds are shared out.

        So the clock does not cut the part where there is time for the work of the whole.
        """
        if math.isinf(self.work_left):
            return self.share(part)
        return self._share(part, SHARED_OF_SEARCHES)

    def share_for_little(self, part: float) -> Stop:
        """As :meth:`share`, for a part that ends by itself, after a few seconds of a core."""
        return self._share(part, SHARED_OF_LITTLE)

    def _share(self, part: float, shared_seconds: float) -> Stop:
        stop = self.share(part)
        stop.deadline = max(stop.deadline, self.deadline - (1.0 - part) * shared_seconds)
        return stop


# A pace is judged when this part of the time has passed: a busy moment of the machine is no reason.
JUDGED_AFTER = 0.1


class Pace:
    """Whether work of a known amount will be done in time; where it will not, less is done.

    That is judged anew each time: once a busy moment is over, more is possible again. Less to be
    done counts as cut even if in the end all of it is: until then a search hurries.
    """

    def __init__(self, stop: Stop, amount: int) -> None:
        self._amount, self._stop = amount, stop
        self._begin, self._seconds = time.monotonic(), stop.seconds_left

    def left(self, done: int) -> int:
        """How much is still to be done: the rest, or as much of it as there is time for."""
        rest = self._amount - done
        passed = time.monotonic() - self._begin
        if rest <= 0 or passed < JUDGED_AFTER * self._seconds:
            return rest
        possible = 0
        if passed < self._seconds:
            possible = max(1, int(done / max(1e-9, passed) * (self._seconds - passed)))
        if possible < rest:
            self._stop.cut()
        return min(rest, possible)
