"""What a loss begins with: the numbers by which autograd knows what is marked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import mxnet as mx
from mxnet import autograd

NDArray = Any


class ReadByLoss:
    """What the graph of a loss begins with, by autograd's names: numbers of what is marked."""

    def __init__(self, heads: Iterable[NDArray]) -> None:
        self._heads = list(heads)
        names = list(map(_inputs, self._heads))
        #: Has every head a graph? MXNet refuses those that have none.
        self.is_complete = all(names)
        self.names = frozenset(name for names_of_head in names for name in names_of_head)
        self.variables = [int(name[3:]) for name in self.names if name.startswith("var")]

    def times(self) -> Counter[int]:
        """How often operators of the loss read each of the variables."""
        try:
            symbol = mx.sym.Group(list(map(autograd.get_symbol, self._heads)))
            nodes = json.loads(symbol.tojson())["nodes"]
        except (mx.MXNetError, AssertionError):  # MXNet cannot write every operator
            return Counter()
        names = [nodes[entry[0]]["name"] for node in nodes for entry in node["inputs"]]
        return Counter(int(name[3:]) for name in names if name in self.names and name[:3] == "var")


def _inputs(head: NDArray) -> list[str]:
    try:
        names: list[str] = autograd.get_symbol(head).list_inputs()
    except (mx.MXNetError, AssertionError):  # MXNet says itself what is wrong with it
        return []
    return names


def is_read(array: NDArray, read: ReadByLoss) -> bool:
    """Is the array, one that a recorded operator may have read or not, what a loss begins with?"""
    try:
        return autograd.get_symbol(array).name in read.names
    except mx.MXNetError:  # autograd does not know it
        return False


def number_of(array: NDArray) -> int:
    """By which autograd knows an array that is marked."""
    return int(autograd.get_symbol(array).name[3:])
