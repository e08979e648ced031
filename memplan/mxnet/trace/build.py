"""From a network and its input shapes to a TrainingGraph, exactly as MXNet's executor builds it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import ArgumentError, TraceError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.arguments import (
    GradReq,
    complete_grad_req,
    infer_arguments,
)
from memplan.mxnet.trace.cse import merge_equal_nodes
from memplan.mxnet.trace.environment import current_match_range
from memplan.mxnet.trace.flops import flops
from memplan.mxnet.trace.form import STOCK, Form
from memplan.mxnet.trace.gradient import check_unique_names, training_graph
from memplan.mxnet.trace.inference import infer
from memplan.mxnet.trace.nnvm import (
    Attrs,
    Entry,
    EntryInfo,
    Infos,
    Node,
    depth_first,
    from_json,
)
from memplan.mxnet.trace.operators import CUDNN_OFF_BEFORE, ignored_inputs
from memplan.mxnet.trace.probe import handovers
from memplan.mxnet.trace.sizes import check_op
from memplan.mxnet.trace.sums import chain_sums
from memplan.step.graph import Op, Tensor, TrainingGraph

# NumPy has no bfloat16, the other dtype of MXNet's.
_DTYPES = frozenset("float16 float32 float64 int8 int32 int64 uint8 bool".split())


@dataclass(frozen=True)
class Trace:
    """A network as memplan sees it.

    ``graph`` is what strategies plan; ``nodes[i]`` is the MXNet node of op i, ``sources[i]`` the
    indices, in the JSON of ``symbol``, of the nodes it stands for (several where MXNet merges
    equal ones). ``symbol`` is the user's network without any force_mirroring attribute.
    ``shapes``, ``dtypes`` and ``grad_req`` are complete: one entry per argument (and auxiliary
    state, for the first two). ``heads`` are the entries of the network's outputs, then of the
    gradients in the order of the arguments, or of the updates by them; ``form`` is that of the
    realisation traced for. With ``numpy_shapes`` it was traced with NumPy's shapes, where () is
    that of a scalar.
    """

    symbol: mx.sym.Symbol
    graph: TrainingGraph
    nodes: tuple[Node, ...]
    sources: tuple[tuple[int, ...], ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    grad_req: Mapping[str, str]
    heads: tuple[Entry, ...]
    form: Form = STOCK
    numpy_shapes: bool = field(default_factory=mx.util.is_np_shape)

    @property
    def realisation(self) -> str:
        """The name of the realisation that this was traced for."""
        return self.form.name

    @property
    def spells_out_backward(self) -> bool:
        """Are gradients tensors of the graph, and outputs of what MXNet runs?"""
        return self.form.spells_out_backward

    @property
    def in_one_array(self) -> bool:
        """Do all tensors lie in one array?"""
        return self.form.in_one_array

    @property
    def updates(self) -> bool:
        """Are the parameters updated within the step, which leaves no gradients?"""
        return self.form.updates


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

    ``shapes`` names input shapes (Variables may carry others), ``type_dict`` dtypes; arguments
    without one are float32, as in ``simple_bind``. ``grad_req`` is that of ``bind``; None means
    what Module does: a gradient for every argument but the named inputs and those called
    ``…label``. Raises ArgumentError for shapes that are missing or wrong, TraceError for a
    network that cannot be differentiated, SizeError for one with an array that is too large for
    MXNet. Costs (``seconds``) are left at 0.

    ``form`` is that of a realisation; without one, the graph is that of MXNet's own executor.
    TraceError names an op that cannot be run in that form. ``device_type`` ("cpu" or "gpu") is
    where it will run.
    """
    check_symbol(net)
    symbol = without_flags(net)
    nodes, heads = from_json(symbol.tojson(remove_amp_cast=False))
    check_unique_names(nodes)
    known_shapes, known_dtypes = infer_arguments(symbol, shapes, type_dict)
    requests = complete_grad_req(symbol, shapes, grad_req)
    infer(heads, known_shapes, known_dtypes)
    _check_sizes(depth_first(heads))
    merged = merge_equal_nodes(list(heads))
    wanted = [name for name, request in requests.items() if request != "null"]
    full = form.rewritten(training_graph(merged, heads, wanted), device_type)
    _infer_step(full, known_shapes, known_dtypes)
    if form.spells_out_backward:
        chain_sums(full, len(merged), device_type)
    full = form.ended(full, len(merged), requests)
    order = form.ordered(_checked(full))
    outside = form.outside(full, len(merged), requests)
    fixed = _fixed_nbytes(full, _held(wanted, full[len(merged) :], requests, outside))
    graph = form.finished(_build(order, full, len(merged), fixed, form, outside), order)
    return Trace(
        symbol=symbol,
        graph=graph,
        nodes=tuple(order),
        sources=_sources(nodes, order[: graph.nforward]),
        shapes=known_shapes,
        dtypes=known_dtypes,
        grad_req=requests,
        heads=tuple(full),
        form=form,
    )


