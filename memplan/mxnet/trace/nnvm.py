"""MXNet's graph layer: symbols as lists of nodes, with the shapes and dtypes that MXNet infers."""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, OpHandle, SymbolHandle, check_call

from memplan.mxnet.trace import symbol_json

VARIABLE = "null"

VERSION = {"mxnet_version": ["int", 10901]}

Attrs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class EntryInfo:
    """Shape and dtype of one output of a node."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @cached_property
    def nelements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.nelements * self.itemsize


@dataclass(frozen=True, slots=True)
class Infos:
    """Shapes and dtypes of a node's inputs and outputs; None where MXNet does not know them."""

    inputs: tuple[EntryInfo | None, ...]
    outputs: tuple[EntryInfo | None, ...]


def total_nbytes(infos: Iterable[EntryInfo | None]) -> int:
    """The bytes of all of these that are known."""
    return sum(info.nbytes for info in infos if info is not None)


_NOT_INFERRED = Infos((), ())


@dataclass(eq=False, slots=True)  # there are thousands, for as long as a plan lives
class Node:
    """A node of MXNet's graph: a variable (``op`` is "null") or an operator call.

    ``entry`` pairs (node, k) name its k-th output; ``noutputs`` counts hidden outputs too.
    ``forward`` is the node that a backward node differentiates. ``infos`` is filled by
    :func:`memplan.mxnet.trace.inference.infer`. ``duplicates`` are the equal nodes that this one
    replaced.
    """

    op: str
    name: str
    attrs: dict[str, str] = field(default_factory=dict)
    inputs: list[tuple[Node, int]] = field(default_factory=list, repr=False)
    control: tuple[Node, ...] = field(default=(), repr=False)
    noutputs: int = 1
    subgraphs: Any = None
    forward: Node | None = field(default=None, repr=False)
    infos: Infos = _NOT_INFERRED
    duplicates: tuple[Node, ...] = field(default=(), repr=False)

    @property
    def is_variable(self) -> bool:
        return self.op == VARIABLE

    @property
    def call(self) -> Node:
        """The node itself, or the one whose gradient it computes."""
        return self if self.forward is None else self.forward

    @property
    def key(self) -> Attrs:
        """The attributes that matter to the operator, hashable."""
        return tuple(sorted((k, v) for k, v in self.attrs.items() if not is_hidden(k)))


Entry = tuple[Node, int]


def operator_handle(op: str) -> OpHandle:
    """What MXNet's C API knows the operator ``op`` by; MXNetError where there is none."""
    handle = OpHandle()
    check_call(_LIB.NNGetOpHandle(op.encode(), ctypes.byref(handle)))
    return handle


def is_hidden(attribute: str) -> bool:
    """Is this an attribute that operators do not see (``__name__``)?"""
    return attribute.startswith("__") and attribute.endswith("__")


def depth_first(entries: Iterable[Entry]) -> list[Node]:
    """Nodes in the order in which MXNet indexes and runs them: post-order, inputs first."""
    order: list[Node] = []
    visited: set[Node] = set()
    for root, _ in entries:
        if root in visited:
            continue
        visited.add(root)
        stack: list[tuple[Node, Iterator[Node]]] = [(root, iter(dependencies(root)))]
        while stack:
            node, rest = stack[-1]
            for child in rest:
                if child not in visited:
                    visited.add(child)
                    stack.append((child, iter(dependencies(child))))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


def count_readers(order: Iterable[Node], heads: Iterable[Entry]) -> Counter[Entry]:
    """How often each output is read by the nodes in ``order``, and as one of ``heads``."""
    nreaders = Counter(entry for node in order for entry in node.inputs)
    nreaders.update(heads)
    return nreaders


def dependencies(node: Node) -> list[Node]:
    """The nodes that must have run before ``node``."""
    sources = [source for source, _ in node.inputs]
    return [*sources, *node.control] if node.control else sources


def copy_repeats(entries: Sequence[Entry], first: int) -> list[Entry]:
    """``entries`` with a node ``_copy`` for every repeated one, as MXNet inserts it.

    The copies of an entry are numbered from ``first``.
    """
    ncopies: dict[Entry, int] = {}
    result: list[Entry] = []
    for entry in entries:
        if entry not in ncopies:
            ncopies[entry] = 0
            result.append(entry)
        else:
            node, k = entry
            info = node.infos.outputs[k : k + 1]
            name = f"{node.name}_{first + ncopies[entry]}_copy"
            result.append((Node("_copy", name, inputs=[entry], infos=Infos(info, info)), 0))
            ncopies[entry] += 1
    return result


def from_json(data: Mapping[str, Any]) -> tuple[list[Node], list[Entry]]:
    """Nodes (in file order) and heads of what MXNet 1.9 writes of a symbol."""
    rows = data["node_row_ptr"]
    nodes: list[Node] = []
    for index, item in enumerate(data["nodes"]):
        nodes.append(
            Node(
                op=item["op"],
                name=item["name"],
                attrs={k: sys.intern(v) for k, v in item.get("attrs", {}).items()},
                inputs=[(nodes[i], k) for i, k, *_ in item["inputs"]],
                control=tuple(nodes[i] for i in item.get("control_deps", ())),
                noutputs=rows[index + 1] - rows[index],
                subgraphs=item.get("subgraphs"),
            )
        )
    return nodes, [(nodes[i], k) for i, k, *_ in data["heads"]]


def to_symbol(heads: Sequence[Entry]) -> mx.sym.Symbol:
    """The symbol whose outputs are ``heads`` (hidden outputs may be named)."""
    order = depth_first(heads)
    index = {node: i for i, node in enumerate(order)}
    nodes = []
    for node in order:
        item: dict[str, Any] = {
            "op": node.op,
            "name": node.name,
            "inputs": [[index[child], k, 0] for child, k in node.inputs],
        }
        if node.attrs:
            item["attrs"] = node.attrs
        if node.control:
            item["control_deps"] = [index[child] for child in node.control]
        if node.subgraphs is not None:
            item["subgraphs"] = node.subgraphs
        nodes.append(item)
    data = {
        "nodes": nodes,
        "arg_nodes": [i for i, node in enumerate(order) if node.is_variable],
        "heads": [[index[node], k, 0] for node, k in heads],
        "attrs": VERSION,
    }
    return symbol_json.load(data)


def output_of(symbol: mx.sym.Symbol, place: int) -> mx.sym.Symbol:
    """The output of ``symbol`` at this place, whatever a script makes of ``Symbol.__getitem__``."""
    handle = SymbolHandle()
    check_call(_LIB.MXSymbolGetOutput(symbol.handle, place, ctypes.byref(handle)))
    return type(symbol)(handle)


def call_of(node: Node, name: str, inputs: list[Entry]) -> Node:
    """A call of ``node``'s op, by its attributes, that reads ``inputs``."""
    return Node(node.op, name, node.attrs, inputs, noutputs=node.noutputs, subgraphs=node.subgraphs)


def variables(kind: str, count: int) -> list[Entry]:
    """This many variables, called by their ``kind`` and number."""
    return [(Node(VARIABLE, f"{kind}{i}"), 0) for i in range(count)]


def shape_is_known(shape: Sequence[int] | None) -> bool:
    """Does MXNet know every dimension of ``shape``?

    An unknown dimension is 0, or -1 with NumPy semantics, where () is a scalar.
    """
    if shape is None:
        return False
    if mx.util.is_np_shape():
        return all(size >= 0 for size in shape)
    return len(shape) > 0 and all(size > 0 for size in shape)
