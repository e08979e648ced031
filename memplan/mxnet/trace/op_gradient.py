"""The gradient of one op, by MXNet's own registry: nothing here knows what an operator computes.

Wraps the few calls of the C API that MXNet's own Python does not offer.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, MXNetError, check_call

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.nnvm import (
    VARIABLE,
    Attrs,
    Entry,
    Node,
    from_json,
    is_hidden,
    output_of,
    to_symbol,
    variables,
)
from memplan.mxnet.trace.said import said

CALL = "<op>"

_BACKWARD = "_backward_"


@dataclass(frozen=True)
class Template:
    """The gradient of one op, over placeholders: input i, output k of the op, output gradient k.

    ``nodes`` are in depth-first order; entries in them are ("in", i), ("out", k), ("ograd", k)
    or ("node", n, k). ``gradients[i]`` is the entry of the gradient of input i.
    """

    nodes: tuple[TemplateNode, ...]
    gradients: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class TemplateNode:
    """One node of a Template; ``waits`` tells whether it has a control dependency on the op.

    In ``name``, CALL stands for the name of the op. The value of an attribute that operators do not
    see is that of the op.
    """

    op: str
    name: str
    attrs: Attrs
    inputs: tuple[tuple[Any, ...], ...]
    waits: bool
    noutputs: int


def gradient(node: Node, zero_ograds: Sequence[bool]) -> Template:
    """The gradient of ``node``'s op by MXNet's registry (pass MXGradient).

    ``zero_ograds[k]`` tells whether the gradient of output k is known to be zero, which some
    operators look at. Raises TraceError if the op has no gradient.
    """
    try:
        return _gradient(
            node.op,
            # Hints differ from op to op where all that tells what is computed is equal.
            tuple(sorted((k, "" if is_hidden(k) else v) for k, v in node.attrs.items())),
            json.dumps(node.subgraphs),
            len(node.inputs),
            node.noutputs,
            tuple(zero_ograds),
        )
    except MXNetError as error:
        reason = said(error).rstrip(".")
        if all(zero_ograds) and "didn't register FGradient" in reason:
            return _zeros(len(node.inputs))
        raise TraceError(
            f"op {node.name!r} ({node.op}) cannot be differentiated: {reason}. {_advice(node)}"
        ) from error


def _advice(node: Node) -> str:
    """What to do about an op that MXNet cannot differentiate."""
    if node.op.startswith(_BACKWARD):
        return (
            "This Symbol has backward ops, as that of a packed, explicit or updating plan, which "
            "is the whole step; give the network itself. By such a plan trains "
            "memplan.mxnet.Module(net, plan=plan)."
        )
    return "Wrap its output in BlockGrad, or leave it out of the training network."


def _zeros(ninputs: int) -> Template:
    """The gradient, all zero, that an op without one has where its output gradients are zero."""
    nodes = tuple(
        TemplateNode(
            op="zeros_like",
            name=f"{CALL}_backward" if ninputs == 1 else f"{CALL}_in{i}_backward",
            attrs=(),
            inputs=(("in", i),),
            waits=True,
            noutputs=1,
        )
        for i in range(ninputs)
    )
    return Template(nodes, tuple(("node", i, 0) for i in range(ninputs)))


@lru_cache(maxsize=4096)
def _gradient(
    op: str, attrs: Attrs, subgraphs: str, ninputs: int, noutputs: int, zero: tuple[bool, ...]
) -> Template:
    inputs, graphs = variables("in", ninputs), json.loads(subgraphs)
    call = Node(op, CALL, dict(attrs), inputs, noutputs=noutputs, subgraphs=graphs)
    ys = to_symbol([(call, k) for k in range(noutputs)])
    xs = output_of(ys, 0).get_children()  # in the op's order, repeated ones as well
    # A zero needs a shape attribute only to be parsed; the placeholder is replaced later.
    # By JSON: AMP puts its own functions in the place of mx.sym's.
    zeros = {"shape": "(1,)"}
    ograds = to_symbol(
        [
            (Node("_zeros", f"ograd{k}", zeros) if z else Node(VARIABLE, f"ograd{k}"), 0)
            for k, z in enumerate(zero)
        ]
    )
    nodes, heads = from_json(symbol_json.parse(_apply_gradient_pass(ys, xs, ograds)))
    # The name alone does not tell: _backward_Custom has that of its op.
    calls = [n for n in nodes if n.op == op and n.name == CALL]
    parts = [n for n in nodes if not (n.is_variable or n in calls or n.name.startswith("ograd"))]
    index = {n: i for i, n in enumerate(parts)}

    def entry(item: Entry) -> tuple[Any, ...]:
        source, k = item
        if source in calls:
            return ("out", k)
        if source.name.startswith("ograd"):
            return ("ograd", int(source.name[5:]))
        if source.is_variable:
            return ("in", int(source.name[2:]))
        return ("node", index[source], k)

    return Template(
        tuple(
            TemplateNode(
                n.op,
                n.name,
                tuple(n.attrs.items()),
                tuple(map(entry, n.inputs)),
                any(c in calls for c in n.control),
                n.noutputs,
            )
            for n in parts
        ),
        tuple(map(entry, heads)),
    )


def _apply_gradient_pass(
    ys: mx.sym.Symbol, xs: mx.sym.Symbol, ograds: mx.sym.Symbol
) -> mx.sym.Symbol:
    graph = ctypes.c_void_p()
    check_call(_LIB.NNGraphCreate(ys.handle, ctypes.byref(graph)))
    result = ctypes.c_void_p()
    try:
        for name, entries in (("grad_ys", ys), ("grad_xs", xs), ("grad_ys_out_grad", ograds)):
            check_call(_LIB.NNGraphSetNodeEntryListAttr_(graph, name.encode(), entries.handle))
        passes = (ctypes.c_char_p * 1)(b"MXGradient")
        check_call(_LIB.NNGraphApplyPasses(graph, 1, passes, ctypes.byref(result)))
        symbol = ctypes.c_void_p()
        check_call(_LIB.NNGraphGetSymbol(result, ctypes.byref(symbol)))
        return mx.sym.Symbol(symbol)
    finally:
        for handle in (graph, result):
            if handle.value:
                check_call(_LIB.NNGraphFree(handle))
