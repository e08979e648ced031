"""The attributes of a node, which MXNet keeps as text, as numbers and tuples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import is_true

# How Python 2 ended the numbers of a shape, which MXNet reads.
_LONG = re.compile(r"(?<=[0-9])L")


@lru_cache(maxsize=4096)
def _literal(text: str) -> Any:
    """The value that ``text`` is in Python.

    Reading one leaves a circle of objects behind, as many as the text has parts, which stay while
    a network is traced without Python's collector. Few texts stand at all nodes of a network.
    """
    return ast.literal_eval(text)


class Attributes:
    """Those of one node, by their names."""

    def __init__(self, node: Node) -> None:
        self._attrs = node.attrs

    def text(self, name: str) -> str:
        return str(self._attrs[name])

    def get(self, name: str, default: Any = None) -> Any:
        """A number, a tuple, a bool or None. Python 2 wrote "(3L, 3L)", and others "true"."""
        text = self._attrs.get(name)
        if text is None:
            return default
        if text.lower() in ("true", "false"):
            return is_true(text)
        value = _literal(_LONG.sub("", text))
        return list(value) if isinstance(value, list) else value

    def numbers(self, name: str, *default: float) -> list[Any]:
        """The numbers of a tuple; MXNet takes a single number for a tuple of one, too."""
        value = self.get(name, default)
        return list(value) if isinstance(value, list | tuple) else [value]

    def windows(self, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """For every dimension in which a kernel slides: its width, stride and dilation."""
        sides = (self.each(name, sizes, 1) for name in ("kernel", "stride", "dilate"))
        return zip(*sides, strict=True)

    def spread(self, sizes: Sequence[int]) -> list[int]:
        """The dimensions of a deconvolution of pictures of these ``sizes``, without a padding."""
        windows = zip(sizes, self.windows(sizes), strict=True)
        return [stride * (size - 1) + dilate * (k - 1) + 1 for size, (k, stride, dilate) in windows]

    def each(self, name: str, like: Sequence[int], default: int) -> list[int]:
        """One number for every dimension in ``like``."""
        value = self.get(name) or (default,) * len(like)
        return list(value) if isinstance(value, list | tuple) else [value] * len(like)
