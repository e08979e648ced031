"""The shapes and dtypes of a graph's entries, as MXNet infers them, and where it cannot.

MXNet 1.9.1 does not know what a while_loop or a cond returns before they run. Here it is what their
subgraphs return (WhileLoopComputeExCPU and CondComputeExCPU in src/operator/control_flow.cc): a
while_loop has room for ``max_iterations`` of its outputs, and leaves as it was what no iteration
writes. A cond whose branches return different shapes stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np

from memplan.mxnet.trace.bodies import bodies
from memplan.mxnet.trace.nnvm import (
    VARIABLE,
    Entry,
    EntryInfo,
    Infos,
    Node,
    depth_first,
    from_json,
    shape_is_known,
    to_symbol,
)
from memplan.mxnet.trace.operators import COND, WHILE_LOOP

# Backward operators that MXNet writes to JSON but cannot read back: it forgets their parameters,
# or the networks that they hold.
_NOT_FROM_JSON = frozenset(
    """_backward_Custom _backward_gather_nd _backward_foreach _backward_while_loop
    _backward_cond""".split()
)

Found = dict[Entry, EntryInfo]


def infer(
    heads: Sequence[Entry], shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, Any]
) -> None:
    """Fill ``infos`` of every node behind ``heads`` with what is known before it runs.

    ``shapes`` and ``dtypes`` belong to named variables.
    """
    order = depth_first(heads)
    entries = [(node, k) for node in order for k in range(node.noutputs)]
    returns: Found = {}
    while True:
        infos = _inferred(entries, returns, shapes, dtypes)
        new_returns = _returned(order, infos)
        if not new_returns:
            break
        returns |= new_returns
    shared: dict[Infos, Infos] = {}
    for node in order:
        of_node = Infos(
            tuple(infos.get(entry) for entry in node.inputs),
            tuple(infos.get((node, k)) for k in range(node.noutputs)),
        )
        node.infos = shared.setdefault(of_node, of_node)


def _inferred(
    entries: Sequence[Entry],
    returns: Found,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, Any],
) -> Found:
    """What MXNet infers, given what loops and branches return."""
    symbol = to_symbol(_with_stand_ins(entries, returns))
    _, out_shapes, _ = symbol.infer_shape_partial(**shapes)
    _, out_types, _ = symbol.infer_type_partial(**dtypes)
    result: Found = {}
    # Large networks have few shapes, many times.
    infos: dict[tuple[Any, Any], EntryInfo | None] = {}
    for (node, k), shape, dtype in zip(entries, out_shapes, out_types, strict=True):
        if (shape, dtype) not in infos:
            infos[shape, dtype] = _info(shape, dtype)
        info = infos[shape, dtype]
        if info is not None:
            result[node, k] = info
    return result


def _info(shape: Sequence[int] | None, dtype: Any) -> EntryInfo | None:
    """What MXNet says of an entry; None where it does not know both shape and dtype."""
    if not shape_is_known(shape) or dtype is None:
        return None
    assert shape is not None
    numpy_dtype = np.dtype(dtype)
    return EntryInfo(tuple(shape), numpy_dtype.name, numpy_dtype.itemsize)


def _with_stand_ins(entries: Sequence[Entry], returns: Found) -> Sequence[Entry]:
    """``entries`` for a graph without operators that MXNet cannot read.

    The gradient of an input is replaced by that input, which has its shape and dtype; the
    ``returns`` of loops and branches by variables.
    """
    order = depth_first(entries)
    if not returns and not any(node.op in _NOT_FROM_JSON for node in order):
        return entries
    twins: dict[Node, Node] = {}
    variables: dict[Entry, Node] = {}

    def twin(entry: Entry) -> Entry:
        node, k = entry
        if node.op in _NOT_FROM_JSON and node.forward is not None:
            return twin(node.forward.inputs[k])
        if entry in returns:
            variable = _variable(f"{node.name}[{k}]", returns[entry])
            return variables.setdefault(entry, variable), 0
        return twins[node], k

    for node in order:
        if node.op not in _NOT_FROM_JSON:
            control = tuple(twins[other] for other in node.control if other in twins)
            twins[node] = replace(node, inputs=list(map(twin, node.inputs)), control=control)
    return list(map(twin, entries))


def _variable(name: str, info: EntryInfo) -> Node:
    dtype = mx.nd.ndarray._DTYPE_NP_TO_MX[np.dtype(info.dtype).type]
    return Node(VARIABLE, name, {"__shape__": str(info.shape), "__dtype__": str(dtype)})


def _returned(order: Sequence[Node], infos: Found) -> Found:
    """What loops and branches return whose inputs are known, and whose outputs are not yet."""
    result: Found = {}
    for node in order:
        if node.op in (WHILE_LOOP, COND) and (node, 0) not in infos:
            known = [infos[entry] for entry in node.inputs if entry in infos]
            outputs = _body_outputs(node, known) if len(known) == len(node.inputs) else None
            if outputs is not None:
                result |= {(node, k): info for k, info in enumerate(outputs)}
    return result


def _body_outputs(node: Node, inputs: Sequence[EntryInfo]) -> list[EntryInfo] | None:
    """What a loop or branch returns for these inputs; None if data decide."""
    outputs, *others = [
        _of_subgraph(body, [inputs[p] for p in places]) for body, places in bodies(node)
    ]
    if outputs is None or any(other != outputs for other in others):
        return None
    if node.op == COND:
        return outputs
    room, ndata = int(node.attrs["max_iterations"]), int(node.attrs["num_out_data"])
    return [replace(info, shape=(room, *info.shape)) for info in outputs[:ndata]] + outputs[ndata:]


def _of_subgraph(body: Any, variables: Sequence[EntryInfo]) -> list[EntryInfo] | None:
    """The outputs of the ``body`` of a loop or a branch for what its ``variables`` are."""
    _, heads = from_json(body)
    names = [inner.name for inner in depth_first(heads) if inner.is_variable]
    shapes = {name: info.shape for name, info in zip(names, variables, strict=True)}
    dtypes = {name: info.dtype for name, info in zip(names, variables, strict=True)}
    infer(heads, shapes, dtypes)
    outputs = [inner.infos.outputs[k] for inner, k in heads]
    return None if None in outputs else outputs  # type: ignore[return-value]
