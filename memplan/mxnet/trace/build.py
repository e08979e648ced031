"""From a network and its input shapes to a TrainingGraph, exactly as MXNet's executor builds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.arguments import GradReq, complete_grad_req, infer_arguments, wanted
from memplan.mxnet.trace.core_graph import core_graph
from memplan.mxnet.trace.cse import merge_equal_nodes
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.flags import without_flags
from memplan.mxnet.trace.form import STOCK, Form
from memplan.mxnet.trace.gradient import check_unique_names, output_of, training_graph
from memplan.mxnet.trace.inference import infer
from memplan.mxnet.trace.misinferred import check_flat_parts, check_operators, check_without_onednn
from memplan.mxnet.trace.nnvm import Attrs, Entry, Node, depth_first, from_json
from memplan.mxnet.trace.operators import overwrites_what_it_reads
from memplan.mxnet.trace.shared_gradients import check_shared_gradients
from memplan.mxnet.trace.states import check_gammas
from memplan.mxnet.trace.stock_order import stock_order, with_states_in_order
from memplan.mxnet.trace.sums import OLD_GRADIENT, chain_sums
from memplan.mxnet.trace.too_large import check_op
from memplan.mxnet.trace.unknown_shapes import unknown_shape
from memplan.step.graph import TrainingGraph

# NumPy has no bfloat16, the other dtype of MXNet's.
_DTYPES = frozenset("float16 float32 float64 int8 int32 int64 uint8 bool".split())


@dataclass(frozen=True, eq=False)  # as its nodes; Symbols cannot be compared
class Trace:
    """A network as memplan sees it.

    ``graph`` is what strategies plan; ``nodes[i]`` is the MXNet node of op i, ``sources[i]`` the
    indices, in the JSON of ``symbol``, of the nodes it stands for (several where MXNet merges
    equal ones). ``symbol`` is the user's network without any force_mirroring attribute.
    ``shapes``, ``dtypes`` and ``grad_req`` are complete: one entry per argument (and auxiliary
    state, for the first two). ``heads`` are the entries of the network's outputs, then of the
    gradients in the order of the arguments, or of the updates by them. ``stock_order`` are the ops
    in the order in which MXNet's own executor would run them. ``form`` is that of the realisation
    traced for, ``device_type`` where it will run. With ``numpy_shapes`` it was traced with NumPy's
    shapes, where () is that of a scalar; with ``by_onednn`` MXNet used oneDNN on a CPU.
    """

    symbol: mx.sym.Symbol
    graph: TrainingGraph
    nodes: tuple[Node, ...]
    sources: tuple[tuple[int, ...], ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    grad_req: Mapping[str, str]
    heads: tuple[Entry, ...]
    stock_order: tuple[int, ...]
    form: Form
    device_type: str
    numpy_shapes: bool = field(default_factory=mx.util.is_np_shape)
    by_onednn: bool = field(default_factory=onednn_is_enabled)

    @property
    def head_grads(self) -> dict[int, Node]:
        """The variables for the gradients of outputs that are no losses, by the output's place."""
        others = (node for node in self._variables() if OLD_GRADIENT not in node.attrs)
        gradients = (node for node in others if node.name not in self.shapes)
        return dict(sorted((output_of(node), node) for node in gradients))

    @property
    def old_gradients(self) -> dict[str, Node]:
        """The variables for gradients as they were before the step adds to them, by argument."""
        variables = (node for node in self._variables() if OLD_GRADIENT in node.attrs)
        return {node.attrs[OLD_GRADIENT]: node for node in variables}

    def _variables(self) -> Iterator[Node]:
        return (node for node in depth_first(self.heads) if node.is_variable)

    @property
    def outputs_without_loss(self) -> list[str]:
        """The outputs whose gradients must come from outside."""
        return [self.symbol.list_outputs()[place] for place in self.head_grads]

    @property
    def output_tensors(self) -> tuple[int, ...]:
        """The tensors among the network's outputs: a variable among these is none."""
        outputs = self.heads[: len(self.symbol.list_outputs())]
        return self.graph.heads[: sum(not node.is_variable for node, _ in outputs)]