def check_symbol(net: Any) -> None:
    """ArgumentError for what is no Symbol."""
    if isinstance(net, mx.gluon.Block):
        raise ArgumentError(
            "memplan plans a Symbol, and this is a Gluon block: pass "
            "block(mx.sym.Variable('data')), ended by its loss, or train it by "
            "memplan.mxnet.gluon.TrainStep"
        )
    if not isinstance(net, mx.sym.Symbol):
        raise ArgumentError(f"memplan plans an mx.sym.Symbol, got {type(net).__name__}: {net!r}")


def without_flags(net: mx.sym.Symbol) -> mx.sym.Symbol:
    """A copy of ``net`` on which no op is flagged for mirroring, as it was before a mirror plan."""
    data = symbol_json.parse(net)
    for node in data["nodes"]:
        attrs = node.get("attrs", {})
        for name in ("__force_mirroring__", "force_mirroring"):
            attrs.pop(name, None)
        before = attrs.pop(CUDNN_OFF_BEFORE, None)
        if before == "":
            del attrs["cudnn_off"]
        elif before is not None:
            attrs["cudnn_off"] = before
    return symbol_json.load(data)


def _infer_step(
    full: Sequence[Entry], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]
) -> None:
    try:
        infer(full, shapes, dtypes)
    except MXNetError as error:
        raise TraceError(f"MXNet cannot infer the shapes of the training step: {error}") from error


def _checked(full: Sequence[Entry]) -> list[Node]:
    """The ops of the step, in the order of MXNet; an error for those that cannot be planned."""
    order = [node for node in depth_first(full) if not node.is_variable]
    _check_shapes(order)
    _check_sizes(order)
    return order


def _check_sizes(order: Sequence[Node]) -> None:
    for node in order:
        check_op(node)


def _check_shapes(order: Sequence[Node]) -> None:
    for node in order:
        if None in node.infos.outputs:
            raise TraceError(
                f"the shape of {node.name!r} ({node.op}) is not known before it runs, "
                f"so its memory cannot be planned; leave it out of the training network"
            )
        if any(info and info.dtype not in _DTYPES for info in node.infos.outputs):
            raise TraceError(
                f"{node.name!r} ({node.op}) computes in bfloat16, which memplan cannot plan; "
                f"use float16 or float32"
            )


def _build(
    order: list[Node],
    full: Sequence[Entry],
    noutputs: int,
    fixed: int,
    form: Form,
    outside: set[tuple[int, int]],
) -> TrainingGraph:
    index_of = {id(node): i for i, node in enumerate(order)}
    first: dict[int, int] = {}
    tensors: list[Tensor] = []
    for node in order:
        first[id(node)] = len(tensors)
        for k, info in enumerate(node.infos.outputs):
            name = f"{node.name}[{k}]"
            if info is None or (id(node), k) in outside:
                tensors.append(Tensor(name, 0, 0))
            else:
                tensors.append(Tensor(name, info.nbytes, info.nelements))
    forward = depth_first(full[:noutputs])
    repeatable = form.repeatable(forward, order)
    ops = tuple(_op(node, index_of, first, node in repeatable, outside) for node in order)
    heads = tuple(first[id(node)] + k for node, k in full if not node.is_variable)
    nforward = sum(not node.is_variable for node in forward)
    return TrainingGraph(ops, tuple(tensors), heads, nforward, fixed, current_match_range())


