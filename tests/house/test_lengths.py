"""What one can still see at a glance: files and functions of a length that fits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.paths import ROOT

FOLDERS = ("memplan", "tests", "benchmarks", "examples")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

# Split, it would be compiled to slower code.
LONG = {"memplan/search/kernels/replay.py: replay"}


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What is in ``node`` but for expressions, which have no function of several lines in them."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


def _functions() -> Iterator[tuple[str, int]]:
    """Every function, and the lines of its body without its docstring."""
    for path in SOURCES:
        for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0
                yield f"{path.relative_to(ROOT)}: {node.name}", lines


def test_no_file_is_over_400_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert len(lengths) > 300
    assert not [path for path, lines in lengths.items() if lines > 400]


def test_no_function_is_over_a_screen() -> None:
    assert {name for name, lines in _functions() if lines > 50} == LONG
