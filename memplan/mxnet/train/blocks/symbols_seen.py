"""What of a script sees Symbols in a planned step, where a block that is not hybridized has arrays.

A hybridized block shows it Symbols, too, when MXNet makes its graph, and then nothing.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.train.blocks.asking_code import asks
from memplan.mxnet.train.blocks.autograd_of_symbols import refusing_autograd
from memplan.mxnet.train.blocks.block_changes import OF_MXNET, losses_in
from memplan.mxnet.train.blocks.hooks import has_hooks
from memplan.mxnet.train.blocks.hybridized import is_graph
from memplan.mxnet.train.blocks.lists_of_operators import operators_return_lists
from memplan.mxnet.train.blocks.read_by import (
    FUNCTIONS,
    function_of,
    is_mxnets,
    is_scripts_module,
    package_of,
    read_by,
)
from memplan.mxnet.train.blocks.refused_symbols import package_of_frame, place_of

Block = Any
T = TypeVar("T")

# Their blocks are written to be hybridized, and return the same for both.
_LIBRARIES = ("mxnet", "gluoncv", "gluonnlp")

# What gives rows of an array, and outputs of a Symbol, by the methods that do.
_ROWS = {"__len__": "the len()", "__getitem__": "rows", "__iter__": "rows"}


def warn_of_symbols(blocks: Sequence[Block], loss: Any, asked: Iterable[str]) -> None:
    """Warn of what ``blocks``, which have just run with Symbols, show to hooks, but the first's.

    And of what they keep in attributes, which a ``loss`` that runs with Symbols may read, so with
    one only of what they read themselves, maybe in the next call, and of functions that ask whether
    they get Symbols: of those that
    :func:`refusing_rows` says have ``asked``, and of those in whose code it can be seen.
    """
    asked = [*(f"the loss {name}()" for name in _asking_losses(loss)), *asked]
    for root, part in ((block, part) for block in blocks for part in _called([block])):
        asked = [*(f"{name} of block {part.name!r}" for name in _asking(part)), *asked]
        names = [name for name in _kept(part) if loss is None or _reads(part, name)]
        if names:
            warnings.warn(
                f"block {part.name!r} keeps what it has computed ({', '.join(names)}): in a "
                f"planned step that is a Symbol without values, as in a hybridized block; if the "
                f"loss, or the script, reads it after the call, return it from hybrid_forward",
                stacklevel=2,
            )
        if part is not blocks[0] and has_hooks(part):
            warnings.warn(
                f"hooks of block {part.name!r} get no arrays in a planned step, as in a hybridized "
                f"block; if the loss, or the script, needs what they saw, return it from "
                f"hybrid_forward of {root.name!r}",
                stacklevel=2,
            )
    for what in asked:
        warnings.warn(
            f"{what} asks whether it is called with arrays or with "
            f"Symbols; a planned step computes what it returns for Symbols, where MXNet calls "
            f"it with arrays in training without a plan; let both be the same",
            stacklevel=2,
        )


def _asking(block: Block) -> Iterator[str]:
    """Names of the functions of the script's in ``block`` that ask whether they get arrays.

    Not of those that MXNet, too, calls with Symbols, as the block is hybridized.
    """
    kind = getattr(block, "_memplan_unplanned", type(block))
    for name in ("forward",) if is_graph(block) else ("hybrid_forward", "forward"):
        if _asks(getattr(kind, name, None), block, kind, set()):
            yield name


def _asking_losses(loss: Any) -> Iterator[str]:
    """Names of those of the losses that are no blocks, and ask whether they get arrays."""
    for one in losses_in(loss):
        if isinstance(one, mx.gluon.Block) or not callable(one):
            continue
        function = one if isinstance(one, FUNCTIONS) else type(one).__call__
        owner = getattr(function, "__self__", one)
        if _asks(function, owner, type(owner), set()):
            yield getattr(one, "__name__", type(one).__name__)


def _asks(function: Any, owner: Any, kind: type, seen: set[Any]) -> bool:
    """Does ``function`` ask so, or another of the script's that it names?

    That is a global one, one of a module, a method of the ``owner``, a block or what a loss is,
    whose class is ``kind``, or an attribute. Of MXNet's own functions only attributes are the
    script's: those of a HybridLambda. ``seen`` are those that were looked at before.
    """
    code = getattr(function_of(function), "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    named = [getattr(owner, "__dict__", {}).get(name) for name in code.co_names]
    if package_of(function) not in _LIBRARIES:
        if asks(code):
            return True
        read = list(read_by(function).values())
        modules = [vars(value) for value in read if is_scripts_module(value)]
        named += [
            *read,
            *(getattr(kind, name, None) for name in code.co_names),
            *(names.get(name) for names in modules for name in code.co_names),
        ]
    functions = (other for other in named if isinstance(other, FUNCTIONS))
    return any(_asks(other, owner, kind, seen) for other in functions)


def kept_by(blocks: Iterable[Block]) -> list[str]:
    """The attributes of ``blocks`` and of those within that hold Symbols, as messages name them."""
    parts = dict.fromkeys(_called(blocks))
    return [f"{name} of {part.name!r}" for part in parts for name in _kept(part)]


def _kept(block: Block) -> list[str]:
    """The attributes of a block of the script's that hold Symbols, if MXNet has no graph of it."""
    if is_graph(block) or type(block).__module__.split(".")[0] == "mxnet":
        return []
    attributes = vars(block).items()
    return [name for name, value in attributes if name not in OF_MXNET and _has_symbols(value)]


