"""What hybridized blocks get and return: lists, whatever tuples a script has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mxnet as mx

from memplan.mxnet.trace.nnvm import output_of
from memplan.mxnet.train.arrays.nesting import of_semantics

Block = Any

#: Calls its second argument with those behind, and returns what that does: MXNet has a graph of the
#: block, the first, for it.
OfGraph = Callable[..., Any]


@contextmanager
def as_graph(
    block: Block, running: list[Any], of_graph: OfGraph, is_here: Callable[[], bool]
) -> Iterator[None]:
    """Within, the ``hybrid_forward`` of ``block`` is that of a graph: with lists for tuples.

    MXNet calls graphs with arrays one by one, and makes lists of what these return. While it runs
    it is in ``running``: within its graph others have none, and nothing is made a list of.
    Another thread may have MXNet make a graph of the block: ``is_here`` says so.
    """
    own = {n: f for n, f in vars(block).items() if n == "hybrid_forward"}
    usual = block.hybrid_forward
    block.__dict__["hybrid_forward"] = _AsGraph(usual, running, partial(of_graph, block), is_here)
    try:
        yield
    finally:
        block.__dict__.pop("hybrid_forward", None)
        block.__dict__.update(own)


@dataclass(frozen=True)
class _AsGraph:
    """A ``hybrid_forward`` of which MXNet has a graph, unless one of the ``running`` ones calls it.

    It is no function, so that it is not taken for one that a script gave the block.
    """

    hybrid_forward: Callable[..., Any]
    running: list[Any]
    of_graph: OfGraph
    is_here: Callable[[], bool]

    def __call__(self, module: Any, /, *inputs: Any, **params: Any) -> Any:
        if self.running or not self.is_here():
            return self.hybrid_forward(module, *inputs, **params)
        compute = partial(self.hybrid_forward, module)
        self.running.append(self)
        try:
            return _in_lists(self.of_graph(compute, *map(_in_lists, inputs), **params))
        finally:
            self.running.pop()


def _in_lists(value: Any) -> Any:
    """``value`` with lists for tuples, and for an operator that has several outputs."""
    if isinstance(value, list | tuple):
        return [_in_lists(item) for item in value]
    count = len(value.list_outputs()) if isinstance(value, mx.sym.Symbol) else 1
    return value if count == 1 else [of_semantics(output_of(value, k)) for k in range(count)]
