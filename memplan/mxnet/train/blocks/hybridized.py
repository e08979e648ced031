"""Which blocks MXNet runs as graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mxnet as mx


def is_graph(block: Any) -> bool:
    """Does MXNet run the block as a graph? It does if it is hybridized, or a SymbolBlock."""
    return getattr(block, "_active", False) or isinstance(block, mx.gluon.SymbolBlock)


def is_one_graph(block: Any) -> bool:
    """Is all that the block computes in its graph? A ``forward`` of the script's runs in Python."""
    return is_graph(block) and not _has_own_forward(block)


def _has_own_forward(block: Any, *others: Any) -> bool:
    kind = getattr(block, "_memplan_unplanned", type(block))
    forwards = mx.gluon.HybridBlock.forward, mx.gluon.SymbolBlock.forward, *others
    return kind.forward not in forwards or "forward" in vars(block)


def call_hybridize(block: Any, options: str = "") -> str:
    """What a message says for a script to have MXNet run all of ``block`` as a graph."""
    is_own = _has_own_forward(block, mx.gluon.rnn.RecurrentCell.forward)  # which is MXNet's, too
    first = "make its forward a hybrid_forward, and " if is_own else ""
    return f"{first}call hybridize({options})"


def hybridized(blocks: Iterable[Any]) -> Iterator[Any]:
    """The blocks that run as graphs, but for those within others, which are parts of these."""
    for block in blocks:
        if is_graph(block):
            yield block
        else:
            yield from hybridized(block._children.values())


def with_children(blocks: Iterable[Any]) -> Iterator[Any]:
    """These blocks and all within them."""
    for block in blocks:
        yield block
        yield from with_children(block._children.values())
