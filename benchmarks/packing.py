"""Static memory allocation: how near to the least bytes buffers are packed, and how fast.

    python benchmarks/packing.py FILE.csv ...

FILE has the columns id, lower, upper and size, as instances of MiniMalloc (google/minimalloc) and
idealloc (cappadokes/idealloc) have: a buffer is alive in [lower, upper). Of MiniMalloc's other
columns a hint changes no answer; an alignment or gaps would, and are refused. For
NAME.CAPACITY.csv, placements within CAPACITY are asked for, else the least bytes. A row for every
file:

- peak: the most bytes alive at a time, which no placement can do without.
- ratio: bytes reached by the capacity or else by the peak.
- proved: yes (all fits within the capacity; the capacity is too small for any placement; or the
  bytes are the least of any), or no, and the most bytes that are proved to be needed.
- seconds: of the processor, without reading and checking; compiled before.

Every placement is checked: no two buffers overlap in time and memory.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from memplan.memory.offsets.buffers import Array, Buffers
from memplan.memory.offsets.passes import Placement
from memplan.memory.offsets.placement import place, solve
from memplan.memory.offsets.quick import lowest_first

HEADS = (
    "instance",
    "buffers",
    "peak",
    "bytes reached",
    "ratio to capacity or peak",
    "proved",
    "seconds",
)
COLUMNS = ("size", "lower", "upper")

# What makes MiniMalloc's problem another one, and the cells that leave it as it is.
OTHERS = {"alignment": ("", "0", "1"), "gaps": ("",)}

# Sizes and times are less than this, and so are all sizes together times the number of buffers: one
# pass over them has an offset and a buffer in one number of 64 bits.
MOST = 1 << 61


def read(path: Path) -> tuple[Array, Array, Array]:
    """Sizes in bytes, and when each buffer's life begins and ends."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            numbers = list(rows_of(path, lines))
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except (UnicodeDecodeError, csv.Error) as error:
        sys.exit(f"{path}: {error}")
    if len(numbers) * sum(size for size, _, _ in numbers) >= MOST:
        sys.exit(f"{path}: the sizes times the number of buffers must be less than 2^61")
    sizes, lower, upper = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
    return sizes, lower, upper


def rows_of(path: Path, lines: TextIO) -> Iterator[list[int]]:
    """Size, lower and upper of every row."""
    rows = csv.reader(lines)
    heads = [name.strip() for name in next(rows, [])]
    check_heads(path, heads)
    for cells in filter(None, rows):
        line = f"{path}, line {rows.line_num}"
        if cells[0].lstrip().startswith("#"):
            sys.exit(f"{line}: comments are no rows; leave them out")
        if len(cells) != len(heads):
            sys.exit(f"{line}: {len(cells)} cells, but line 1 names {len(heads)} columns")
        row = dict(zip(heads, cells, strict=True))
        for name, nothing in OTHERS.items():
            if row.get(name, "").strip() not in nothing:
                sys.exit(f"{line}: no placement here heeds {name}, which is {row[name]!r}")
        try:
            size, lower, upper = (int(row[name]) for name in COLUMNS)
        except ValueError as error:
            sys.exit(f"{line}: {error}")
        if size <= 0 or not -MOST < lower < upper < MOST:
            sys.exit(
                f"{line}: every size must be positive, and every lower less than its upper, both "
                "within 2^61"
            )
        yield [size, lower, upper]


def check_heads(path: Path, heads: list[str]) -> None:
    """Exit unless these name each column that is read, and none twice."""
    if heads and heads[0].startswith("#"):
        sys.exit(f"{path}, line 1: comments name no columns; leave them out")
    missing = [name for name in COLUMNS if name not in heads]
    if missing:
        sys.exit(f"{path}: no column {', '.join(missing)}; the first line names the columns")
    doubled = sorted({name for name in heads if heads.count(name) > 1})
    if doubled:
        sys.exit(f"{path}, line 1: two columns are named {doubled[0]!r}")


