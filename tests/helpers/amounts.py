"""How much of a test ``make test`` runs; ``make test-all`` runs the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def is_whole() -> bool:
    """Is this make test-all?"""
    return settings().max_examples == settings.get_profile("random").max_examples


def examples(count: int, quick: int | None = None, **options: Any) -> settings:
    """``count`` examples in make test-all, in make test ``quick``, or the share of its profile."""
    share = settings().max_examples / settings.get_profile("random").max_examples
    if quick is None or is_whole():
        quick = max(8, round(count * share))
    return settings(max_examples=quick, **options)


def long_except(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """``names`` as parameters of a test: those that are not ``quick`` are marked long."""
    quick, names = set(quick), list(names)
    assert quick <= set(names)
    return long_unless(names, lambda name: name in quick)


def long_unless(cases: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """``cases`` as parameters of a test, a tuple where it has several; the others are long."""
    return [
        case
        if is_quick(case)
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.long)
        for case in cases
    ]
