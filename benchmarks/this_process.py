"""What the process of a benchmark takes, by the Linux kernel."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def processor_seconds(process: int | str = "self") -> float:
    """Of a process and of all that it has started, those that have ended and those that run.

    ``time.process_time`` leaves out the child that plans, and the process that it starts to prove
    a bound.
    """
    folder = Path("/proc") / str(process)
    # The name of the program stands in brackets before the state, and may have blanks.
    fields = (folder / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
    total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    for path in folder.glob("task/*/children"):
        for child in path.read_text(encoding="ascii").split():
            # A child that ends between the two looks is missed here. Its parent was read before its
            # children, for otherwise such a child would count twice.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += processor_seconds(child)
    return total


def memory_nbytes(field: str) -> int:
    """Bytes of this process: VmRSS now in memory, VmHWM at most."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{field}:")[1].split()[0]) * 1024
