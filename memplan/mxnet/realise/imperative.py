"""Calls of MXNet's operators, one by one, that write into given arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, c_str_array, get_last_ffi_error

from memplan.mxnet.realise.direct_call import (
    State,
    call_with,
    direct_call,
    is_direct,
    may_be_direct,
    may_be_partial,
    partial_call,
)
from memplan.mxnet.realise.engine import Handles, to_default_layout
from memplan.mxnet.realise.own_autograd import backward_of_mxnet, mark_variables
from memplan.mxnet.realise.usual_layout import in_layouts_of, in_usual_layout
from memplan.mxnet.trace.nnvm import operator_handle

NDArray = Any


class Call:
    """A call of an operator, made ready once: it reads ``inputs`` and writes ``outputs``.

    ``op`` is its name, or a function that is called like a CachedOp. Such a call ``is_alone``: it
    belongs in no bundle, and must be waited for. The others ask the engine for one operation.

    The outputs in ``unread`` are not computed: nothing may be written into their arrays.

    The first time MXNet's C API makes a call, which looks whether all is as the operator wants it;
    from the second one on, most are made directly, in half the time.

    A step may have thousands, so a call is small, and may stand for several of the step that are
    alike. With a ``state`` it shares that with others. ``skips`` is what
    :class:`memplan.mxnet.realise.workspace.OneWorkspace` found out about it; None: nothing.
    """

    #: May it cut a bundle, as where an array is freed while it is made?
    frees = False

    #: May it become a direct call?
    settles = True

    __slots__ = (
        "_arguments",
        "_function",
        "_inputs",
        "_numpy_shapes",
        "_operator",
        "_outputs",
        "_unread",
        "skips",
    )

    def __init__(
        self,
        op: str | Callable[..., Any],
        attrs: Mapping[str, str],
        inputs: Handles,
        outputs: Handles,
        unread: Collection[int] = (),
        state: State | None = None,
    ) -> None:
        self.skips: int | None = None
        self._inputs, self._outputs, self._unread = inputs, outputs, unread
        #: What is called, as long as it is not known how to call it directly.
        self._operator: tuple[str, tuple[tuple[str, str], ...]] | None = None
        #: The semantics in which the C API made it: NumPy's, or MXNet's own; None: it did not yet.
        self._numpy_shapes: bool | None = None
        self._function: Callable[..., int | None] = _call
        self._arguments: tuple[Any, ...] = (op, inputs.arrays, outputs.arrays)
        if isinstance(op, str) and state is not None:
            call = call_with(state, op, tuple(attrs.items()), inputs, outputs, unread)
            self._function, self._arguments = call
        elif isinstance(op, str) and unread and may_be_partial(op):
            call = partial_call(op, tuple(attrs.items()), inputs, outputs, unread)
            self._function, self._arguments = call
        elif isinstance(op, str):
            handle, *parameters = _operator(op, tuple(attrs.items()))
            self._function = _LIB.MXImperativeInvokeEx
            self._arguments = (
                handle,
                len(inputs.arrays),
                inputs.pointer,
                _number(len(outputs.arrays)),
                outputs.place,
                *parameters,
            )
            if self.settles and may_be_direct(op, outputs):
                self._operator = op, tuple(attrs.items())

    @property
    def is_alone(self) -> bool:
        """Does it belong in no bundle?"""
        return self._function is _call

    @property
    def may_be_direct(self) -> bool:
        """Is it made directly, or may that come?"""
        return self._operator is not None or is_direct(self._function)

    @property
    def noperations(self) -> int:
        """How many operations it asks the engine for, once it is direct; 0: that is not known."""
        return int(self._operator is None and is_direct(self._function))

    @property
    def outputs(self) -> Sequence[NDArray | None]:
        """The arrays of the outputs; None where one is not computed."""
        unread = self._unread
        return [None if k in unread else array for k, array in enumerate(self._outputs.arrays)]

    @property
    def written(self) -> Sequence[NDArray]:
        """What must be waited for; user code may go on reading."""
        return (*self._outputs.arrays, *(self._inputs.arrays if self.is_alone else ()))

    def __call__(self) -> None:
        if self._operator is not None:
            self._settle(*self._operator)
        elif self._function(*self._arguments):
            raise get_last_ffi_error()

    def _settle(self, op: str, attrs: tuple[tuple[str, str], ...]) -> None:
        """Make it by the C API, or directly from now on if that has found no fault with it.

        Shapes that are known to NumPy, as that of a scalar, are unknown in MXNet's own semantics.
        """
        numpy_shapes = mx.util.is_np_shape()
        if self._numpy_shapes is numpy_shapes:
            direct = direct_call(op, attrs, self._inputs, self._outputs)
            self._function, self._arguments = direct or (self._function, self._arguments)
            self._operator = None
        elif self._function(*self._arguments):
            raise get_last_ffi_error()
        else:
            self._numpy_shapes = numpy_shapes


def _call(op: Callable[..., Any], inputs: Sequence[NDArray], outputs: Sequence[NDArray]) -> int:
    op(*inputs, out=list(outputs))
    return 0


@functools.lru_cache(maxsize=1024)
def _operator(op: str, attrs: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    """What MXImperativeInvokeEx is to know of an operator: calls that are alike share it.

    The last part is where MXNet writes the storage types of outputs, which nobody reads.
    """
    names, values = (c_str_array([pair[part] for pair in attrs]) for part in (0, 1))
    types = ctypes.byref(ctypes.POINTER(ctypes.c_int)())
    as_argument = ctypes.c_void_p.from_param(operator_handle(op).value)
    return as_argument, len(attrs), ctypes.byref(names), ctypes.byref(values), types


@functools.cache
def _number(outputs: int) -> Any:
    """How many ``outputs`` a call is given: MXNet leaves the number as it is."""
    return ctypes.byref(ctypes.c_int(outputs))


class CallAfter(Call):
    """A call that makes another one first, if any, and so asks the engine for two operations."""

    __slots__ = ("_first",)

    def __init__(self, first: Call | None, *call: Any) -> None:
        super().__init__(*call)
        self._first = first

    @property
    def noperations(self) -> int:
        own, first = super().noperations, self._first
        if first is None or not own:
            return own
        before = first.noperations
        return own + before if before else 0

    def __call__(self) -> None:
        if self._first is not None:
            self._first()
        super().__call__()


class PartCalls:
    """The calls that write the outputs of one operator in turn, as one; none of them is alone."""

    #: As of :class:`Call`.
    frees, is_alone = False, False

    __slots__ = ("_calls", "skips")

    def __init__(self, calls: Iterable[Call]) -> None:
        self.skips: int | None = None
        self._calls = tuple(calls)

    @property
    def may_be_direct(self) -> bool:
        """As of :class:`Call`."""
        return all(call.may_be_direct for call in self._calls)

    @property
    def noperations(self) -> int:
        """As of :class:`Call`."""
        counts = [call.noperations for call in self._calls]
        return sum(counts) if all(counts) else 0

    @property
    def outputs(self) -> Sequence[NDArray | None]:
        """The arrays of the outputs; None where one is not computed."""
        return [array for call in self._calls for array in call.outputs]

    @property
    def written(self) -> Sequence[NDArray]:
        """What must be waited for."""
        return [array for call in self._calls for array in call.written]

    def __call__(self) -> None:
        for call in self._calls:
            call()


class TurningCall(CallAfter):
    """A call before which ``turned`` are put back from layouts of oneDNN's.

    The engine is asked for that alone, which cuts a bundle in two.
    """

    frees = True

    #: What it asks for first is in no bundle.
    may_be_direct, noperations = False, 0

    __slots__ = ("_turned",)

    def __init__(self, turned: Sequence[NDArray], *call: Any) -> None:
        super().__init__(*call)
        self._turned = turned

    def __call__(self) -> None:
        to_default_layout(self._turned)
        super().__call__()


@dataclass(frozen=True, slots=True)
class BackwardArrays:
    """What the backward op of a recorded call writes and reads.

    It writes the gradients of the first inputs into ``gradients`` (None: a gradient that is not
    computed), or adds to them, if they are among ``sums``. It reads the gradients of the first
    outputs, which are ``used``. If it runs code of the user's, ``by_user_code`` is all that this
    reads. ``layouts`` are pairs of an array that it reads, and a gradient that has the layout of
    that afterwards.
    """

    gradients: Sequence[NDArray | None]
    used: list[NDArray]
    sums: Sequence[NDArray]
    by_user_code: Sequence[NDArray]
    layouts: Sequence[tuple[NDArray, NDArray]]

    @property
    def written(self) -> list[NDArray]:
        """The gradients that are computed."""
        return [array for array in self.gradients if array is not None]


class RecordedCall(Call):
    """A call that keeps the operator's state for :class:`BackwardCall`, and the arrays of that.

    It makes the call ``first`` before, if any, which is not recorded.
    """

    frees = True  # what autograd kept of the step before
    settles = False  # autograd is in the C API

    def __init__(
        self,
        op: str | Callable[..., Any],
        attrs: Mapping[str, str],
        inputs: Sequence[NDArray],
        outputs: Sequence[NDArray],
        backward: BackwardArrays,
        first: Call | None,
    ) -> None:
        self._op, self._attrs, self._read, self._written = op, attrs, inputs, outputs
        self.backward, self._first = backward, first
        self.forget()

    @property
    def outputs(self) -> Sequence[NDArray | None]:
        return self._written

    @property
    def arrays(self) -> list[NDArray]:
        """All that it and its backward op read, and what it writes."""
        return [*self._read, *self._written, *self.backward.used]

    def forget(self) -> None:
        """Let go of what autograd keeps of a call whose backward op has not run."""
        # Handles of its own, for autograd marks them.
        inputs = [array.detach() for array in self._read]
        for array, gradient in zip(inputs, self.backward.gradients, strict=False):
            if gradient is not None:
                is_added = any(gradient is total for total in self.backward.sums)
                mark_variables([array], [gradient.detach()], "add" if is_added else "write")
        outputs = [array.detach() for array in self._written]
        super().__init__(self._op, self._attrs, Handles(inputs), Handles(outputs))

    def __call__(self) -> None:
        if self._first is not None:
            self._first()
        with autograd.record():
            super().__call__()


class BackwardCall:
    """The call of the backward op of a recorded call, through autograd: only that has the state.

    Autograd does not see where the op writes over what it reads: it forgets the layout of oneDNN's
    that the array is in before the op reads it. So such an array is put back first, and the
    gradient gets the layout afterwards that MXNet's executor leaves it in.
    """

    #: As of :class:`Call`.
    skips: int | None = None

    is_alone, frees = True, True

    #: As of :class:`Call`.
    may_be_direct, noperations = False, 0

    def __init__(self, recorded: RecordedCall) -> None:
        self._recorded, self._arrays = recorded, recorded.backward
        self.outputs, self.written = self._arrays.gradients, self._arrays.written
        read = recorded.arrays
        self._overwritten = [a for a in read if any(a is array for array in self.written)]
        #: All that it reads or writes, and the engine knows of; None where user code runs.
        self.touched = None if recorded.is_alone else [*read, *self.written]

    def __call__(self) -> None:
        with in_layouts_of(self._arrays.layouts):
            self._run()

    def _run(self) -> None:
        to_default_layout(self._overwritten)
        # A loss reads no gradient of its outputs. Where MXNet is given none it makes an array of
        # ones, as large as the output, that nobody counts: it is given the output, which nobody
        # reads either.
        used = self._arrays.used or self._recorded.outputs[:1]
        if self._recorded.is_alone:
            # MXNet leaves the gradients of a branch that was not taken as they were.
            for array in self.written:
                array[:] = 0
        with in_usual_layout(self._arrays.by_user_code):
            backward_of_mxnet(self._recorded.written[: len(used)], used)
