"""Offsets of buffers, judged and found without any code of memplan's."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import NamedTuple


class Buffer(NamedTuple):
    """``size`` bytes in [lower, upper) of time."""

    size: int
    lower: int
    upper: int

    def meets(self, other: Buffer) -> bool:
        """Whether both are alive at some time."""
        return self.lower < other.upper and other.lower < self.upper


def flaw(buffers: list[Buffer], offsets: list[int], nbytes: int, segment: int = 0) -> str | None:
    """What is wrong with a placement within ``nbytes``, if anything."""
    for buffer, offset in zip(buffers, offsets, strict=True):
        if offset < 0 or offset + buffer.size > nbytes:
            return f"{buffer} at {offset} leaves {nbytes} bytes"
        if segment and offset // segment != (offset + buffer.size - 1) // segment:
            return f"{buffer} at {offset} lies across a multiple of {segment}"
    for (one, a), (other, b) in combinations(zip(buffers, offsets, strict=True), 2):
        if one.meets(other) and a < b + other.size and b < a + one.size:
            return f"{one} at {a} overlaps {other} at {b}"
    return None


def peak(buffers: list[Buffer]) -> int:
    """The most bytes alive at a time."""
    return max(
        (sum(b.size for b in buffers if b.lower <= time.lower < b.upper) for time in buffers),
        default=0,
    )


def least_nbytes(buffers: list[Buffer], segment: int = 0) -> int:
    """The fewest bytes of any placement: every order of letting buffers fall on each other.

    Buffers of the best placement, dropped by ascending offset, come to lie no higher than there.
    """
    least = sum(buffer.size for buffer in buffers) + len(buffers) * segment

    def drop(left: list[Buffer], fallen: list[tuple[int, Buffer]], nbytes: int) -> None:
        nonlocal least
        if not left:
            least = nbytes
        for place, buffer in enumerate(left):
            offset = max((top for top, other in fallen if buffer.meets(other)), default=0)
            if segment and offset // segment != (offset + buffer.size - 1) // segment:
                offset = -(-offset // segment) * segment
            top = offset + buffer.size
            if max(nbytes, top) < least:
                rest = left[:place] + left[place + 1 :]
                drop(rest, [*fallen, (top, buffer)], max(nbytes, top))

    drop(buffers, [], 0)
    return least


def least_sum(buffers: list[Buffer], nbytes: int) -> list[int]:
    """Offsets within ``nbytes`` with the least sum of all placements; there must be one."""
    best: tuple[int, list[int]] | None = None
    for order in permutations(range(len(buffers))):
        offsets: dict[int, int] = {}
        for one in order:
            under = (k for k in offsets if buffers[k].meets(buffers[one]))
            offsets[one] = max((offsets[k] + buffers[k].size for k in under), default=0)
        if all(offset + buffers[k].size <= nbytes for k, offset in offsets.items()):
            total = sum(offsets.values())
            if best is None or total < best[0]:
                best = total, [offsets[k] for k in range(len(buffers))]
    assert best is not None
    return best[1]
