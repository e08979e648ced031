"""Binds a Symbol as it stands: MXNet rewrites nothing, and shares memory where it is told to."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import UsageError
from memplan.mxnet.realise.in_place import MOST_DIMENSIONS_OF_SLICES, kept_in_training
from memplan.mxnet.realise.kept_operators import KeptOperators, Key, keys
from memplan.mxnet.realise.workspace import OneWorkspace
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.environment import match_range as under
from memplan.mxnet.trace.nnvm import VARIABLE, Node
from memplan.mxnet.trace.operators import (
    COND,
    CUSTOM,
    RECURRENT,
    WHILE_LOOP,
    ignored_inputs,
    runs_user_code,
)
from memplan.mxnet.trace.probe import counts_as_backward

NDArray = Any
JSON = dict[str, Any]
Arrays = Mapping[str, NDArray]

# Says where an op runs: MXNet aborts if it must find out for an op that counts as a backward op,
# but has no control dependencies.
PLACED = {"__ctx_group__": "memplan"}

# The names of what inference has beside the ops of the network begin so.
READER = "memplan_reads_"

# The one argument of an executor for inference that has a gradient, where it has one.
WANTED = f"{READER}wanted"


@dataclass(frozen=True)
class ArraysToBind:
    """What a Symbol is bound to: arrays on a device, by name, and what it shares with others.

    What it computes lies in the memory of ``pool``, as far as that reaches: of two executors that
    share it, running one overwrites the outputs of the other. Custom ops are run by the objects in
    ``operators``, or by new ones.
    """

    ctx: mx.Context
    args: Arrays
    aux_states: Arrays
    pool: mx.executor.Executor | None = None
    operators: KeptOperators | None = None


def bind_as_it_stands(
    symbol: mx.sym.Symbol, arrays: ArraysToBind, *, match_range: int | None = None
) -> mx.executor.Executor:
    """Bind ``symbol`` without gradients, and keep MXNet from rewriting it.

    MXNet's allocator works under NNVM_EXEC_MATCH_RANGE ``match_range`` (None: as the process has
    set it).

    A graph without gradients looks like inference to MXNet's subgraph backend (CPU) and pointwise
    fusion (GPU), which would join ops across the schedule. Both look at the context of the call
    only: bound to another one than the arrays are on, the ops run untouched where these are. Ops
    without control dependencies must be :data:`PLACED`. So may others: what the user's
    AttrScope(ctx_group=...) has placed runs on the device, too.

    All that is bound here computes in one temporary space, as packed steps do: MXNet gives each
    executor the next of several, which stay as large as they were once.
    """
    names = symbol.list_arguments()
    wanted = {WANTED: mx.nd.zeros(1, arrays.ctx)} if WANTED in names else {}
    args = {**arrays.args, **wanted}
    operators = arrays.operators
    kept = contextlib.nullcontext() if operators is None else operators.for_ops(_user_ops(symbol))
    with under(match_range), kept:
        OneWorkspace(arrays.ctx).begin()
        return symbol.bind(
            mx.cpu(1),
            {name: args[name] for name in names},
            args_grad=wanted,
            grad_req={name: "write" if name in wanted else "null" for name in names},
            aux_states={name: arrays.aux_states[name] for name in symbol.list_auxiliary_states()},
            group2ctx=dict.fromkeys(_groups(symbol), arrays.ctx),
            shared_exec=arrays.pool,
        )


def bind_inference(
    symbol: mx.sym.Symbol, arrays: ArraysToBind, *, traced: Trace | None = None
) -> mx.executor.Executor:
    """Bind a network for inference as it runs in an executor that is bound to train.

    With oneDNN the last bits are those of that executor only where ``traced`` tells how it trains.
    UsageError for a network that MXNet runs, but cannot bind.
    """
    data = symbol_json.parse(symbol)
    by_onednn = is_by_onednn(arrays.ctx.device_type)
    if traced is not None and by_onednn:
        _keep_as_in_training(data, traced)
    if by_onednn:
        _want_a_gradient(data)
    _read_means(data)
    _read_pooled(data)
    for node in data["nodes"]:
        if node["op"] != VARIABLE and not runs_user_code(node["op"]):
            node.setdefault("attrs", {}).update(PLACED)
    symbol = symbol_json.load(data)
    try:
        return bind_as_it_stands(symbol, arrays)
    except MXNetError as error:
        why = why_unbound(symbol, "infer by mx.gluon.SymbolBlock, with parameters of given shapes")
        if not why:
            raise
        raise UsageError(
            f"MXNet cannot bind the network to infer by it.{why} MXNet says: {error}"
        ) from error


def why_unbound(symbol: mx.sym.Symbol, advice: str) -> str:
    """Why MXNet may run ``symbol``, but cannot bind it, and this ``advice``; else nothing."""
    text = symbol_json.text_of(symbol)
    if all(f'"{op}"' not in text for op in (WHILE_LOOP, COND)):
        return ""
    return (
        f" Its executors do not know the shape of what a while_loop or a cond returns, so they "
        f"cannot add what is computed of it, or its gradient, to some arrays: {advice}."
    )


def _keep_as_in_training(data: JSON, traced: Trace) -> None:
    """Have ops write over nothing that they leave as it is in training.

    There the backward pass reads it. Here an op reads it that runs right after them: before the
    next op, of those that MXNet merges with no earlier one. That is a slice: oneDNN reads any of
    its layouts, where another op would have a copy of the array, as one has that reads what is in
    the layout of another shape, or has too many dimensions for MXNet's slices.
    """
    nodes, graph = data["nodes"], traced.graph
    first = [next(iter(sources), None) for sources in traced.sources]
    ranked = sorted((place, op) for op, place in enumerate(first) if place is not None)
    kept = kept_in_training(graph, traced.nodes, traced.stock_order)
    for op, tensor in ((op, tensor) for op, tensors in kept.items() for tensor in sorted(tensors)):
        sliced = kept[op][tensor]
        read = tensor if sliced is None else sliced
        producer = graph.producer[read]
        place, source = first[op], first[producer]
        if place is None or source is None or graph.tensors[tensor].nelements < 2:
            continue
        behind = ranked[bisect_right(ranked, (place, len(first))) :]
        later = (p for p, k in behind if not counts_as_backward(traced.nodes[k]))
        if (following := next(later, None)) is not None:
            entry = [source, graph.position[read], 0]
            info = traced.nodes[producer].infos.outputs[graph.position[read]]
            may_be_sliced = info is not None and len(info.shape) <= MOST_DIMENSIONS_OF_SLICES
            is_sliced = sliced is not None and may_be_sliced
            part = {"begin": "(0,)", "end": "(1,)"} if is_sliced else {}
            kind = "slice" if is_sliced else "shape_array"
            reader = {"op": kind, "name": f"{READER}{tensor}", "inputs": [entry]}
            attrs = part | {"__reader__": str(tensor)}
            nodes.append(reader | {"attrs": attrs, "control_deps": [place]})
            nodes[following].setdefault("control_deps", []).append(len(nodes) - 1)


def _want_a_gradient(data: JSON) -> None:
    """Have the executor count as bound to train where recurrent layers ask whether it is.

    Where nobody wants a gradient oneDNN runs them by other code, which rounds otherwise, and MXNet
    runs those that it computes itself, as of float64, without dropout (``need_grad`` in
    src/operator/nn/mkldnn/mkldnn_rnn.cc and rnn-inl.h). So one is wanted, which is never computed:
    of an argument of one number, which an op reads whose turn comes before theirs. But not where
    there is a loop or branch: each would keep what it runs until its gradient is computed.
    """
    nodes = data["nodes"]
    layers = [node for node in nodes if node["op"] in RECURRENT]
    if layers and not any(node.get("subgraphs") for node in nodes):
        place = len(nodes)
        reader = {"op": "shape_array", "name": f"{WANTED}_here", "inputs": [[place, 0, 0]]}
        nodes.extend([{"op": VARIABLE, "name": WANTED, "inputs": []}, reader])
        data["arg_nodes"].append(place)
        for node in layers:
            node.setdefault("control_deps", []).append(place + 1)


def _read_means(data: JSON) -> None:
    """Have the means of ``moments`` read: ops whose turn comes before the first output's.

    The variances are computed from them, and an executor for inference leaves out what nobody
    reads: the variances are garbage then. Where it is bound to train, the backward op reads them.
    """
    nodes, heads = data["nodes"], data["heads"]
    read = {(source, k) for node in nodes for source, k, *_ in node["inputs"]}
    read.update((source, k) for source, k, *_ in heads)
    readers = [
        {"op": "shape_array", "name": f"{READER}{node['name']}", "inputs": [[place, 0, 0]]}
        for place, node in enumerate(nodes)
        if node["op"] == "moments" and (place, 0) not in read
    ]
    if readers:
        places = range(len(nodes), len(nodes) + len(readers))
        copy = {"op": "_copy", "name": f"{READER}first_output", "inputs": [heads[0]]}
        nodes.extend([*readers, copy | {"control_deps": list(places)}])
        heads[0] = [len(nodes) - 1, 0, 0]


def _read_pooled(data: JSON) -> None:
    """Have what a pooling leaves read, where ops look at its shape only: right before the first.

    MXNet's own pooling, as of float64, refuses to run where an executor asks it for nothing
    (src/operator/nn/pool.h). Where that is bound to train, the backward op reads what it leaves.
    """
    nodes = data["nodes"]
    ignored = {n: ignored_inputs(Node(node["op"], node["name"])) for n, node in enumerate(nodes)}
    entries = {
        (n, place): (source, k)
        for n, node in enumerate(nodes)
        for place, (source, k, *_) in enumerate(node["inputs"])
    }
    read = {(source, k) for source, k, *_ in data["heads"]}
    read.update(entry for (n, place), entry in entries.items() if place not in ignored[n])
    for (n, _), (source, k) in entries.items():
        if nodes[source]["op"] == "Pooling" and (source, k) not in read:
            read.add((source, k))
            name = f"{READER}{nodes[source]['name']}"
            nodes[n].setdefault("control_deps", []).append(len(nodes))
            nodes.append({"op": "shape_array", "name": name, "inputs": [[source, k, 0]]})


def _user_ops(symbol: mx.sym.Symbol) -> list[Key]:
    """The Custom ops of ``symbol``, in the order in which MXNet binds them."""
    nodes = symbol_json.parse(symbol)["nodes"]
    return keys(node["name"] for node in nodes if node["op"] == CUSTOM)


def _groups(symbol: mx.sym.Symbol) -> set[str]:
    """The names by which attributes of ``symbol`` say where an op runs."""
    [(key, ours)] = PLACED.items()
    return {attrs[key] for _, attrs in symbol_json.attributes(symbol) if key in attrs} | {ours}
