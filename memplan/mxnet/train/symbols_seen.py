"""What of a script sees Symbols in a planned step, where a block that is not hybridized has arrays.

A hybridized block shows it Symbols, too, when MXNet makes its graph, and then nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import mxnet as mx

from memplan.mxnet.train.block_changes import OF_MXNET, is_graph

Block = Any


def warn_of_symbols(block: Block, in_attributes: bool) -> None:
    """Warn of what ``block``, which has just run with Symbols, shows to hooks of what is within it.

    And of what it keeps ``in_attributes``, which a loss that runs with Symbols may read.
    """
    for part in _called([block]):
        names = _kept(part) if in_attributes else []
        if names:
            warnings.warn(
                f"block {part.name!r} keeps what it has computed ({', '.join(names)}): in a "
                f"planned step that is a Symbol without values, as in a hybridized block; if the "
                f"loss, or the script, reads it after the call, return it from hybrid_forward",
                stacklevel=2,
            )
        if part is not block and (part._forward_hooks or part._forward_pre_hooks):
            warnings.warn(
                f"hooks of block {part.name!r} get no arrays in a planned step, as in a hybridized "
                f"block; if the loss, or the script, needs what they saw, return it from "
                f"hybrid_forward of {block.name!r}",
                stacklevel=2,
            )


def _kept(block: Block) -> list[str]:
    """The attributes of a block of the script's that hold Symbols, if MXNet has no graph of it."""
    if is_graph(block) or type(block).__module__.split(".")[0] == "mxnet":
        return []
    attributes = vars(block).items()
    return [name for name, value in attributes if name not in OF_MXNET and _has_symbols(value)]


def _called(blocks: Iterable[Block]) -> Iterator[Block]:
    """These and all within, but for what is in graphs of MXNet's."""
    for block in blocks:
        yield block
        if not is_graph(block):
            yield from _called(block._children.values())


def _has_symbols(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_symbols, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_symbols, value))
    return isinstance(value, mx.sym.Symbol)
