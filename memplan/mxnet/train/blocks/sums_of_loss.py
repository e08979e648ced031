"""Where MXNet adds up gradients in another order than a step whose loss the caller computes.

Parameters and outputs of a planned block may be read by the block and, past it, by the loss. MXNet
adds all gradients of such an array in one sum. In a planned step autograd has added up those of the
loss before the block's come. So the last bits may differ, which :func:`differ` knows: it follows
the order in which MXNet adds (the kernel Sum of src/operator/tensor/elemwise_sum.h, tag 1.9.1).
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.train.arrays.read_by_loss import Readers
from memplan.mxnet.train.blocks.calls import is_run_whole
from memplan.mxnet.train.blocks.hybridized import is_one_graph

Term = Any

# MXNet adds up gradients of one array from left to right where they are more than this many.
_NOT_IN_ORDER = 4


@dataclass(frozen=True)
class Reads:
    """How many inputs of operators of a block its parameters are, by name, and its outputs."""

    parameters: Mapping[str, int]
    outputs: Sequence[int]
    noperators: int

    @classmethod
    def of(cls, symbol: mx.sym.Symbol) -> Reads:
        graph = symbol_json.parse(symbol)
        nodes = graph["nodes"]
        times = Counter((source, k) for node in nodes for source, k, *_ in node["inputs"])
        variables = [place for place, node in enumerate(nodes) if node["op"] == VARIABLE]
        return cls(
            {nodes[place]["name"]: times[place, 0] for place in variables},
            [times[source, k] for source, k, *_ in graph["heads"]],
            len(nodes) - len(variables),
        )


def adds_as_graph(block: Any, reads: Reads) -> bool:
    """Does MXNet run ``block`` as one operator, whose gradients it adds up apart from others?"""
    return is_one_graph(block) and is_run_whole(block, reads.noperators)


@dataclass(frozen=True)
class Item:
    """A parameter or an output that the block reads so many times, and autograd's number of it."""

    name: str
    number: int
    nwithin: int
    is_parameter: bool


def warn_of_sums(
    items: Sequence[Item],
    outputs: Sequence[int],
    loss: Readers,
    *,
    as_graph: bool,
    added: Sequence[str],
) -> set[bool]:
    """Warn of ``items`` whose gradients MXNet adds up in another order; ``is_parameter`` of these.

    ``outputs`` are the numbers of the block's outputs that a ``loss`` may read; the names in
    ``added`` are of parameters to whose gradients it adds.
    """
    other = [item for item in items if differ(item, outputs, loss, as_graph=as_graph)]
    names = [*added, *(item.name for item in other)]
    if not names:
        return set()
    hybrid = [*added, *(i.name for i in items if differ(i, outputs, loss, as_graph=True))]
    advice = "Move what reads it into the block to have them equal"
    if not set(names) & set(hybrid):
        advice = (
            "Call hybridize(inline_limit=0) to have them equal, with which MXNet does so, too, if "
            "the block has a hybrid_forward and no forward of its own"
        )
    warnings.warn(
        f"the loss reads {', '.join(names[:3])}{' and others' if names[3:] else ''} past a planned "
        f"block that reads it, too, and gradients that come from there are added up before that of "
        f"the block is, where MXNet adds all of them together: the last bits may differ. {advice}",
        stacklevel=2,
    )
    return {item.is_parameter for item in other} | ({True} if added else set())


def differ(item: Item, outputs: Sequence[int], loss: Readers, *, as_graph: bool) -> bool:
    """Does MXNet add up the gradients of ``item`` in another order than a planned step does?

    It may, where operators that read ``item`` stand before and behind the block in the loss.
    """
    places = loss.places_of(item.number)
    others = [loss.place[n] for n in outputs if n in loss.place and n != item.number]
    if not places or not others or not item.nwithin or (as_graph and not item.is_parameter):
        return False
    orders = []
    if max(places) > min(others):
        orders.append(True)  # MXNet goes backward: what stands behind the block comes first
    if min(places) < max(others):
        orders.append(False)
    past = [("past", i) for i in range(len(places))]
    within = [("within", i) for i in range(item.nwithin)]
    planned = _sum([_sum(past), *([_sum(within)] if item.is_parameter else within)])
    terms = [_sum(within)] if as_graph else within
    return any(_sum(past + terms if first else terms + past) != planned for first in orders)


def _sum(terms: Sequence[Term]) -> Term:
    """Which sums of two MXNet forms of these ``terms``."""
    ordered = terms if len(terms) > _NOT_IN_ORDER else terms[::-1]
    return functools.reduce(lambda total, term: frozenset((total, term)), ordered)
