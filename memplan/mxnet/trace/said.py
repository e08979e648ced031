"""What MXNet says in its errors."""

from __future__ import annotations

import re

# When, and in which line of its source, MXNet has found what it then says.
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")


def said(error: Exception) -> str:
    """What MXNet says in ``error``, without its stack, the time and the place in its source."""
    line = str(error).strip().rpartition("\n")[2]
    return _PLACE.sub("", line.removeprefix("MXNetError: "))
