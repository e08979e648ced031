"""Loss operators: those that give gradients whatever the gradients of their outputs are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from memplan.errors import TraceError
from memplan.mxnet.trace.gradient import ZERO_OPS
from memplan.mxnet.trace.nnvm import Attrs, Node, from_json, variables
from memplan.mxnet.trace.op_gradient import gradient
from memplan.mxnet.trace.operators import may_ignore_gradients, runs_user_code, writes_zeros

# Of what the gradient of an input is computed.
_NOTHING, _OUTPUTS, _VALUES = "nothing: it is zeros", "gradients of outputs", "values alone"


def is_loss(node: Node) -> bool:
    """May ``node`` give gradients that are no zeros where those of its outputs are?

    Of a Custom op only the script's code says so. A loop is one if an op of its body is.
    """
    if not node.inputs or writes_zeros(node):
        return False
    if node.subgraphs:
        return any(is_loss(inner) for graph in node.subgraphs for inner in from_json(graph)[0])
    return may_ignore_gradients(node) or _VALUES in _sources(node)


def has_gradient(node: Node, place: int) -> bool:
    """May ``node`` give its input at this ``place`` a gradient that is no zeros?"""
    if node.subgraphs or runs_user_code(node.op):
        return True
    return not writes_zeros(node) and _sources(node)[place] != _NOTHING


def _sources(node: Node) -> tuple[str, ...]:
    return _sources_of_call(node.op, node.key, len(node.inputs), node.noutputs)


@lru_cache(maxsize=4096)
def _sources_of_call(op: str, attrs: Attrs, ninputs: int, noutputs: int) -> tuple[str, ...]:
    """Of what the gradient of each input is computed."""
    call = Node(op, "asked", dict(attrs), variables("in", ninputs), noutputs=noutputs)
    try:
        template = gradient(call, [False] * noutputs)
    except TraceError:  # it has none: where that matters, tracing says so
        return (_NOTHING,) * ninputs
    of_nodes: list[str] = []
    for node in template.nodes:
        is_zero = node.op in ZERO_OPS or node.op == "_NoGradient"
        of_nodes.append(_NOTHING if is_zero else _together(node.inputs, of_nodes))
    return tuple(_together([entry], of_nodes) for entry in template.gradients)


def _together(entries: Iterable[tuple[Any, ...]], of_nodes: Sequence[str]) -> str:
    """Of what is computed what reads these ``entries`` of a Template."""
    kinds = {
        of_nodes[number] if kind == "node" else _OUTPUTS if kind == "ograd" else _VALUES
        for kind, number, *_ in entries
    }
    return _OUTPUTS if _OUTPUTS in kinds else _NOTHING if kinds == {_NOTHING} else _VALUES
