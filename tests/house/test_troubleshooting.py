"""The texts by which the page on troubleshooting is searched are those of memplan's messages."""

from __future__ import annotations

import ast
import re

from helpers.paths import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"

# Texts of MXNet, of the loader and of Python, which no source of memplan has.
FOREIGN = {
    "cudaMalloc retry failed: out of memory",
    "libgomp.so.1",
    "libquadmath.so.0",
    "libcuda.so.1",
    "libcudnn…",
    "libcublas…",
    "No module named 'distutils'",
    "no kernel image is available",
    "kOut] == kWriteTo",
    "_Map_base::at",
    "could not create a primitive descriptor for a reorder primitive",
    "There are no inputs in computation graph that require gradients",
    "autograd",
}

# What memplan puts into its messages and the page spells out.
INSERTED = {
    "a shape was": "a … was",
    "MXNet 1.9.1": "MXNet …",
    "no plan fits": "no … fits",
    "no plan that keeps the order of the ops in every stage fits": "no … fits",
}


def _messages() -> str:
    """Every string in the sources of memplan, with a "…" where a value is put in."""
    texts = []
    for path in (ROOT / "memplan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def _as_in_the_source(text: str) -> str:
    for said, written in INSERTED.items():
        text = text.replace(said, written)
    return text


def test_every_text_is_one_that_memplan_says() -> None:
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    texts = {text for row in rows for text in re.findall(r"`([^`]+)`", row)} - FOREIGN
    messages = _messages()
    assert len(texts) > 20
    pieces = {piece.strip() for text in texts for piece in _as_in_the_source(text).split("…")}
    assert not {piece for piece in pieces if piece not in messages}
