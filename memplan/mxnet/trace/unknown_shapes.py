"""Ops whose outputs have shapes that nobody knows before they run, which no plan can count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mxnet as mx

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import Node, depth_first, from_json, shape_is_known, to_symbol
from memplan.mxnet.trace.operators import COND, WHILE_LOOP

# Of what these return MXNet infers nothing either, and memplan does later.
_RETURNING = (COND, WHILE_LOOP)


def unknown_shape(node: Node) -> TraceError:
    """The error for ``node``, of whose outputs some shape is unknown."""
    return TraceError(
        f"the shape of {node.name!r} ({node.op}) is not known before it runs, "
        f"so its memory cannot be planned; {_advice(node)}"
    )


def _advice(node: Node) -> str:
    leave_out = "leave it out of the training network"
    if not node.op.startswith("_np") or mx.util.is_np_shape():
        return leave_out
    return (
        f"without NumPy semantics MXNet takes the shape () for an unknown one, and an op of mx.np "
        f"may have it in an output that nobody reads: call mx.npx.set_np() first, or {leave_out}"
    )


def check_unknown(symbol: mx.sym.Symbol, shapes: Mapping[str, Sequence[int]]) -> None:
    """TraceError for an op of ``symbol`` that has inputs, all known by ``shapes``, and outputs not.

    Behind it MXNet knows no shape of a parameter either: to name these would help nobody.
    """
    _, heads = from_json(symbol_json.parse(symbol))
    order = depth_first(heads)
    entries = [(node, k) for node in order for k in range(node.noutputs)]
    _, inferred, _ = to_symbol(entries).infer_shape_partial(**shapes)
    known = {entry for entry, shape in zip(entries, inferred, strict=True) if shape_is_known(shape)}
    for node in order:
        outputs = {(node, k) for k in range(node.noutputs)}
        is_told = bool(node.inputs) and known.issuperset(node.inputs)
        if is_told and not outputs <= known and node.op not in _RETURNING:
            raise unknown_shape(node)
