"""The Symbol of a block and its loss as a step runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import mxnet as mx
import numpy as np

from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.form import IN_HALVES, OF_BLOCK
from memplan.mxnet.trace.nnvm import VARIABLE
from memplan.mxnet.train.blocks.calls import Ops, with_merged, without_repeats

Parameter = Any


def as_run(symbol: mx.sym.Symbol, ops: Ops, names: Collection[str]) -> mx.sym.Symbol:
    """``symbol`` as a step runs it: one op for equal ones of a graph, and one variable for two."""
    return _with_one_variable_each(without_repeats(with_merged(symbol, ops.merged)), names)


def _with_one_variable_each(symbol: mx.sym.Symbol, names: Collection[str]) -> mx.sym.Symbol:
    """``symbol`` with one variable for a parameter, one of ``names``, that has two.

    MXNet's loops make variables of their own for the parameters that they read. A hybridized block
    adds the gradients of two afterwards, which is the same sum only where each of them is read
    once. Other parameters keep their variables, which tracing refuses.
    """
    data = symbol_json.parse(symbol)
    entries = [*(entry for node in data["nodes"] for entry in node["inputs"]), *data["heads"]]
    nreaders = Counter(source for source, *_ in entries)
    places: dict[str, list[int]] = {}
    for place, node in enumerate(data["nodes"]):
        if node["op"] == VARIABLE and node["name"] in names:
            places.setdefault(node["name"], []).append(place)
    twice = [pair for pair in places.values() if len(pair) == 2]
    first_of = {b: a for a, b in twice if nreaders[a] == nreaders[b] == 1}
    if not first_of:
        return symbol
    for entry in entries:
        entry[0] = first_of.get(entry[0], entry[0])
    return symbol_json.load(data)


def blocked(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """``symbol`` without a gradient: a legacy operator, which takes no symbols of mx.np."""
    return mx.sym.BlockGrad(symbol.as_nd_ndarray())


def declared(
    symbol: mx.sym.Symbol,
    params: Mapping[str, Parameter],
    *,
    in_halves: bool,
) -> mx.sym.Symbol:
    """``symbol`` whose variables have the shapes and dtypes of the parameters as they are now.

    Those that Gluon gave them may be older: of the time before a cast. A parameter of a SymbolBlock
    that has not been called knows no shape, and its variable may. They say that they are a block's,
    and whether the step runs ``in_halves``.
    """
    data = symbol_json.parse(symbol)
    for node in data["nodes"]:
        if node["op"] != VARIABLE:
            continue
        attrs = node.setdefault("attrs", {})
        attrs[OF_BLOCK] = "True"
        if in_halves:
            attrs[IN_HALVES] = "True"
        parameter = params.get(node["name"])
        if parameter is not None:
            attrs["__dtype__"] = str(mx.nd.ndarray._DTYPE_NP_TO_MX[np.dtype(parameter.dtype).type])
            shape = _shape(parameter)
            if shape is not None:
                attrs["__shape__"] = str(shape)
    return symbol_json.load(data)


def _shape(parameter: Parameter) -> tuple[int, ...] | None:
    """The shape of ``parameter``, also where only its array knows it, as in an imported block."""
    known = parameter.shape
    if known is None and parameter._data is not None:
        known = parameter._data[0].shape
    return None if known is None else tuple(known)
