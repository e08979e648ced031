"""What hybridized blocks get and return: lists, whatever tuples a script has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mxnet as mx

from memplan.mxnet.trace.nnvm import output_of
from memplan.mxnet.train.arrays.nesting import of_semantics
from memplan.mxnet.train.blocks.composing_thread import same_thread

Block = Any

#: Calls its second argument with those behind, and returns what that does: MXNet has a graph of the
#: block, the first, for it.
OfGraph = Callable[..., Any]


@dataclass(frozen=True)
class GraphCalls:
    """Which calls of hybridized blocks are calls of graphs, while a thread composes a network.

    They are given to ``of_graph``, and are ``running`` until they return. Within one no other block
    has a graph: MXNet writes its ops into that which runs.
    """

    of_graph: OfGraph
    running: list[Any] = field(default_factory=list)
    _is_here: Callable[[], bool] = field(default_factory=same_thread)

    def are_next(self) -> bool:
        """Is a call of a hybridized block, now, one of a graph of its own?

        That of another thread is not, which may have MXNet make a graph of the block.
        """
        return not self.running and self._is_here()


@contextmanager
def as_graph(block: Block, calls: GraphCalls) -> Iterator[None]:
    """Within, the ``hybrid_forward`` of ``block`` is that of a graph: with lists for tuples.

    MXNet calls graphs with arrays one by one, and makes lists of what these return.
    """
    own = {n: f for n, f in vars(block).items() if n == "hybrid_forward"}
    block.__dict__["hybrid_forward"] = _AsGraph(block, block.hybrid_forward, calls)
    try:
        yield
    finally:
        block.__dict__.pop("hybrid_forward", None)
        block.__dict__.update(own)


@dataclass(frozen=True)
class _AsGraph:
    """A ``hybrid_forward`` of which MXNet has a graph, unless it is called within one.

    It is no function, so that it is not taken for one that a script gave the block.
    """

    block: Block
    hybrid_forward: Callable[..., Any]
    calls: GraphCalls

    def __call__(self, module: Any, /, *inputs: Any, **params: Any) -> Any:
        if not self.calls.are_next():
            return self.hybrid_forward(module, *inputs, **params)
        compute = partial(self.hybrid_forward, module)
        self.calls.running.append(self)
        try:
            lists = map(_in_lists, inputs)
            return _in_lists(self.calls.of_graph(self.block, compute, *lists, **params))
        finally:
            self.calls.running.pop()


def _in_lists(value: Any) -> Any:
    """``value`` with lists for tuples, and for an operator that has several outputs."""
    if isinstance(value, list | tuple):
        return [_in_lists(item) for item in value]
    count = len(value.list_outputs()) if isinstance(value, mx.sym.Symbol) else 1
    return value if count == 1 else [of_semantics(output_of(value, k)) for k in range(count)]
