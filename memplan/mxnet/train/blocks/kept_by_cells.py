"""What MXNet's recurrent cells keep from call to call, until ``reset()`` is called.

VariationalDropoutCell keeps its masks, ZoneoutCell its last output. Where they run with Symbols
they keep Symbols, which mean nothing in the next network, nor to arrays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import mxnet as mx

from memplan.errors import UsageError
from memplan.mxnet.train.blocks.composing_thread import called_in_it
from memplan.mxnet.train.blocks.hybridized import hybridized, is_graph

Block = Any

_KEPT = ("drop_inputs_mask", "drop_states_mask", "drop_outputs_mask", "_prev_output")


class OfAnEarlierCall:
    """Stands for what a cell has kept and must not use: MXNet's operators refuse it."""


@contextlib.contextmanager
def cells_begin_anew(block: Block) -> Iterator[None]:
    """Around a run of ``block`` with Symbols, of which a network is made.

    Cells of a hybridized block begin in every call as MXNet's graph of the block does, which has
    nothing of an earlier one, and are left as they were. Others go on with what they have kept,
    unless the block resets them: no plan knows of that, so it is a UsageError.
    """
    roots = [root for root in dict.fromkeys(hybridized([block])) if any(_cells(root))]
    before = [(cell, _kept(cell)) for root in roots for cell in _cells(root)]
    replaced = [root for root in roots if "forward" not in vars(root)]
    try:
        for root in replaced:
            usual, anew = (functools.partial(f, root) for f in (type(root).forward, _forward_anew))
            root.__dict__["forward"] = called_in_it(anew, usual)
        with _refused(block, object):
            yield
    finally:
        for root in replaced:
            root.__dict__.pop("forward", None)
        for cell, kept in before:
            cell.__dict__.update(kept)


def _forward_anew(root: Block, *args: Any, **options: Any) -> Any:
    """What a graph of MXNet's returns, in which cells have nothing of the call before."""
    for cell in _cells(root):
        cell.__dict__.update(dict.fromkeys(_kept(cell)))
    return type(root).forward(root, *args, **options)


@contextlib.contextmanager
def cells_use_arrays(block: Block) -> Iterator[None]:
    """Around inference: UsageError where a cell would use what a planned step has left."""
    with _refused(block, mx.sym.Symbol):
        yield


@contextlib.contextmanager
def _refused(block: Block, kind: type) -> Iterator[None]:
    """Within it cells that are in no graph do not find what they have kept of this ``kind``."""
    stands_for = [
        (cell, name, value, OfAnEarlierCall())
        for cell in _cells(block, until=is_graph)
        for name, value in _kept(cell).items()
        if value is not None and isinstance(value, kind)
    ]
    for cell, name, _, stand_in in stands_for:
        setattr(cell, name, stand_in)
    try:
        yield
    except Exception as error:
        cells = [cell for cell, name, _, mark in stands_for if getattr(cell, name) is mark]
        if OfAnEarlierCall.__name__ not in str(error) or not cells:
            raise
        cell = cells[0]
        raise UsageError(
            f"{type(cell).__name__} {cell.name!r} of the planned block {block.name!r} runs on with "
            f"what it has kept of an earlier call, as reset() was not called in between; a planned "
            f"step leaves nothing to the next call. Call reset() of the cell at the beginning of "
            f"hybrid_forward, as unroll() does, or call it once and hybridize() the block, whose "
            f"graph begins anew in every call"
        ) from error
    finally:
        for cell, name, value, stand_in in stands_for:
            if getattr(cell, name) is stand_in:
                setattr(cell, name, value)


def has_cells(block: Block) -> bool:
    """Is there any cell within ``block`` that may keep something?"""
    return any(True for _ in _cells(block))


def _cells(block: Block, until: Callable[[Block], bool] = lambda block: False) -> Iterator[Block]:
    """The cells within ``block`` that may keep something, but for those in blocks of a kind."""
    if until(block):
        return
    if isinstance(block, mx.gluon.rnn.RecurrentCell) and _kept(block):
        yield block
    for child in block._children.values():
        yield from _cells(child, until)


def _kept(cell: Block) -> dict[str, Any]:
    return {name: vars(cell)[name] for name in _KEPT if name in vars(cell)}
