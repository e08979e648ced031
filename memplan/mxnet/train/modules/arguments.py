"""What a Module takes without a name, where one of memplan's options may stand by mistake."""

from __future__ import annotations

from typing import Any

from memplan.errors import ArgumentError
from memplan.util.numbers import plain, shown


def check_by_place(**given: Any) -> None:
    """ArgumentError for text and numbers, such as a budget, where a Module takes neither.

    MXNet would train by such a logger, without the budget, until it is to write something. Text of
    one letter is a name for it, where it wants several.
    """
    for name, value in given.items():
        is_text = isinstance(value, str) and len(value) > 1
        if is_text or isinstance(plain(value), int | float):
            raise ArgumentError(
                f"{name} cannot be {shown(value)}; if that is an option of memplan's, give it by "
                f"its name, as budget='60%'"
            )
