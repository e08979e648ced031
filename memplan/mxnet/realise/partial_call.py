"""Calls of MXNet's operators that are asked for some of their outputs only.

The C API has none: whatever it calls computes all outputs. An executor tells an operator, output by
output, what is wanted of it (OpReqType of MXNet's include/mxnet/op_attr_types.h), and so does
Imperative::InvokeOp (src/imperative/imperative.cc), which the C API itself calls once it has found
out shapes and attributes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Sequence
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, c_str, c_str_array, check_call

from memplan.mxnet.realise.engine import Context, Handles, hidden_function
from memplan.mxnet.trace.environment import onednn_is_enabled

# Imperative::Get() and Imperative::InvokeOp(). This one returns the state of an operator that has
# one: behind its first argument, as C++ does it on x86-64.
_GET = hidden_function("_ZN5mxnet10Imperative3GetEv", ctypes.c_void_p)
_INVOKE = hidden_function(
    "_ZN5mxnet10Imperative8InvokeOpERKNS_7ContextERKN4nnvm9NodeAttrsERKSt6vectorIPNS_7NDArrayESaISA_"
    "EESE_RKS8_INS_9OpReqTypeESaISF_EENS_12DispatchModeENS_10OpStatePtrE"
)

_NULL, _WRITE, _WRITE_IN_PLACE = 0, 1, 2  # OpReqType
_ORDINARY, _OF_ONEDNN = 0, 1  # DispatchMode: FCompute and FComputeEx

# By which function of an operator of dense arrays MXNet computes on a CPU (FInferStorageType):
# oneDNN's, where that is enabled, or the ordinary one.
_IS_OF_ONEDNN = {
    "_backward_Convolution": True,
    "_backward_Deconvolution": True,
    "_backward_FullyConnected": True,
    "_backward_div": False,
    "_backward_dot": False,
    "_backward_mul": False,
    "_backward_sub": False,
}


class _Vector(ctypes.Structure):
    """A std::vector of an array of ctypes."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("room", ctypes.c_void_p))


# A state that there is none of, and where MXNet writes that it made none: a pointer, and a count of
# those who have it. It is the same for all calls.
_NO_STATE, _STATE_LEFT = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 2)()

Function = tuple[Any, tuple[Any, ...]]


def may_be_partial(op: str) -> bool:
    """Can an operator on a CPU be called for some of its outputs?"""
    return op in _IS_OF_ONEDNN and _GET is not None and _INVOKE is not None


def partial_call(
    op: str,
    attrs: tuple[tuple[str, str], ...],
    inputs: Handles,
    outputs: Handles,
    unread: Collection[int],
) -> Function:
    """A function, and its arguments, that calls ``op`` on cpu(0), and leaves ``unread`` alone.

    MXNet looks at the shapes of these outputs. Of what stands behind the arguments all is kept but
    the arrays.
    """
    is_of_onednn = _IS_OF_ONEDNN[op] and onednn_is_enabled()
    requests = [
        _NULL
        if place in unread
        else _WRITE_IN_PLACE
        if any(array is other for other in inputs.arrays)
        else _WRITE
        for place, array in enumerate(outputs.arrays)
    ]
    if op == "_backward_Convolution":
        # oneDNN's reads that of a bias where there is none, too (nn/mkldnn/mkldnn_convolution.cc).
        requests.append(_NULL)
    cpu = mx.cpu(0)
    return _INVOKE, (
        ctypes.byref(_STATE_LEFT),
        ctypes.c_void_p.from_param(_GET()),
        ctypes.byref(Context(cpu.device_typeid, cpu.device_id)),
        ctypes.byref(_attributes(op, attrs)),
        _as_vector(inputs.handles),
        _as_vector(outputs.handles),
        _as_vector((ctypes.c_int * len(requests))(*requests)),
        _OF_ONEDNN if is_of_onednn else _ORDINARY,
        ctypes.byref(_NO_STATE),
    )


def _as_vector(array: Any) -> Any:
    begin = ctypes.addressof(array)
    end = begin + ctypes.sizeof(array)
    vector = _Vector(begin, end, end)
    vector.array = array  # which lives as long
    return ctypes.byref(vector)


@functools.lru_cache(maxsize=1024)
def _attributes(op: str, attrs: Sequence[tuple[str, str]]) -> Any:
    """MXNet's NodeAttrs of an operator: what the node of a Symbol of it begins with.

    A Symbol is a vector of outputs, each of which begins with a pointer to its node (nnvm's
    symbolic.h and node.h).
    """
    operator, symbol = ctypes.c_void_p(), ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(c_str(op), ctypes.byref(operator)))
    names, values = (c_str_array([pair[part] for pair in attrs]) for part in (0, 1))
    check_call(
        _LIB.NNSymbolCreateAtomicSymbol(operator, len(attrs), names, values, ctypes.byref(symbol))
    )
    outputs = ctypes.cast(symbol, ctypes.POINTER(_Vector)).contents
    node = ctypes.c_void_p.from_address(outputs.begin)
    attributes = (ctypes.c_uint64 * 1).from_address(node.value or 0)
    attributes.symbol = mx.sym.Symbol(symbol)  # type: ignore[attr-defined]  # it lives as long
    return attributes