def _reads(block: Block, name: str) -> bool:
    """Does its ``hybrid_forward`` read this attribute?"""
    code = getattr(type(block).hybrid_forward, "__code__", None)
    return code is not None and any(
        instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == name
        for instruction in dis.get_instructions(code)
    )


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


def refusing_rows(compute: Callable[[], T], asked: list[str] | None = None) -> T:
    """What ``compute`` returns; TraceError where it asks a Symbol for what an array has of rows.

    A Symbol of one output has it of that output, ``for row in x`` runs once, and the step would
    train another network. Where an operator has several it returns a list, as with arrays.
    So it is where it gives autograd Symbols. In ``asked`` are noted the functions that ask a Symbol
    for other attributes of an array, which it has not: a script may ask so what it gets.
    """
    methods = {name: getattr(mx.sym.Symbol, name) for name in _ROWS}
    # A script that puts others in their place has them do what arrays do.
    own = {name: method for name, method in methods.items() if is_mxnets(method)}
    refused: list[TraceError] = []
    is_set = hasattr(mx.sym.Symbol, "__getattr__")
    noting = None if asked is None or is_set else _noting(asked)
    try:
        for name, method in own.items():
            setattr(mx.sym.Symbol, name, _refusing(method, refused))
        if noting is not None:
            mx.sym.Symbol.__getattr__ = noting
        with operators_return_lists(_has_arrays), refusing_autograd(refused):
            result = compute()
    finally:
        for name, method in own.items():
            setattr(mx.sym.Symbol, name, method)
        if noting is not None:
            with contextlib.suppress(AttributeError):  # Ctrl-C may have come before it was set
                del mx.sym.Symbol.__getattr__
    if refused:  # the script has caught it, and done what it would not do with arrays
        raise refused[0]
    return result


def _noting(asked: list[str]) -> Callable[..., Any]:
    """What Python calls for an attribute that a Symbol has not, one more of ``asked``."""

    def no_attribute(symbol: Any, name: str) -> Any:
        caller = sys._getframe(1)
        is_of_arrays = hasattr(mx.nd.NDArray, name) and not name.startswith("_")
        if is_of_arrays and _has_arrays(caller):
            place = place_of(caller, caller.f_lineno)
            if place not in asked:
                asked.append(place)
        raise AttributeError(f"{type(symbol).__name__!r} object has no attribute {name!r}")

    return no_attribute


def _refusing(method: Any, refused: list[TraceError]) -> Callable[..., Any]:
    """This ``method`` of Symbols, but TraceError, one more of ``refused``, for whose are arrays."""

    @functools.wraps(method)
    def refusing(symbol: Any, *keys: Any) -> Any:
        caller = sys._getframe(1)
        # An array, too, is itself for x[:], and has nothing by a name.
        is_of_rows = all(isinstance(key, int | slice) and key != slice(None) for key in keys)
        if is_of_rows and _has_arrays(caller) and len(symbol.list_outputs()) == 1:
            refused.append(
                TraceError(
                    f"{place_of(caller, caller.f_lineno)} asks for "
                    f"{_ROWS[method.__name__]} of {symbol.name!r}: MXNet calls it with arrays, and "
                    f"a planned step with Symbols, which have no rows, and whose len(), index and "
                    f"iteration are those of outputs. For rows write F.slice_axis(x, axis=0, "
                    f"begin=k, end=k + 1) or F.split(x, num_outputs=n, axis=0, squeeze_axis=True), "
                    f"and make their number an attribute of the block; or call hybridize() if "
                    f"outputs are meant, which MXNet takes then, too"
                )
            )
            raise refused[-1]
        return method(symbol, *keys)

    return refusing


def _has_arrays(frame: types.FrameType | None) -> bool:
    """Is it the script's code, run by :func:`refusing_rows` and in no graph of MXNet's?

    Other threads may ask Symbols at the same time, for what they like.
    """
    if package_of_frame(frame) in (*_LIBRARIES, "memplan"):
        return False
    while frame is not None and frame.f_code is not refusing_rows.__code__:
        if _makes_graph(frame):
            return False
        frame = frame.f_back
    return frame is not None


def _makes_graph(frame: types.FrameType) -> bool:
    """Is it where a hybridized block calls its hybrid_forward, with Symbols without a plan, too?"""
    if frame.f_code.co_name not in ("forward", "_get_graph") or package_of_frame(frame) != "mxnet":
        return False
    return is_graph(frame.f_locals.get("self"))
