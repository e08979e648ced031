"""What hybridized blocks get and return: lists, whatever tuples a script has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mxnet as mx

from memplan.mxnet.trace.nnvm import output_of
from memplan.mxnet.train.block_changes import is_graph, with_children
from memplan.mxnet.train.composing_thread import is_it
from memplan.mxnet.train.nesting import of_semantics

Block = Any


@contextmanager
def with_lists_of_graphs(blocks: Iterable[Block]) -> Iterator[Sequence[object]]:
    """Within, hybridized blocks among ``blocks`` and in them get and return lists with Symbols.

    MXNet calls their graphs with arrays one by one, and makes lists of what these return. Within
    a graph nothing is made a list of: it is within one while there is anything in what is yielded.
    """
    roots = list(dict.fromkeys(filter(is_graph, with_children(blocks))))
    before = [{"hybrid_forward": vars(r)["hybrid_forward"]} if _is_own(r) else {} for r in roots]
    graphs: list[_AsGraph] = []
    is_here = is_it()
    try:
        for root in roots:
            root.__dict__["hybrid_forward"] = _AsGraph(root.hybrid_forward, graphs, is_here)
        yield graphs
    finally:
        for root, own in zip(roots, before, strict=True):
            root.__dict__.pop("hybrid_forward", None)
            root.__dict__.update(own)


def _is_own(block: Block) -> bool:
    """Has the object a ``hybrid_forward`` of its own, as a script gave it?"""
    return "hybrid_forward" in vars(block)


@dataclass(frozen=True)
class _AsGraph:
    """A ``hybrid_forward`` with lists for tuples, unless one of the ``running`` ones calls it.

    Or another thread, which may have MXNet make a graph of the block: ``is_here`` says so.

    It is no function, so that it is not taken for one that a script gave the block.
    """

    hybrid_forward: Callable[..., Any]
    running: list[_AsGraph]
    is_here: Callable[[], bool]

    def __call__(self, module: Any, *inputs: Any, **params: Any) -> Any:
        if self.running or not self.is_here():
            return self.hybrid_forward(module, *inputs, **params)
        self.running.append(self)
        try:
            return _in_lists(self.hybrid_forward(module, *map(_in_lists, inputs), **params))
        finally:
            self.running.pop()


def _in_lists(value: Any) -> Any:
    """``value`` with lists for tuples, and for an operator that has several outputs."""
    if isinstance(value, list | tuple):
        return [_in_lists(item) for item in value]
    count = len(value.list_outputs()) if isinstance(value, mx.sym.Symbol) else 1
    return value if count == 1 else [of_semantics(output_of(value, k)) for k in range(count)]
