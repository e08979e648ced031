"""Nested arrays, as Gluon's blocks take and return them, and their shapes and Symbols."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from memplan.errors import ArgumentError
from memplan.mxnet.train.arrays.array_memory import is_unknown_to_autograd
from memplan.mxnet.train.arrays.constants import is_of_constants

NDArray = Any

HANDED_OVER = ("cpu_shared", "cpu_pinned")

# An array, None, or a tuple or list of such.
Arrays = Any

# The same with a Spec for each array, and a Container for each tuple or list.
Specs = Any


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of an input or label; is it of mx.np, and are shapes those of NumPy?"""

    shape: tuple[int, ...]
    dtype: str
    of_numpy: bool = field(default_factory=mx.util.is_np_array)
    numpy_shapes: bool = field(default_factory=mx.util.is_np_shape)


@dataclass(frozen=True)
class Container:
    """Specs of what a tuple or list has in it.

    Blocks and losses may ask which of them they get, and for fields of a named tuple. Tuples of
    Specs would not do: a named one equals another that has the same in it. A function of the
    script's may make the class of a named one anew in every step, so its ``name`` tells it.
    """

    kind: type = field(compare=False)
    name: tuple[Any, ...]
    items: tuple[Specs, ...]


def as_inputs(x: Arrays) -> tuple[Any, ...]:
    """The inputs of a block as a tuple of them; ArgumentError where that would be a shape."""
    is_one = x is None or _is_shape(x) or not isinstance(x, list | tuple)
    inputs = (x,) if is_one else tuple(x)
    if _is_shape(inputs):
        raise _no_array(inputs[0])
    return inputs


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and value != () and all(map(_is_length, value))


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() < 64


def _no_array(value: Any) -> ArgumentError:
    return ArgumentError(
        f"inputs and labels must be mx.nd (or mx.np) arrays, or tuples or lists of them (plan() "
        f"takes shapes, too: tuples of integers); got {type(value).__name__}"
    )


def specs_of(value: Any) -> Specs:
    """What ``value`` (arrays or shapes) is made of; hashable."""
    if value is None:
        return None
    if isinstance(value, mx.nd.NDArray):
        _check_array(value)
        return Spec(value.shape, dtype_name(value.dtype))
    if _is_shape(value):
        return Spec(value, "float32")
    if isinstance(value, list | tuple):
        kind = type(value)
        fields = tuple(getattr(kind, "_fields", ())) if hasattr(kind, "_make") else ()
        name = kind.__module__, kind.__qualname__, fields
        return Container(kind, name, tuple(map(specs_of, value)))
    raise _no_array(value)


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a dtype of MXNet's; ArgumentError for bfloat16, of which NumPy has none."""
    try:
        numpy_dtype = np.dtype(dtype)
    except TypeError:
        numpy_dtype = np.dtype("void")
    if numpy_dtype.kind == "V":
        raise ArgumentError("memplan cannot plan bfloat16; cast to float16 or float32")
    return numpy_dtype.name


def _check_array(array: NDArray) -> None:
    """ArgumentError for an array of other semantics than MXNet has now, or a sparse one.

    And for one of which a gradient is wanted, which a planned step does not compute.
    """
    is_of_numpy = isinstance(array, mx.np.ndarray)
    if is_of_numpy and not mx.util.is_np_array():
        raise ArgumentError(
            "mx.np arrays need NumPy semantics: call mx.npx.set_np(), or give as_nd_ndarray()"
        )
    if mx.util.is_np_array() and not is_of_numpy:
        raise ArgumentError(
            "with NumPy semantics (mx.npx.set_np) arrays must be of mx.np: give as_np_ndarray()"
        )
    if array.stype != "default":
        raise ArgumentError(f"TrainStep does not support {array.stype} arrays; use tostype")
    is_result = is_recorded(array)
    if (is_result or array.grad is not None) and not is_of_constants(array):
        raise _wants_gradient(is_result=is_result, is_of_numpy=is_of_numpy)


def _wants_gradient(*, is_result: bool, is_of_numpy: bool) -> ArgumentError:
    """Of an input with a gradient; ``is_result``: it was computed of what has one."""
    if is_result:
        return ArgumentError(
            "an input was computed under autograd.record() from what has a gradient, but a planned "
            "step computes those of parameters only; detach() it, or make one block of both"
        )
    variable = "mx.sym.Variable('data')" + (".as_np_ndarray()" if is_of_numpy else "")
    return ArgumentError(
        "an input has a gradient attached (attach_grad), or is what a planned block has returned, "
        "but a planned step computes gradients of parameters only; make one block of both, "
        "detach() the input if nobody needs its gradient (as after attach_grad(grad_req='null'), "
        "which MXNet does not tell of an array), or compute that gradient without a plan, by "
        "mx.gluon.SymbolBlock(block(data), [data], block.collect_params()), which has the same "
        f"parameters, of data = {variable}, if the block can be called with a Symbol"
    )