def trace(
    net: mx.sym.Symbol,
    *,
    shapes: Mapping[str, Sequence[int]],
    type_dict: Mapping[str, Any] | None = None,
    grad_req: GradReq = None,
    form: Form = STOCK,
    device_type: str = "cpu",
) -> Trace:
    """The training graph of ``net``.

    ``shapes`` names input shapes (Variables may carry others), ``type_dict`` dtypes. With None for
    it, arguments are float32; else those of others are inferred, as in ``simple_bind``.
    ``grad_req`` is that of ``bind``; None means what Module does: a gradient for every argument but
    the named inputs and those called ``…label``. Raises ArgumentError for shapes that are missing
    or wrong, TraceError for a network that cannot be differentiated, SizeError for one with an
    array that is too large for MXNet. Costs (``seconds``) are left at 0.

    ``form`` is that of a realisation; without one, the graph is that of MXNet's own executor.
    TraceError names an op that cannot be run in that form. ``device_type`` ("cpu" or "gpu") is
    where it will run.
    """
    symbol = without_flags(net)
    nodes, heads = from_json(symbol_json.parse(symbol))
    check_unique_names(nodes)
    check_operators(nodes)
    known_shapes, known_dtypes = infer_arguments(symbol, shapes, type_dict)
    check_flat_parts(nodes, shapes)
    requests = complete_grad_req(symbol, shapes, grad_req)
    _infer("network", heads, known_shapes, known_dtypes)
    check_without_onednn(depth_first(heads), device_type)
    for node in depth_first(heads):
        check_op(node)
    outputs = merge_equal_nodes(list(heads))
    check_gammas(depth_first(outputs), outputs)
    full = training_graph(outputs, heads, wanted(requests))
    stock = depth_first(full)
    full = form.rewritten(full, device_type)
    _infer("training step", full, known_shapes, known_dtypes)
    if form.spells_out_backward:
        added = _added(full[len(outputs) :], requests)
        chain_sums(full, len(outputs), device_type, in_one_array=form.in_one_array, added=added)
    full = form.ended(full, len(outputs), requests)
    forward = {node for node in depth_first(full[: len(outputs)]) if not node.is_variable}
    order = form.ordered(with_states_in_order(_checked(full), stock), forward)
    graph = core_graph(order, full, len(outputs), form, requests)
    in_stock_order = stock_order(graph, order, stock)
    graph = form.finished(graph, order, in_stock_order, device_type)
    _share_attributes(full)
    known_shapes, known_dtypes, requests = _by_names(nodes, known_shapes, known_dtypes, requests)
    return Trace(
        symbol=symbol,
        graph=graph,
        nodes=tuple(order),
        sources=_sources(nodes, order[: graph.nforward]),
        shapes=known_shapes,
        dtypes=known_dtypes,
        grad_req=requests,
        heads=tuple(full),
        stock_order=in_stock_order,
        form=form,
        device_type=device_type,
    )


def _infer(
    what: str,
    heads: Sequence[Entry],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
) -> None:
    """Let MXNet infer ``what`` stands behind ``heads``; TraceError where it cannot."""
    try:
        infer(heads, shapes, dtypes)
    except MXNetError as error:
        reason = str(error).strip()
        raise TraceError(f"MXNet cannot infer the shapes of the {what}: {reason}") from error


def _checked(full: Sequence[Entry]) -> list[Node]:
    """The ops of the step, in the order of MXNet; an error for those that cannot be planned."""
    order = [node for node in depth_first(full) if not node.is_variable]
    for node in order:
        if None in node.infos.outputs:
            raise unknown_shape(node)
        if any(info and info.dtype not in _DTYPES for info in node.infos.outputs):
            raise TraceError(
                f"{node.name!r} ({node.op}) computes in bfloat16, which memplan cannot plan; "
                f"use float16 or float32"
            )
        if node.forward is not None and overwrites_what_it_reads(node.forward):
            raise TraceError(
                f"{node.forward.name!r} ({node.forward.op}) has out_grad=True, with which MXNet "
                f"ignores the gradient of its output, and computes one that depends on the memory "
                f"that it runs in; leave out_grad out, or compute the loss yourself, for MakeLoss"
            )
        check_op(node)
    check_shared_gradients(order, full)
    return order


def _added(gradients: Sequence[Entry], requests: Mapping[str, str]) -> dict[Entry, str]:
    """The gradients that are added up, and of which argument each is."""
    pairs = zip(gradients, wanted(requests), strict=True)
    return {entry: name for entry, name in pairs if requests[name] == "add"}


def _by_names(nodes: Sequence[Node], *mappings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """These by the names that the nodes have: MXNet makes others each time it is asked for them."""
    names = {node.name: node.name for node in nodes}
    return [{names.get(name, name): mapping[name] for name in mapping} for mapping in mappings]


def _share_attributes(full: Sequence[Entry]) -> None:
    """Give nodes whose attributes are equal the same ones: a plan keeps thousands of nodes."""
    shared: dict[Attrs, dict[str, str]] = {}
    for node in depth_first(full):
        node.attrs = shared.setdefault(tuple(node.attrs.items()), node.attrs)


def _sources(nodes: Sequence[Node], order: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """For each forward op, the JSON nodes that it stands for: itself and those merged into it."""
    index = {node: i for i, node in enumerate(nodes)}
    return tuple(tuple(_stands_for(node, index)) for node in order)


def _stands_for(node: Node, index: Mapping[Node, int]) -> list[int]:
    indices = [index[node]] if node in index else []
    return indices + [i for other in node.duplicates for i in _stands_for(other, index)]
