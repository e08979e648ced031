"""Errors go to other processes, and come back whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from memplan import errors
from memplan.errors import BudgetError, MemplanError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MemplanError)
]


def an_error(kind: type[MemplanError]) -> MemplanError:
    if kind is BudgetError:
        return BudgetError("what is wrong", proved=True, lowest_nbytes=7)
    return kind("what is wrong")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_is_made_again_with_all_that_it_has(
    again: Callable[[MemplanError], MemplanError], kind: type[MemplanError]
) -> None:
    """One that cannot be ends a process pool, or leaves its caller waiting."""
    error = an_error(kind)
    error.note = ["added by whoever caught it"]  # type: ignore[attr-defined]
    copied = again(error)
    assert type(copied) is kind
    assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))
    assert copied.args == ("what is wrong",)


def test_a_refused_budget_keeps_what_it_says() -> None:
    error = pickle.loads(pickle.dumps(an_error(BudgetError)))
    assert (error.proved, error.lowest_nbytes) == (True, 7)
