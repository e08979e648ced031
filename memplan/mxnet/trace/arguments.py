"""What a step is asked for, by argument: shapes, dtypes, and which gradients."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import _DTYPE_NP_TO_MX, _STORAGE_TYPE_ID_TO_STR

from memplan.errors import ArgumentError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import shape_is_known
from memplan.mxnet.trace.said import said
from memplan.mxnet.trace.too_large import check_size, check_uninferred
from memplan.mxnet.trace.unknown_shapes import check_unknown
from memplan.util.numbers import shown
from memplan.util.words import first_of

GradReq = str | Mapping[str, str] | None

# Variables that MXNet's own inference of shapes and dtypes takes for parameters of its functions.
_TAKEN_NAMES = ("self", "partial")

_TO_BROADCAST = (
    "; + - * / of Symbols, and of a hybridized block, take equal shapes only, where those of "
    "arrays broadcast: write F.broadcast_mul(a, b), broadcast_add and the like"
)

_TO_GIVE_STATES = (
    "is made with a 0 in its shape, as recurrent cells make their first states, which stands for a "
    "size that is not known yet, but under mx.util.np_shape(True), as here, for none at all; call "
    "the block outside of that, or give the cells states that have their sizes, as inputs of the "
    "block: unroll(..., begin_state=states)"
)


class UnknownShapeError(ArgumentError):
    """The shapes of the arguments ``names`` are unknown, given those of the inputs."""

    def __init__(self, message: str, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = names


def infer_arguments(
    symbol: mx.sym.Symbol,
    shapes: Mapping[str, Sequence[int]],
    type_dict: Mapping[str, Any] | None,
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shape and dtype of every argument and auxiliary state; ArgumentError where unknown.

    TraceError names an op that makes them so, as its own shape depends on numbers; SizeError an
    array that is too large for MXNet.
    """
    if type_dict is not None and not isinstance(type_dict, Mapping):
        raise ArgumentError(
            f"type_dict must be a dict of dtypes by argument, got {shown(type_dict)}"
        )
    check_names(symbol, shapes, type_dict or {})
    return _infer_shapes(symbol, shapes), _infer_dtypes(symbol, shapes, type_dict)


def storage_types(symbol: mx.sym.Symbol) -> dict[str, str]:
    """The storage types of the variables for which ``mx.sym.Variable`` was given one."""
    key, nodes = "__storage_type__", symbol_json.attributes(symbol)
    numbers = {name: int(attrs[key]) for name, attrs in nodes if key in attrs}
    return {name: _STORAGE_TYPE_ID_TO_STR[number] for name, number in numbers.items()}


def check_names(
    symbol: mx.sym.Symbol, shapes: Mapping[str, Any], type_dict: Mapping[str, Any]
) -> None:
    """ArgumentError for names that MXNet cannot infer anything of, and for no outputs at all."""
    if not symbol.list_outputs():
        raise ArgumentError(
            "the network has no outputs, so there is nothing to train; of a Symbol from JSON its "
            "'heads' are the outputs"
        )
    arguments, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    for name in _TAKEN_NAMES:
        if name in arguments or name in states:
            raise ArgumentError(
                f"a variable of the network is called {name!r}, as a parameter of MXNet's "
                "infer_shape is, which cannot tell the two apart; rename the variable"
            )
    for kind, names in (("shape", shapes), ("dtype", type_dict)):
        for name in names:
            if name not in arguments and name not in states:
                raise ArgumentError(
                    f"a {kind} was given for {name!r}, which is no argument of the network; "
                    + (f"its arguments are {_some(arguments)}" if arguments else "it has none")
                )


