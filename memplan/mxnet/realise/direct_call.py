"""Calls of MXNet's operators past its C API.

What that calls finds out shapes and attributes anew in every call, which takes longer than all else
that the call takes of the calling thread, and computes all outputs. An executor tells an operator,
output by output, what is wanted of it (OpReqType of MXNet's include/mxnet/op_attr_types.h). So does
Imperative::InvokeOp (src/imperative/imperative.cc), which the C API itself calls once it has found
out the rest. An error that it raises ends the process, for ctypes knows none of C++.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Collection
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, c_str_array, check_call

from memplan.mxnet.realise.engine import Context, Handles, Vector, as_vector, hidden_function
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.nnvm import operator_handle

# Imperative::Get() and Imperative::InvokeOp(). This one returns the state of an operator that has
# one: behind its first argument, as C++ does it on x86-64. And imperative::SetShapeType()
# (src/imperative/imperative_utils.h), which tells how an operator is to be computed.
_GET = hidden_function("_ZN5mxnet10Imperative3GetEv", ctypes.c_void_p)
_INVOKE = hidden_function(
    "_ZN5mxnet10Imperative8InvokeOpERKNS_7ContextERKN4nnvm9NodeAttrsERKSt6vectorIPNS_7NDArrayESaISA_"
    "EESE_RKS8_INS_9OpReqTypeESaISF_EENS_12DispatchModeENS_10OpStatePtrE"
)
_SET_SHAPE_TYPE = hidden_function(
    "_ZN5mxnet10imperative12SetShapeTypeERKNS_7ContextERKN4nnvm9NodeAttrsERKSt6vectorIPNS_7NDArray"
    "ESaISA_EESE_PNS_12DispatchModeE"
)

_NULL, _WRITE, _WRITE_IN_PLACE = 0, 1, 2  # OpReqType
_UNKNOWN, _ORDINARY, _OF_ONEDNN = -1, 0, 1  # DispatchMode: kUndefined, FCompute and FComputeEx

# By which function of an operator of dense arrays MXNet computes on a CPU (FInferStorageType):
# oneDNN's, where that is enabled, or the ordinary one.
_IS_OF_ONEDNN = {
    "_backward_Convolution": True,
    "_backward_Deconvolution": True,
    "_backward_Embedding": False,
    "_backward_FullyConnected": True,
    "_backward_GroupNorm": False,
    "_backward_LayerNorm": False,
    "_backward_broadcast_add": False,
    "_backward_broadcast_div": False,
    "_backward_broadcast_mul": False,
    "_backward_broadcast_sub": False,
    "_backward_div": False,
    "_backward_dot": False,
    "_backward_mul": False,
    "_backward_sub": False,
    "add_n": True,
}


# A state that there is none of, and where MXNet writes that it made none: a pointer, and a count of
# those who have it. It is the same for all calls.
_NO_STATE, _STATE_LEFT = (ctypes.c_uint64 * 2)(), ctypes.byref((ctypes.c_uint64 * 2)())

# The operators that were seen to have one. Nothing frees the state that was made to see it.
_WITH_STATE: set[str] = set()

# Those whose state is kept, as in MXNet's executor: it holds what it was made of, and no memory
# (nn/dropout-inl.h, make_loss-inl.h and so on of MXNet's src/operator). oneDNN has none of them.
_KEEP_STATE = frozenset(
    f"{of}{op}"
    for op in ("Dropout", "MakeLoss", "Pad", "SliceChannel", "SwapAxis")
    for of in ("", "_backward_")
)

# Of a std::shared_ptr, by its second word.
_RELEASE = hidden_function("_ZNSt16_Sp_counted_baseILN9__gnu_cxx12_Lock_policyE2EE10_M_releaseEv")

# Those that write into their parsed attributes, which calls of equal attributes share here: a norm
# the axis, counted from the front of what it reads (NumpyNormShape of numpy/linalg/np_norm.cc). Its
# backward op does so, too. MXNet's C API parses them anew in every call.
_WRITES_ATTRIBUTES = frozenset({"_npi_norm", "_backward_npi_norm"})

_CPU = ctypes.byref(Context(mx.cpu(0).device_typeid, mx.cpu(0).device_id))

Function = tuple[Any, tuple[Any, ...]]
Attributes = tuple[tuple[str, str], ...]


def may_be_partial(op: str) -> bool:
    """Can an operator on a CPU be called for some of its outputs?"""
    return op in _IS_OF_ONEDNN and _GET is not None and _INVOKE is not None


def partial_call(
    op: str, attrs: Attributes, inputs: Handles, outputs: Handles, unread: Collection[int]
) -> Function:
    """A function, and its arguments, that calls ``op`` on cpu(0), and leaves ``unread`` alone.

    MXNet looks at the shapes of these outputs. Of what stands behind the arguments all is kept but
    the arrays.
    """
    mode = _OF_ONEDNN if _IS_OF_ONEDNN[op] and onednn_is_enabled() else _ORDINARY
    return _INVOKE, (_STATE_LEFT, *_arguments(op, attrs, inputs, outputs, mode, unread))


def is_direct(function: Any) -> bool:
    """Does the ``function`` of a call go past the C API?"""
    return _INVOKE is not None and function in (_INVOKE, _invoke_with)


def may_be_direct(op: str, outputs: Handles) -> bool:
    """May a call of ``op`` that writes ``outputs`` become a direct one?

    Not with MXNet's NaiveEngine, which computes, and raises errors, within the call.
    """
    is_there = None not in (_GET, _INVOKE, _SET_SHAPE_TYPE)
    is_naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"
    on_cpu = bool(outputs.arrays) and outputs.arrays[0].context == mx.cpu(0)
    return is_there and not is_naive and on_cpu and op not in _WITH_STATE | _WRITES_ATTRIBUTES


def direct_call(op: str, attrs: Attributes, inputs: Handles, outputs: Handles) -> Function | None:
    """Call ``op`` on cpu(0), and give the function, and its arguments, that does so from now on.

    It must have been called for these arrays by MXNet's C API, which found no fault with them, in
    the semantics of shapes (mx.util.is_np_shape) of now. None for an operator with a state, of
    which each call makes one from what MXNet has found out.
    """
    imperative, *call, requests, _, no_state = _arguments(op, attrs, inputs, outputs, _UNKNOWN)
    mode = ctypes.c_int(_UNKNOWN)
    _SET_SHAPE_TYPE(*call, ctypes.byref(mode))
    arguments = (imperative, *call, requests, mode.value, no_state)
    # Memory of its own: a state is written into both, and other threads make calls meanwhile.
    state, argument = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)()
    _INVOKE(ctypes.byref(state), *arguments[:-1], ctypes.byref(argument))
    if any(state):
        _WITH_STATE.add(op)
        return None
    return _INVOKE, (_STATE_LEFT, *arguments)


def with_attributes(arguments: tuple[Any, ...], parsed: Any) -> tuple[Any, ...]:
    """The ``arguments`` of a direct call, but with the attributes that :func:`attributes` gave.

    By these MXNet must choose the same function, and find the same shapes and types.
    """
    left, imperative, ctx, _, *others = arguments
    return left, imperative, ctx, ctypes.byref(parsed), *others


class State:
    """MXNet's OpStatePtr of an operator, a std::shared_ptr: its first call makes the state.

    The C API makes one in every call, and only autograd hands it to the backward operator.
    """

    __slots__ = ("words",)

    def __init__(self) -> None:
        self.words = (ctypes.c_uint64 * 2)()

    def __del__(self, release: Any = _RELEASE, pointer: Any = ctypes.c_void_p) -> None:
        if release is not None and self.words[1]:
            release(pointer(self.words[1]))


def may_keep_state(op: str, inputs: Handles, outputs: Handles) -> bool:
    """Can ``op`` be called with a :class:`State`?

    MXNet raises an error where it does not know a shape, as that of a scalar.
    """
    arrays = (*inputs.arrays, *outputs.arrays)
    return op in _KEEP_STATE and may_be_direct(op, outputs) and all(a.size for a in arrays)


def call_with(
    state: State,
    op: str,
    attrs: Attributes,
    inputs: Handles,
    outputs: Handles,
    unread: Collection[int],
) -> Function:
    """A function, and its arguments, that calls ``op`` on cpu(0) with a ``state``."""
    return _invoke_with, (state, *_arguments(op, attrs, inputs, outputs, _ORDINARY, unread))


def _invoke_with(state: State, *arguments: Any) -> None:
    argument = (ctypes.c_uint64 * 2)(*state.words)
    if not any(argument):  # MXNet makes it of the shapes that it has found out last
        _SET_SHAPE_TYPE(*arguments[1:5], ctypes.byref(ctypes.c_int(_UNKNOWN)))
    # This takes the state out of its argument, and returns it.
    _INVOKE(ctypes.byref(state.words), *arguments[:-1], ctypes.byref(argument))


def _arguments(
    op: str,
    attrs: Attributes,
    inputs: Handles,
    outputs: Handles,
    mode: int,
    unread: Collection[int] = (),
) -> tuple[Any, ...]:
    """Those of InvokeOp, but for where it writes a state."""
    requests = [
        _NULL
        if place in unread
        else _WRITE_IN_PLACE
        if any(array is other for other in inputs.arrays)
        else _WRITE
        for place, array in enumerate(outputs.arrays)
    ]
    if unread and op == "_backward_Convolution":
        # oneDNN's reads that of a bias where there is none, too (nn/mkldnn/mkldnn_convolution.cc).
        requests.append(_NULL)
    return (
        ctypes.c_void_p.from_param(_GET()),
        _CPU,
        ctypes.byref(_attributes(op, attrs)),
        inputs.vector,
        outputs.vector,
        _requested(tuple(requests)),
        mode,
        ctypes.byref(_NO_STATE),
    )


@functools.lru_cache(maxsize=1024)
def _requested(requests: tuple[int, ...]) -> Any:
    """MXNet's vector of what is wanted of each output."""
    return as_vector((ctypes.c_int * len(requests))(*requests))


def attributes(op: str, attrs: Attributes) -> Any:
    """MXNet's NodeAttrs of an operator: what the node of a Symbol of it begins with.

    A Symbol is a vector of outputs, each of which begins with a pointer to its node (nnvm's
    symbolic.h and node.h).
    """
    operator, symbol = operator_handle(op), ctypes.c_void_p()
    names, values = (c_str_array([pair[part] for pair in attrs]) for part in (0, 1))
    check_call(
        _LIB.NNSymbolCreateAtomicSymbol(operator, len(attrs), names, values, ctypes.byref(symbol))
    )
    outputs = ctypes.cast(symbol, ctypes.POINTER(Vector)).contents
    node = ctypes.c_void_p.from_address(outputs.begin)
    result = (ctypes.c_uint64 * 1).from_address(node.value or 0)
    result.symbol = mx.sym.Symbol(symbol)  # type: ignore[attr-defined]  # it lives as long
    return result


_attributes = functools.lru_cache(maxsize=1024)(attributes)
