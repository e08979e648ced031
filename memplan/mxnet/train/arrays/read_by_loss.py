"""What a loss begins with: the numbers by which autograd knows what is marked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        #: In the order in which MXNet comes to them.
        self.names = dict.fromkeys(name for names_of_head in names for name in names_of_head)
        self._variables = {n: int(n[3:]) for n in self.names if n.startswith("var")}
        self.variables = list(self._variables.values())

    def order(self) -> list[int]:
        """What its operators read, in their order: of variables the places in ``variables``.

        Other inputs are -1. MXNet says it in less time than :meth:`readers` takes.
        """
        if not self.is_complete:
            return []
        symbol = mx.sym.Group(list(map(autograd.get_symbol, self._heads)))
        read = symbol.get_internals().get_children()
        places = {f"var{number}": place for place, number in enumerate(self.variables)}
        return [] if read is None else [places.get(name, -1) for name in read.list_outputs()]

    def readers(self) -> Readers:
        """Which operators of the loss read the variables."""
        try:
            symbol = mx.sym.Group(list(map(autograd.get_symbol, self._heads)))
            nodes = json.loads(symbol.tojson())["nodes"]
        except (mx.MXNetError, AssertionError):  # MXNet cannot write every operator
            return Readers({}, {})
        names = {place: node["name"] for place, node in enumerate(nodes)}
        numbers = {place: int(n[3:]) for place, n in names.items() if n in self._variables}
        by: dict[int, list[int]] = {}
        for place, node in enumerate(nodes):
            for source, *_ in node["inputs"]:
                if source in numbers:
                    by.setdefault(numbers[source], []).append(place)
        return Readers({number: place for place, number in numbers.items()}, by)


@dataclass(frozen=True)
class Readers:
    """The operators of a loss, in MXNet's order: where variables stand, and those that read them.

    By autograd's numbers of the variables.
    """

    place: Mapping[int, int]
    by: Mapping[int, Sequence[int]]

    def places_of(self, number: int) -> Sequence[int]:
        """The places of the operators that read a variable, as often as they do."""
        return self.by.get(number, ())


def _inputs(head: NDArray) -> list[str]:
    try:
        names: list[str] = autograd.get_symbol(head).list_inputs()
    except (mx.MXNetError, AssertionError):  # MXNet says itself what is wrong with it
        return []
    return names


def is_read(array: NDArray, read: ReadByLoss) -> bool:
    """Is the array, one that a recorded operator may have read or not, what a loss begins with?"""
    return name_of(array) in read.names


def name_of(array: NDArray) -> str | None:
    """By which autograd knows an array, whatever handle this is; None if it does not."""
    try:
        return str(autograd.get_symbol(array).name)
    except (mx.MXNetError, AssertionError):
        return None


def number_of(array: NDArray) -> int:
    """By which autograd knows an array that is marked."""
    return int(autograd.get_symbol(array).name[3:])
