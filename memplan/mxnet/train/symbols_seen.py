"""What of a script sees Symbols in a planned step, where a block that is not hybridized has arrays.

A hybridized block shows it Symbols, too, when MXNet makes its graph, and then nothing.
"""

from __future__ import annotations

import dis
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import mxnet as mx

from memplan.mxnet.train.block_changes import OF_MXNET, is_graph
from memplan.mxnet.train.read_by import package_of

Block = Any

# How a script writes what F is, and of which class an input is: with arrays, and with Symbols.
_MODULES = frozenset({"nd", "ndarray", "sym", "symbol"})
_CLASSES = frozenset({"NDArray", "Symbol"})

# Their blocks are written to be hybridized, and return the same for both.
_LIBRARIES = ("mxnet", "gluoncv", "gluonnlp")


def warn_of_symbols(block: Block, in_attributes: bool) -> None:
    """Warn of what ``block``, which has just run with Symbols, shows to hooks of what is within it.

    And of what it keeps ``in_attributes``, which a loss that runs with Symbols may read, and of
    functions that ask whether they get Symbols.
    """
    for part in _called([block]):
        for name in filter(lambda name: _asks(part, name), ("hybrid_forward", "forward")):
            warnings.warn(
                f"{name} of block {part.name!r} asks whether it is called with arrays or with "
                f"Symbols; a planned step computes what it returns for Symbols, where MXNet calls "
                f"it with arrays in training without a plan; let both be the same",
                stacklevel=2,
            )
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


def _asks(block: Block, name: str) -> bool:
    """Does a method of the script's ask what F is, or whether it gets an array?

    Not that which MXNet, too, calls with Symbols, as the block is hybridized.
    """
    method = getattr(getattr(block, "_unplanned", type(block)), name, None)
    code = getattr(method, "__code__", None)
    if code is None or package_of(method) in _LIBRARIES:
        return False
    if name == "hybrid_forward" and is_graph(block):
        return False
    steps = list(dis.get_instructions(code))
    compares = any(
        step.opname in ("IS_OP", "COMPARE_OP") and before.argval in _MODULES | _CLASSES
        for before, step in itertools.pairwise(steps)
    )
    return compares or ("isinstance" in code.co_names and not _CLASSES.isdisjoint(code.co_names))


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