def is_recorded(array: NDArray) -> bool:
    """Does autograd know how ``array`` was computed?"""
    if is_unknown_to_autograd(array):  # the error below takes longer than all else of a check
        return False
    try:
        array._fresh_grad = array._fresh_grad  # refused for an array that autograd does not know
    except mx.MXNetError:
        return False
    # Autograd knows what recorded ops have read, too: as variables.
    return autograd.get_symbol(array).get_children() is not None


def of_semantics(value: Any) -> Any:
    """The array or Symbol as blocks take and return it now: of mx.np with NumPy semantics."""
    return value.as_np_ndarray() if mx.util.is_np_array() else value


def leaves(value: Any) -> Iterator[Any]:
    """What is in the tuples and lists of ``value``, or in what their Specs are, None aside."""
    if isinstance(value, Container):
        value = value.items
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value


def listed(arrays: Any) -> Any:
    """``arrays`` as a list, where they are several to MXNet: in a view of a dict, say, or a deque.

    One array stays as it is, and so does what has no length, which MXNet refuses.
    """
    is_one = isinstance(arrays, mx.nd.NDArray)
    are_several = isinstance(arrays, Sized) and isinstance(arrays, Iterable) and not is_one
    return list(arrays) if are_several else arrays


def alike(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf replaced by ``function`` of it, in the same tuples and lists."""
    if isinstance(value, list | tuple):
        return _of_kind(type(value), [alike(function, item) for item in value])
    return None if value is None else function(value)


def _of_kind(kind: type, items: Sequence[Any]) -> Any:
    """These ``items`` in a list, or in a tuple, which may be a named one."""
    if not issubclass(kind, tuple):
        return list(items)
    return kind._make(items) if hasattr(kind, "_make") else tuple(items)


def as_in(specs: Specs, value: Any) -> Any:
    """``value`` in tuples and lists of the classes that ``specs`` say, which nest as it does."""
    if not isinstance(specs, Container):
        return value
    items = [as_in(part, item) for part, item in zip(specs.items, value, strict=True)]
    return _of_kind(specs.kind, items)


def regrouped(form: Any, arrays: Iterator[NDArray]) -> Any:
    """``arrays`` nested as ``form`` says, which has a number of them for each leaf."""

    def taken(count: int) -> Any:
        leaf = [next(arrays) for _ in range(count)]
        return leaf if count > 1 else leaf[0]

    return alike(taken, form)


def variables(specs: Specs, name: str) -> Any:
    """A Symbol for every array of ``specs``, nested as they are; with NumPy semantics of mx.np."""
    count = itertools.count()

    def variable(part: Specs) -> Any:
        if isinstance(part, Container):
            return _of_kind(part.kind, [variable(item) for item in part.items])
        if part is None:
            return None
        symbol = mx.sym.Variable(f"{name}{next(count)}", shape=part.shape, dtype=part.dtype)
        return of_semantics(symbol)

    return variable(specs)


def contexts_of(value: Arrays) -> set[mx.Context]:
    """Where a step on these arrays runs.

    That is cpu(0) for the memory in which DataLoaders hand over batches, shared or pinned: MXNet's
    operators compute there from such arrays, and a step copies them.
    """
    found = {array.ctx for array in leaves(value) if isinstance(array, mx.nd.NDArray)}
    return {mx.cpu() if ctx.device_type in HANDED_OVER else ctx for ctx in found}


def one_context(batch: Arrays) -> mx.Context:
    """Where the arrays of ``batch`` are; ArgumentError if they are none, or not in one place."""
    for leaf in leaves(batch):
        if not isinstance(leaf, mx.nd.NDArray):
            raise _no_array(leaf)
    contexts = contexts_of(batch)
    if not contexts:
        raise ArgumentError("there are no arrays to train on")
    if len(contexts) != 1:
        raise ArgumentError(
            f"inputs and labels must be on one context, got {sorted(map(str, contexts))}; for "
            f"several, give lists with an entry for each, as split_and_load makes them"
        )
    return contexts.pop()


def per_context(x: Arrays, y: Arrays) -> list[tuple[Arrays, Arrays]] | None:
    """Inputs and labels for each context; None if they are not lists of that.

    ArgumentError where only the inputs are.
    """
    parts = _split(x)
    if parts is None:
        return None
    labels = [None] * len(parts) if y is None else _split(y)
    if labels is None and len(parts) == 1:
        labels = [y]
    if labels is None or len(labels) != len(parts):
        raise ArgumentError("split the labels over the contexts as the inputs are")
    return list(zip(parts, labels, strict=True))


def _split(value: Arrays) -> list[Arrays] | None:
    """``value`` taken apart if it is a list with an entry per context, or a sequence of such."""
    if isinstance(value, list):
        contexts = [contexts_of(item) for item in value]
        is_one_each = all(len(devices) == 1 for devices in contexts)
        if value and is_one_each and len(set().union(*contexts)) == len(value):
            return list(value)
    if isinstance(value, list | tuple):
        parts = [_split(item) for item in value]
        if parts and all(part is not None and len(part) > 1 for part in parts):
            return [_of_kind(type(value), part) for part in zip(*parts, strict=True)]
    return None
