"""Whether blocks still compute what they did when they were planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mxnet as mx

from memplan.mxnet.train.read_by import is_mxnets, read_by
from memplan.mxnet.train.settings import are_set, settings

# What MXNet keeps in every block: names, children, and its graph.
_OF_MXNET = frozenset(vars(mx.gluon.HybridBlock(prefix="")))


class BlockChanges:
    """Notices that ``blocks`` and a ``loss`` may compute something else than before.

    MXNet forgets its graph of a hybridized block when hybridize() is called, a layer is added or
    replaced, or a dtype is cast. A block that is not hybridized reads its attributes at every call,
    and hybrid_forward or a loss that is a function what they close over and what is global.
    """

    def __init__(self, blocks: Sequence[Any], loss: Any) -> None:
        self._blocks = blocks
        losses = loss if isinstance(loss, list | tuple) else [] if loss is None else [loss]
        self._losses = [fn for fn in losses if not isinstance(fn, mx.gluon.Block)]
        self.look()

    def look(self) -> None:
        """Take what they compute now for what is known."""
        self._graphs = _cached_graphs(self._blocks)
        every = [(vars(block), _settings_of(block)) for block in _run(self._blocks)]
        self._read = [(attributes, len(attributes), values) for attributes, values in every]
        functions = [*self._losses, *_hybrid_forwards(_run(self._blocks))]
        self._found = [(function, settings(read_by(function))) for function in functions]

    def are_possible(self) -> bool:
        """May there have been any since this was asked last?"""
        has_graphs = all(block._cached_op_args is arguments for block, arguments in self._graphs)
        has_settings = all(
            len(attributes) == count and are_set(attributes, values)
            for attributes, count, values in self._read
        )
        found = (are_set(read_by(function), values) for function, values in self._found)
        if has_graphs and has_settings and all(found):
            return False
        self.look()
        return True


def _cached_graphs(blocks: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Every block in ``blocks`` that can be hybridized, with what its cached graph is called with.

    MXNet makes that list anew when it forgets the graph.
    """
    result = []
    for block in blocks:
        if isinstance(block, mx.gluon.HybridBlock):
            result.append((block, block._cached_op_args))
        result += _cached_graphs(block._children.values())
    return result


def _run(blocks: Iterable[Any]) -> Iterator[Any]:
    """Every block in ``blocks`` that is in no hybridized one."""
    for block in blocks:
        if not getattr(block, "_active", False):
            yield block
            yield from _run(block._children.values())


def _hybrid_forwards(blocks: Iterable[Any]) -> set[Any]:
    """What the blocks run, where MXNet has not written it."""
    functions = {getattr(type(block), "hybrid_forward", None) for block in blocks}
    return {fn for fn in functions if fn is not None and not is_mxnets(fn)}


def _settings_of(block: Any) -> dict[str, Any]:
    return {name: value for name, value in settings(vars(block)).items() if name not in _OF_MXNET}
