"""Properties whose examples take several branches: none of these may be empty."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import settings


def taking(**least: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A property counts in its first argument, ``taken``, which branch an example takes.

    After all examples each branch must have been taken ``least`` times, as named here, unless
    examples are random: then it is a matter of luck. Stands above ``@given``.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(check)
        others = [p for name, p in signature.parameters.items() if name != "taken"]

        def test(**arguments: Any) -> None:
            taken: Counter[str] = Counter()
            check(taken=taken, **arguments)
            if not settings().derandomize:
                return
            rare = {name: taken[name] for name, count in least.items() if taken[name] < count}
            assert not rare, f"hardly an example took these branches: {rare} of {least}"

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return test

    return decorate
