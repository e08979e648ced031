"""MXNet's full training graph of a network, node by node, as the executor builds it.

Follows GraphExecutor::InitFullGraph and the pass MXGradient (src/executor/graph_executor.cc,
src/nnvm/gradient.cc, tag 1.9.1) for a network without mirroring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memplan.errors import TraceError
from memplan.mxnet.trace.environment import fewest_summed_in_place
from memplan.mxnet.trace.nnvm import (
    VARIABLE,
    Entry,
    Node,
    copy_repeats,
    depth_first,
    is_hidden,
)
from memplan.mxnet.trace.op_gradient import CALL, Template, gradient
from memplan.mxnet.trace.operators import COND, is_made_of_symbol

# Operators whose gradient MXNet treats as known to be zero.
ZERO_OPS = frozenset({"_zeros", "zeros_like"})

_UNSHAPED_ZEROS = "_zeros_without_dtype"

# The variables for gradients of outputs are called so, with the place of the output behind, and
# more before where the network has variables that are called so.
_HEAD_GRAD = "_head_grad_"


@dataclass
class _Gradients:
    """The gradients of one entry; their sum is asked for once all have arrived."""

    parts: list[Entry]

    @cached_property
    def total(self) -> Entry:
        """Their sum, as GraphExecutor's AggregateGradient makes it."""
        return _aggregate(self.parts)


def training_graph(
    outputs: Sequence[Entry],
    losses: Sequence[Entry],
    variables: Collection[str],
) -> list[Entry]:
    """Heads of the full graph: ``outputs``, then the gradient of each of these ``variables``.

    ``losses`` are the entries to differentiate, one per output: MXNet takes those of the network
    before equal nodes were merged. The gradients come in the order of the network's arguments.
    The forward nodes are used, not copied.
    """
    order = depth_first(losses)
    arguments = [node for node in order if node.is_variable and node.name in variables]
    grads: defaultdict[Entry, _Gradients] = defaultdict(lambda: _Gradients([]))
    prefix = _HEAD_GRAD
    while any(node.is_variable and node.name.startswith(prefix) for node in order):
        prefix = f"_{prefix}"
    for i, ((node, k), like) in enumerate(zip(losses, outputs, strict=True)):
        head = Node(VARIABLE, f"{prefix}{i}")
        hint = Node("_identity_with_attr_like_rhs", f"{head.name}_id", inputs=[(head, 0), like])
        grads[node, k].parts = [(hint, 0)]
    for node in reversed(order):
        if node.is_variable or not node.inputs:
            continue
        ograds = [grads[node, k].total for k in range(node.noutputs)]
        template = gradient(node, [source.op in ZERO_OPS for source, _ in ograds])
        if is_made_of_symbol(node):
            ograds = [_with_shape(ograd, (node, k)) for k, ograd in enumerate(ograds)]
        for (source, k), part in zip(
            node.inputs, _instantiate(template, node, ograds), strict=True
        ):
            grads[source, k].parts.append(part)
    totals = [grads[node, 0].total for node in arguments]
    return [*outputs, *copy_repeats(totals, first=1)]


def output_of(head_grad: Node) -> int:
    """The place of the output of whose gradient this is the variable."""
    return int(head_grad.name.rpartition("_")[2])


def _instantiate(template: Template, node: Node, ograds: Sequence[Entry]) -> list[Entry]:
    nodes: list[Node] = []
    outputs = [(node, k) for k in range(node.noutputs)]
    entries: dict[str, Sequence[Entry]] = {"in": node.inputs, "out": outputs, "ograd": ograds}

    def entry(item: tuple[Any, ...]) -> Entry:
        kind, index, *output = item
        return entries[kind][index] if kind in entries else (nodes[index], output[0])

    for part in template.nodes:
        nodes.append(
            Node(
                part.op,
                part.name.replace(CALL, node.name),
                {k: node.attrs.get(k, v) if is_hidden(k) else v for k, v in part.attrs},
                [entry(item) for item in part.inputs],
                (node,) if part.waits else (),
                part.noutputs,
                forward=node,
            )
        )
    return [entry(item) for item in template.gradients]


def _with_shape(ograd: Entry, output: Entry) -> Entry:
    """Zeros for those of a shape that MXNet would infer from an op of which it reads no JSON."""
    if ograd[0].op != _UNSHAPED_ZEROS:
        return ograd
    return (Node("zeros_like", f"{output[0].name}_zeros{output[1]}", inputs=[output]), 0)


def _aggregate(parts: list[Entry]) -> Entry:
    if not parts:
        return (Node(_UNSHAPED_ZEROS, "zeros_without_dtype"), 0)
    parts = [part for part in parts if part[0].op not in ZERO_OPS] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    if len(parts) < fewest_summed_in_place():
        return (Node("add_n", "sum_grad", {"num_args": str(len(parts))}, list(parts)), 0)
    total = parts[0]
    for i, part in enumerate(parts[1:], 1):
        if parts[i - 1][0] is not part[0]:
            part[0].control += (total[0],)
        total = (Node("_grad_add", f"sum_grad_{i}", inputs=[total, part]), 0)
    return (Node("_copy", "sum_grad_final", inputs=[total]), 0)


def check_unique_names(order: Sequence[Node]) -> None:
    """Raises TraceError if two variables share a name: MXNet could not tell them apart."""
    names: set[str] = set()
    for node in order:
        if node.is_variable:
            if node.name in names:
                _refuse_two(order, node.name)
            names.add(node.name)


def _refuse_two(order: Sequence[Node], name: str) -> None:
    """TraceError for two variables of this ``name``: a loop or branch may have made one."""
    reading = [n for n in order if n.subgraphs and any(v.name == name for v, _ in n.inputs)]
    remedy = "; rename one"
    if reading:
        owner = min(reading, key=lambda node: node.op != COND)
        advice = "let one loop read the parameter, and nothing else"
        if owner.op == COND:
            advice = (
                "compute a and b, of which its branches are, before it, and write "
                "F.where(F.broadcast_mul(F.ones_like(a), condition), a, b) for the cond"
            )
        remedy = (
            f": op {owner.name!r} ({owner.op}) makes one of its own for what it reads, beside that "
            f"by which others read it; {advice}"
        )
    raise TraceError(f"two different variables are both named {name!r}{remedy}")