def _infer_shapes(
    symbol: mx.sym.Symbol, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    inputs = {name: _shape(name, shape) for name, shape in shapes.items()}
    for name, shape in inputs.items():
        check_size(f"the array {name!r}", shape)
    try:
        arrays, _, states = symbol.infer_shape_partial(**inputs)
    except MXNetError as error:
        check_uninferred(symbol, inputs)
        raise ArgumentError(
            f"the shapes {inputs} do not fit the network: {said(error)}"
            f"{_advice(symbol, error)}{_unknown_size(inputs)}"
        ) from error
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    result = dict(zip(names, map(tuple, [*arrays, *states]), strict=True))
    unknown = [name for name, shape in result.items() if not shape_is_known(shape)]
    if unknown:
        check_uninferred(symbol, inputs)
        check_unknown(symbol, inputs)
        raise UnknownShapeError(
            f"the shape of {_some(unknown)} is unknown; name the input shapes, e.g. "
            f"{unknown[0]}=(32, 3, 224, 224), or give the Variable a shape, as that of a state of "
            f"a Module: mx.sym.Variable({unknown[0]!r}, shape=(32, 10)){_unknown_size(inputs)}",
            unknown,
        )
    for name, shape in result.items():
        check_size(f"the array {name!r}", shape)
    return result


def _advice(symbol: mx.sym.Symbol, error: MXNetError) -> str:
    """What can be done where MXNet found shapes that do not fit, if that is known."""
    if mx.util.is_np_shape():
        for node in symbol_json.parse(symbol)["nodes"]:
            shape = node.get("attrs", {}).get("shape", "")
            if not node["inputs"] and "0" in re.findall(r"\d+", shape):
                return f"; {node['name']!r} {_TO_GIVE_STATES}"
    if "dim_size_is_known" in str(error):
        return (
            "; a variable has a shape that is known in part only, which MXNet cannot complete "
            "here: give it whole. For a Gluon block whose own infer_shape does, call the block on "
            "a batch first"
        )
    return _TO_BROADCAST if "elemwise_op_common" in str(error) else ""


def _infer_dtypes(
    symbol: mx.sym.Symbol, inputs: Collection[str], type_dict: Mapping[str, Any] | None
) -> dict[str, str]:
    arguments = symbol.list_arguments()
    for name, dtype in (type_dict or {}).items():
        _check_dtype(name, dtype)
    if type_dict is None:
        type_dict = _dtypes_of_module(symbol, inputs)
    try:
        types, _, state_types = symbol.infer_type_partial(**type_dict)
    except MXNetError as error:
        raise ArgumentError(f"the dtypes do not fit the network: {said(error)}") from error
    names = (*arguments, *symbol.list_auxiliary_states())
    dtypes = dict(zip(names, [*types, *state_types], strict=True))
    untyped = [name for name, dtype in dtypes.items() if dtype is None]
    if untyped:
        raise ArgumentError(f"the dtype of {_some(untyped)} is unknown; name it in type_dict")
    return {name: np.dtype(dtype).name for name, dtype in dtypes.items()}


def _dtypes_of_module(symbol: mx.sym.Symbol, inputs: Collection[str]) -> dict[str, Any]:
    """Inputs and labels are float32, as Module names them; the operators say what the others are.

    All are float32 where they do not say it.
    """
    nodes = symbol_json.parse(symbol)["nodes"]
    typed = {node["name"] for node in nodes if "__dtype__" in node.get("attrs", {})}
    every = {name: np.float32 for name in symbol.list_arguments() if name not in typed}
    named = {name: np.float32 for name in every if name in inputs or name.endswith("label")}
    fitting = (types for types in (named, every) if _says_all(symbol, types))
    return next(fitting, named)


def _says_all(symbol: mx.sym.Symbol, type_dict: Mapping[str, Any]) -> bool:
    """Do these dtypes fit the network, and give all the others?"""
    try:
        return None not in symbol.infer_type_partial(**type_dict)[0]
    except MXNetError:
        return False


def complete_grad_req(
    symbol: mx.sym.Symbol, shapes: Mapping[str, Sequence[int]], grad_req: GradReq
) -> dict[str, str]:
    """``write``, ``add`` or ``null`` for every argument; ArgumentError where none gets a gradient.

    And for a ``grad_req`` that is none, or names what is no argument.
    """
    arguments = symbol.list_arguments()
    if grad_req is None:
        requests = {
            name: "null" if name in shapes or name.endswith("label") else "write"
            for name in arguments
        }
    elif isinstance(grad_req, str):
        requests = dict.fromkeys(arguments, grad_req)
    elif not isinstance(grad_req, Mapping):
        raise ArgumentError(
            f"grad_req must be 'write', 'add' or 'null', or a dict of these by argument, "
            f"got {shown(grad_req)}"
        )
    else:
        for name in grad_req:
            if name not in arguments:
                raise ArgumentError(
                    f"grad_req names {name!r}; the arguments are {_some(arguments)}"
                )
        requests = {name: grad_req.get(name, "null") for name in arguments}
    for name, request in requests.items():
        if request not in ("write", "add", "null"):
            raise ArgumentError(
                f"grad_req of {name!r} is {shown(request)}; it must be 'write', 'add' or 'null'"
            )
    if not wanted(requests):
        raise ArgumentError(
            "no argument wants a gradient, so there is nothing to plan; see grad_req, "
            f"or give shapes of the inputs only, not of all of {_some(arguments)}"
        )
    return requests


def wanted(requests: Mapping[str, str]) -> list[str]:
    """The arguments that are to have a gradient, in their order."""
    return [name for name, request in requests.items() if request != "null"]


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        if isinstance(shape, Set | Mapping | bytes | bytearray):
            raise TypeError  # sizes in no order, or characters
        sizes = tuple(shape)
        if any(isinstance(size, bool) for size in sizes):
            raise TypeError  # they are integers for Python, and a slip of a script's here
        sizes = tuple(map(operator.index, sizes))
    except TypeError:
        raise ArgumentError(
            f"the shape of {name!r} must be a tuple of integers, got {shown(shape)}"
        ) from None
    if any(size < -1 for size in sizes):  # -1 is unknown, as 0 is
        raise ArgumentError(f"the shape of {name!r} has a negative size: {shown(sizes)}")
    return sizes


def _unknown_size(inputs: Mapping[str, Sequence[int]]) -> str:
    """What is to be said of a size among ``inputs`` that MXNet takes for one to be found out."""
    for name, shape in inputs.items():
        if shape and not shape_is_known(shape):
            return f". The {min(shape)} in {name}={shape} stands for a size that is not known"
    return ""


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        kind = np.dtype(dtype).type
    except Exception:  # of any kind, as NumPy reads lists of dtypes by Python's parser
        kind = object  # which MXNet has not
    if kind not in _DTYPE_NP_TO_MX:  # MXNet would take another one
        known = [np.dtype(kind).name for kind in _DTYPE_NP_TO_MX if isinstance(kind, type)]
        raise ArgumentError(
            f"the dtype of {name!r} is {shown(dtype)}, which MXNet does not have; it has "
            f"{', '.join(known)}"
        )


def _some(names: Sequence[str]) -> str:
    return first_of(map(repr, names), 8)
