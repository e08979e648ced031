"""Every operator that memplan names is one of MXNet's: of a name misspelt nobody would hear."""

from __future__ import annotations

import ast
import ctypes
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mxnet.base import _LIB, check_call

from helpers.paths import ROOT

# A whole name that only an operator can have. The beginnings of names end with "_".
_OF_OPERATOR = re.compile(r"_(backward|contrib|linalg|np|npi|npx)_\w*[^\W_]")

FILES = sorted((ROOT / "memplan" / "mxnet").rglob("*.py"))


@cache
def operators() -> frozenset[str]:
    """The names of all operators of MXNet, backward ones among them."""
    count, names = ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(count), ctypes.byref(names)))
    return frozenset(names[place].decode() for place in range(count.value))


def missing(source: str) -> Iterator[str]:
    """The names in ``source`` of operators that MXNet does not have.

    They stand in tables, of which most words are operators, or have a name like one.
    """
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        words = node.value.split()
        unknown = [word for word in words if word not in operators()]
        is_table = all(word.isidentifier() for word in words) and 2 * len(unknown) < len(words)
        yield from (word for word in unknown if is_table or _OF_OPERATOR.fullmatch(word))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_operator_exists(path: Path) -> None:
    assert not [*missing(path.read_text(encoding="utf-8"))]


def test_names_that_do_not_exist_are_seen() -> None:
    assert [*missing('"dot batch_dot dott".split()')] == ["dott"]
    assert [*missing('op == "_npi_dot"')] == ["_npi_dot"]
    assert not [*missing('"_backward_dot"; name.removeprefix("_backward_"); "the data"')]
