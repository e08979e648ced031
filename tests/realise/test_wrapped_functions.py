"""Functions of modules that are wrapped under every name that others have bound."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memplan.mxnet.realise.wrapped_functions import copy_of, wrap

MODULE = "a_library"


@pytest.fixture
def library() -> Iterator[Any]:
    """A module with a function ``scaled``."""
    module = types.ModuleType(MODULE)
    code = (
        "FACTOR = 2\n"
        "def scaled(number, factor=None, *, shift=0):\n"
        "    'A number, scaled.'\n"
        "    return number * (factor or FACTOR) + shift\n"
    )
    exec(code, vars(module))
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def noting(calls: list[Any]) -> Callable[[Any], Any]:
    """What makes a wrapper that notes what it is called with."""

    def wrapper_of(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            calls.append((args, options))
            return function(*args, **options)

        return wrapper

    return wrapper_of


def test_a_name_that_was_bound_before_calls_the_wrapper(library: Any) -> None:
    scaled, calls = library.scaled, []
    wrap(library, "scaled", noting(calls))
    assert [scaled(3), scaled(3, 4), scaled(number=3, shift=5)] == [6, 12, 11]
    assert calls == [((3,), {}), ((3, 4), {}), ((), {"number": 3, "shift": 5})]
    with pytest.raises(TypeError, match="number"):
        scaled()


def test_it_is_the_same_function_for_others(library: Any) -> None:
    scaled, signature = library.scaled, inspect.signature(library.scaled)
    wrap(library, "scaled", noting([]))
    assert library.scaled is scaled
    assert pickle.loads(pickle.dumps(scaled)) is copy.deepcopy(scaled) is scaled
    assert inspect.signature(scaled) == signature
    assert (scaled.__name__, scaled.__module__, scaled.__doc__) == (
        "scaled",
        MODULE,
        "A number, scaled.",
    )


def test_its_source_is_still_found() -> None:
    source = inspect.getsource(wrapped_here)
    wrap(sys.modules[__name__], "wrapped_here", noting([]))
    assert inspect.getsource(wrapped_here) == source


def wrapped_here() -> None:
    """What is to be found."""


def test_a_copy_from_before_calls_no_wrapper(library: Any) -> None:
    own, calls = copy_of(library.scaled), []
    wrap(library, "scaled", noting(calls))
    assert (own(3), own(3, shift=1), calls) == (6, 7, [])
    assert inspect.signature(own) == inspect.signature(library.scaled)


def test_several_wrappers_are_all_called(library: Any) -> None:
    scaled, first, second = library.scaled, [], []
    wrap(library, "scaled", noting(first))
    wrap(library, "scaled", noting(second))
    assert (scaled(3), first, second) == (6, [((3,), {})], [((3,), {})])


@pytest.mark.parametrize("is_before", [True, False])
def test_what_another_library_put_in_its_place_stays(library: Any, is_before: bool) -> None:
    scaled, theirs, ours = library.scaled, [], []
    if is_before:
        library.scaled = noting(theirs)(scaled)
    wrap(library, "scaled", noting(ours))
    if not is_before:
        library.scaled = noting(theirs)(scaled)
    assert (library.scaled(3), theirs, ours) == (6, [((3,), {})], [((3,), {})])
    # What was put there before may do all of it without MXNet's function.
    assert (scaled(3), len(theirs), len(ours)) == (6, 1, 1 if is_before else 2)


def test_what_is_no_function_is_replaced(library: Any) -> None:
    scaled, calls = library.scaled, []
    library.scaled = functools.partial(scaled, factor=5)
    wrap(library, "scaled", noting(calls))
    assert (library.scaled(3), calls) == (15, [((3,), {})])
