"""Ops whose outputs have shapes that nobody knows before they run, which no plan can count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.bodies import bodies
from memplan.mxnet.trace.nnvm import (
    Entry,
    Node,
    depth_first,
    from_json,
    shape_is_known,
    to_symbol,
)
from memplan.mxnet.trace.operators import COND, FOREACH, WHILE_LOOP

# Of what these return MXNet infers nothing either, and memplan does later, unless they are within a
# foreach: of what that returns MXNet infers all by itself, or nothing.
_RETURNING = (COND, WHILE_LOOP)

_Shape = Sequence[int]


def unknown_shape(node: Node) -> TraceError:
    """The error for ``node``, whose inputs are known, and some output is not."""
    return _error(_chain(node, [info.shape if info else () for info in node.infos.inputs]))


def check_unknown(symbol: mx.sym.Symbol, shapes: Mapping[str, _Shape]) -> None:
    """TraceError for an op of ``symbol`` that has inputs, all known by ``shapes``, and outputs not.

    Behind it MXNet knows no shape of a parameter either: to name these would help nobody.
    """
    _, heads = from_json(symbol_json.parse(symbol))
    for node, inputs in _untold(heads, shapes):
        chain = _chain(node, inputs)
        if len(chain) > 1 or node.op not in _RETURNING:
            raise _error(chain)


def _error(chain: Sequence[Node]) -> TraceError:
    """The error for the last op of ``chain``, each of which runs the next one."""
    node = chain[-1]
    around = [f"which {other.name!r} ({other.op}) runs" for other in chain[-2::-1]]
    named = ", ".join([f"{node.name!r} ({node.op})", *around]) + "," * bool(around)
    return TraceError(
        f"the shape of {named} is not known before it runs, "
        f"so its memory cannot be planned; {_advice(chain)}"
    )


def _advice(chain: Sequence[Node]) -> str:
    node, leave_out = chain[-1], "leave it out of the training network"
    if any(one.op == FOREACH and other.op in _RETURNING for one, other in pairwise(chain)):
        return f"write the loop around it in Python, or {leave_out}"
    if not node.op.startswith("_np") or mx.util.is_np_shape():
        return leave_out
    return (
        f"without NumPy semantics MXNet takes the shape () for an unknown one, and an op of mx.np "
        f"may have it in an output that nobody reads: call mx.npx.set_np() first, or {leave_out}"
    )


def _chain(node: Node, inputs: Sequence[_Shape]) -> list[Node]:
    """``node`` and, if it runs the op that makes its outputs unknown, that one, and so on."""
    for body, places in bodies(node):
        _, heads = from_json(body)
        names = [inner.name for inner in depth_first(heads) if inner.is_variable]
        shapes = [_within(node, place, inputs[place]) for place in places]
        try:
            untold = _untold(heads, dict(zip(names, shapes, strict=True)))
        except MXNetError:  # the shapes do not fit, which is said where those of the step are
            continue
        for inner, inner_inputs in untold:
            return [node, *_chain(inner, inner_inputs)]
    return [node]


def _within(node: Node, place: int, shape: _Shape) -> _Shape:
    """The shape in which the body of ``node`` gets the input at ``place``, of this ``shape``."""
    if node.op == FOREACH and place < len(Attributes(node).numbers("in_data_locs")):
        return shape[1:] if len(shape) > 1 or mx.util.is_np_shape() else (1,)
    return shape


def _untold(
    heads: Sequence[Entry], shapes: Mapping[str, _Shape]
) -> list[tuple[Node, list[_Shape]]]:
    """The ops whose inputs are known, and some output is not, with the shapes of the inputs."""
    order = depth_first(heads)
    entries = [(node, k) for node in order for k in range(node.noutputs)]
    _, inferred, _ = to_symbol(entries).infer_shape_partial(**shapes)
    pairs = zip(entries, inferred, strict=True)
    known = {entry: shape for entry, shape in pairs if shape_is_known(shape)}
    return [
        (node, [known[entry] for entry in node.inputs])
        for node in order
        if node.inputs
        and all(entry in known for entry in node.inputs)
        and not all((node, k) in known for k in range(node.noutputs))
    ]
