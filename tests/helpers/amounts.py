"""How much of a test ``make test`` runs; ``make test-all`` runs the whole of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(count: int, **options: Any) -> settings:
    """``count`` examples in make test-all, in make test the share of them that its profile has."""
    share = settings().max_examples / settings.get_profile("random").max_examples
    return settings(max_examples=max(8, round(count * share)), **options)


def long_except(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """``names`` as parameters of a test: those that are not ``quick`` are marked long."""
    quick = set(quick)
    names = list(names)
    assert quick <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]
