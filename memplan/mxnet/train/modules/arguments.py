"""What a Module takes without a name, where one of memplan's options may stand by mistake."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from memplan.errors import ArgumentError
from memplan.util.numbers import plain, shown


def check_by_place(arguments: Collection[str] = (), **given: Any) -> None:
    """ArgumentError for text and numbers, such as a budget, where a Module takes neither.

    MXNet would train by such a logger, without the budget, until it is to write something. It takes
    text for names of one letter each, where these are ``arguments`` of the network.
    """
    for name, value in given.items():
        is_names = isinstance(value, str) and set(value) <= set(arguments)
        is_other = isinstance(value, str) or isinstance(plain(value), int | float)
        if is_other and not is_names and not hasattr(value, "info"):
            kind = "a logger" if name == "logger" else "a list of names"
            raise ArgumentError(
                f"{name} cannot be {shown(value)}: MXNet takes {kind} there; if that is an option "
                f"of memplan's, give it by its name, as budget='60%'"
            )
