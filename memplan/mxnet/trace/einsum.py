"""How many operations an einsum makes (np.einsum), by its subscripts and shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from memplan.mxnet.trace.nnvm import Node

# What names an axis: a letter, or, of those that "..." stands for, a number from the last one, -1.
Label = str | int


def is_optimized(call: Node) -> bool:
    """Does MXNet compute an einsum of several arrays as products of two after another?"""
    return call.attrs.get("optimize", "0").lower() not in ("0", "false")


def operations(call: Node) -> int:
    """Multiplications and additions of an einsum whose shapes are known."""
    subscripts = call.attrs["subscripts"].replace(" ", "")
    shapes = [info.shape for info in call.infos.inputs if info is not None]
    read, arrow, written = subscripts.partition("->")
    terms = [_labels(part, len(shape)) for part, shape in zip(read.split(","), shapes, strict=True)]
    size_of: dict[Label, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            size_of[label] = max(size, size_of.get(label, 0))
    if 0 in size_of.values():
        return 0
    if arrow:
        left: set[Label] = {*written.replace(".", ""), *filter(_is_of_dots, size_of)}
    else:
        times = Counter(label for term in terms for label in term)
        left = {label for label in times if times[label] == 1 or _is_of_dots(label)}
    remaining, result = [{*term} for term in terms], 0
    for places in _order(call, subscripts, shapes):
        taken = [remaining.pop(place) for place in sorted(places, reverse=True)]
        labels = set[Label]().union(*taken)
        result += len(taken) * math.prod(size_of[label] for label in labels)
        remaining.append(labels & left.union(*remaining))
    return result


def _labels(part: str, ndim: int) -> list[Label]:
    """The labels of the axes of an array of ``ndim`` dimensions whose subscripts are ``part``."""
    before, _, behind = part.partition("...")
    return [*before, *range(len(before) + len(behind) - ndim, 0), *behind]


def _is_of_dots(label: Label) -> bool:
    return isinstance(label, int)


def _order(call: Node, subscripts: str, shapes: Sequence[Sequence[int]]) -> Iterable[Sequence[int]]:
    """The places of the arrays of which products are made, one after another.

    What one leaves stands last then. Without an order all are one product; MXNet's own order is
    NumPy's (numpy/np_einsum_path_op-inl.h).
    """
    if not is_optimized(call):
        return [range(len(shapes))]
    arrays = (np.broadcast_to(np.float32(0), shape) for shape in shapes)
    _, *order = np.einsum_path(subscripts, *arrays, optimize="greedy")[0]
    return order
