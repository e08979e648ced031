"""Which arrays a script has written into, while somebody wants to know.

MXNet counts that for its engine, and tells nobody: the engine's count goes up, too, where inference
lays the weight of a convolution out anew for oneDNN, which changes no value. So it is noticed where
Python code asks for it: ``p.set_data(x)`` and ``load_parameters``, ``p.data()[:] = x``, every
operator that gets an array as its ``out``, as ``p.data() += x`` and those of optimizers do, what a
kvstore hands out, and where an array is handed to others by DLPack to be written. Whatever array
that is, its memory tells which others have it: slices, and one flat array of whose views a script
has made its parameters.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mxnet as mx
from mxnet.ndarray import register

from memplan.mxnet.realise.wrapped_functions import wrap
from memplan.mxnet.trace.nnvm import operator_handle
from memplan.mxnet.train.arrays.array_memory import Part, chunk_of, part_of
from memplan.mxnet.train.arrays.nesting import leaves

NDArray = Any
Parameter = Any


class Writes:
    """What was written since this was made, of ``arrays`` by name, until :meth:`end`."""

    def __init__(self, arrays: Mapping[str, NDArray]) -> None:
        _notice_outs()
        _notice_pulls()
        _notice_capsules()
        self._written: set[str] = set()
        # Another array may get the memory of one that is gone.
        self._arrays = dict(arrays)
        self._parts_of: dict[int, list[tuple[str, Part | None]]] = {}
        for name, array in arrays.items():
            self._parts_of.setdefault(_memory_of(array), []).append((name, part_of(array)))
        self.begin()

    def begin(self) -> None:
        """Nothing is written as yet; look from now on."""
        self._written.clear()
        if self._arrays:
            _watch(self, True)

    def pause(self) -> None:
        """Look no longer, until :meth:`begin`."""
        _watch(self, False)

    def written(self) -> set[str]:
        """The names of those that were written."""
        return self._written

    def array(self, name: str) -> NDArray:
        """The array of this ``name``, until :meth:`end`."""
        return self._arrays[name]

    def end(self) -> None:
        """Look no longer, and let go of the arrays."""
        self.pause()
        self._parts_of, self._arrays = {}, {}

    def notice(self, array: NDArray) -> None:
        """Somebody writes into this ``array``."""
        parts = self._parts_of.get(_memory_of(array))
        if parts is None:
            return
        part = part_of(array)
        self._written.update(
            name for name, other in parts if part is None or other is None or part.overlaps(other)
        )


def note_writes(arrays: Iterable[NDArray]) -> None:
    """These ``arrays`` are written by something that nobody sees."""
    for array in arrays if _WATCHING else ():
        _notice(array)


def nupdates_of(parameter: Parameter) -> int:
    """How often its trainer has updated the parameter, on all contexts."""
    trainer = parameter._trainer
    if trainer is None:
        return 0
    index, counts = trainer._param2idx[parameter.name], trainer.optimizer._all_index_update_counts
    return sum(of_device.get(index, 0) for of_device in counts.values())


def warn_of_inputs() -> None:
    """Warn that an input was written where MXNet would read it again."""
    warnings.warn(
        "an input of a planned block was written between the call and backward, where MXNet would "
        "compute gradients of what was written; a planned step computes them of what the input was "
        "in the call. Write it behind backward, or give the block a copy",
        stacklevel=2,
    )


def warn_of_outputs() -> None:
    """Warn of a written output that others read beside backward ops, which in MXNet do not."""
    warnings.warn(
        "what a planned block has returned was written between the call and backward, where MXNet "
        "would compute gradients of what was written; a plan that recomputes others by it, or has "
        "reshapes of it in the same memory, computes them of what was returned. Write it behind "
        "backward, or write into a copy (out.detach().copy())",
        stacklevel=2,
    )


def _memory_of(array: NDArray) -> int:
    """What arrays that share memory have in common; the array alone where that is not known."""
    return chunk_of(array) or id(array)


#: Those who want to know. It is replaced, not changed: other threads go through it meanwhile.
_WATCHING: tuple[weakref.ref[Writes], ...] = ()
_LOCK = threading.Lock()


def _watch(writes: Writes, begins: bool) -> None:
    global _WATCHING
    if not begins and all(ref() is not writes for ref in _WATCHING):
        return
    with _LOCK:
        others = [ref for ref in _WATCHING if ref() not in (None, writes)]
        _WATCHING = (*others, weakref.ref(writes)) if begins else tuple(others)


def _notice(out: Any) -> None:
    watching = _WATCHING
    for array in leaves(out) if watching else ():
        for ref in watching if isinstance(array, mx.nd.NDArray) else ():
            if (writes := ref()) is not None:
                writes.notice(array)


@functools.cache
def _notice_outs() -> None:
    """Have MXNet's functions of operators tell of every array that they write into.

    That is their ``out``, and what ``reset_arrays`` is given.
    """
    invoke, reset = register._imperative_invoke, operator_handle("reset_arrays").value

    def noticed(op: Any, inputs: Any, names: Any, values: Any, out: Any, *rest: Any) -> Any:
        if _WATCHING:
            _notice(out)
            if getattr(op, "value", op) == reset:
                _notice(inputs)
        return invoke(op, inputs, names, values, out, *rest)

    register._imperative_invoke = noticed
    mx.nd.NDArray._sync_copyfrom = _noticed_first(mx.nd.NDArray._sync_copyfrom)


@functools.cache
def _notice_pulls() -> None:
    """Have kvstores tell of every array into which they write."""
    for name in ("broadcast", "pull", "pushpull", "row_sparse_pull"):
        setattr(mx.kvstore.KVStore, name, _noticed_pull(getattr(mx.kvstore.KVStore, name)))


def _noticed_pull(hand_out: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(hand_out)

    @functools.wraps(hand_out)
    def noticed(*args: Any, **options: Any) -> Any:
        given = signature.bind_partial(*args, **options).arguments
        out = given.get("out")
        _notice(given.get("value") if out is None else out)  # pushpull writes into what it is given
        return hand_out(*args, **options)

    return noticed


@functools.cache
def _notice_capsules() -> None:
    """Have MXNet tell of every array that it hands to others by DLPack, to be written."""
    wrap(mx.nd, "to_dlpack_for_write", _noticed_first)  # which the method of arrays calls


def _noticed_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same ``function``, which writes into its first argument."""

    @functools.wraps(function)
    def noticed(array: NDArray, *args: Any, **options: Any) -> Any:
        _notice(array)
        return function(array, *args, **options)

    return noticed