def _op(
    node: Node,
    index_of: Mapping[int, int],
    first: Mapping[int, int],
    recomputable: bool,
    outside: set[tuple[int, int]],
) -> Op:
    ignored = ignored_inputs(node)
    place_of: dict[int, int] = {}
    inputs: list[int] = []
    after = []
    for place, (source, k) in enumerate(node.inputs):
        if source.is_variable:
            continue
        if place in ignored:
            after.append(index_of[id(source)])
        else:
            place_of[place] = len(inputs)
            inputs.append(first[id(source)] + k)
    after += [index_of[id(source)] for source in node.control]
    infos = node.infos
    return Op(
        name=node.name,
        kind=node.op,
        inputs=tuple(inputs),
        outputs=tuple(first[id(node)] + k for k in range(node.noutputs)),
        recomputable=recomputable,
        differentiates=None if node.forward is None else index_of[id(node.forward)],
        after=tuple(after),
        handovers=tuple(
            handover._replace(input=place_of[handover.input])
            for handover in handovers(node, infos.inputs, infos.outputs)
            if handover.input in place_of and (id(node), handover.output) not in outside
        ),
        flops=flops(node),
        traffic_nbytes=_traffic_nbytes(infos.inputs) + _traffic_nbytes(infos.outputs),
        signature=signature(node),
        mirror_stage=node.attrs.get("__mirror_stage__"),
    )


def signature(node: Node) -> str:
    """Operator, attributes, shapes and dtypes: ops with equal ones take equal time."""
    return _signature(node.op, node.key, node.infos)


@lru_cache(maxsize=4096)
def _signature(op: str, attrs: Attrs, infos: Infos) -> str:
    entries = [
        [None if info is None else [*info.shape, info.dtype] for info in of_side]
        for of_side in (infos.inputs, infos.outputs)
    ]
    return json.dumps([op, dict(attrs), *entries], sort_keys=True, separators=(",", ":"))


def _traffic_nbytes(infos: Sequence[EntryInfo | None]) -> int:
    return sum(info.nbytes for info in infos if info is not None)


def _held(
    wanted: Sequence[str],
    gradients: Sequence[Entry],
    requests: Mapping[str, str],
    outside: set[tuple[int, int]],
) -> list[str]:
    """The arguments with an array for the gradient beside the step.

    Gradients that are outputs of the step are none, but for those that are added to.
    """
    return [
        name
        for name, (node, k) in zip(wanted, gradients, strict=True)
        if requests[name] == "add" or (id(node), k) in outside
    ]


def _fixed_nbytes(full: Sequence[Entry], with_gradient: Collection[str]) -> int:
    """Bytes of arguments, auxiliary states, given head gradients and arrays for gradients.

    ``with_gradient`` names the arguments with such an array.
    """
    total = 0
    for node in depth_first(full):
        info = node.infos.outputs[0] if node.is_variable else None
        if info is not None:
            total += info.nbytes * (2 if node.name in with_gradient else 1)
    return total


def _sources(nodes: Sequence[Node], order: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """For each forward op, the JSON nodes that it stands for: itself and those merged into it."""
    index = {id(node): i for i, node in enumerate(nodes)}

    def stands_for(node: Node) -> list[int]:
        found = [index[id(node)]] if id(node) in index else []
        return found + [i for other in node.merged for i in stands_for(other)]

    return tuple(tuple(stands_for(node)) for node in order)