def overlapping(sizes: Array, lower: Array, upper: Array, offsets: Array) -> tuple[int, int] | None:
    """Two buffers that are alive together and overlap, if there are any.

    The buffers are visited as their lives begin. Those alive are kept sorted by offset: as long
    as none overlap, a new one can overlap only the next below and the next above.
    """
    alive: list[tuple[int, int]] = []  # offset and buffer
    deaths = iter(np.argsort(upper, kind="stable").tolist())
    next_death = next(deaths, None)
    for buffer in np.argsort(lower, kind="stable").tolist():
        while next_death is not None and upper[next_death] <= lower[buffer]:
            del alive[bisect_left(alive, (int(offsets[next_death]), next_death))]
            next_death = next(deaths, None)
        begin = int(offsets[buffer])
        place = bisect_left(alive, (begin, buffer))
        if place > 0 and alive[place - 1][0] + sizes[alive[place - 1][1]] > begin:
            return alive[place - 1][1], buffer
        if place < len(alive) and begin + sizes[buffer] > alive[place][0]:
            return buffer, alive[place][1]
        alive.insert(place, (begin, buffer))
    return None


def check(arrays: tuple[Array, Array, Array], placement: Placement) -> None:
    """Exit unless the placement is one, within its bytes."""
    sizes, lower, upper = arrays
    if (placement.offsets < 0).any() or (placement.offsets + sizes > placement.nbytes).any():
        sys.exit(f"A buffer lies outside of [0, {placement.nbytes})")
    if pair := overlapping(sizes, lower, upper, placement.offsets):
        sys.exit(f"Buffers {pair} overlap")


def proof(placement: Placement, capacity: int | None) -> str:
    """The cell of what is proved."""
    nbytes, bound_nbytes = placement.nbytes, placement.bound_nbytes
    if capacity is not None and nbytes <= capacity:
        return "yes: fits"
    if capacity is not None and bound_nbytes > capacity:
        return "yes: too small"
    return "yes: least" if nbytes == bound_nbytes else f"no: {bound_nbytes}"


def row(path: Path, arrays: tuple[Array, Array, Array], nnodes: int) -> list[str]:
    """The cells of a file."""
    sizes, lower, upper = arrays
    match = re.fullmatch(r".*\.(\d+)\.csv", path.name)
    capacity = int(match[1]) if match else None
    begin = time.process_time()
    buffers = Buffers.from_lifetimes(sizes, lower, upper)
    placement = place(buffers, capacity_nbytes=capacity, nnodes=nnodes)
    seconds = time.process_time() - begin
    check(arrays, placement)
    peak = buffers.peak_nbytes
    ratio = placement.nbytes / (capacity or peak or 1)
    cells = [path.name.removesuffix(".csv"), str(len(sizes)), str(peak), str(placement.nbytes)]
    return [*cells, f"{ratio:.4f}", proof(placement, capacity), f"{seconds:.2f}"]


def compile_all() -> None:
    """Run all that is compiled, once."""
    ones = np.ones(3, dtype=np.int64)
    buffers = Buffers.from_lifetimes(ones, np.arange(3), np.arange(3) + 2)
    place(buffers, nnodes=0)
    lowest_first(ones, buffers.first, buffers.last, np.arange(3), 1 << 60)
    solve(buffers, 2)


def main() -> None:
    """Print a row for every file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.csv")
    parser.add_argument(
        *("--placements", "-n"), type=int, default=2_000_000, help="of the search, for a size"
    )
    options = parser.parse_args()
    instances = [(path, read(path)) for path in options.files]
    compile_all()
    print("|", " | ".join(HEADS), "|")
    print("|", " | ".join("---" for _ in HEADS), "|")
    for path, arrays in instances:
        print("|", " | ".join(row(path, arrays, options.placements)), "|", flush=True)


if __name__ == "__main__":
    main()
