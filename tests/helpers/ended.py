"""Has another process ended, whoever has to ask how?"""

from __future__ import annotations

from pathlib import Path


def has_ended(pid: int) -> bool:
    """What nobody waits for stays as a zombie where the first process of a container waits for
    none.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
