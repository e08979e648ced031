"""Asks MXNet what it does not document: which buffers an op may take over, which ops it merges.

Each question is a graph of a few nodes, bound but never run, and the answer is read from the
executor's own description. Binding allocates nothing for the tensors in question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import mxnet as mx
from mxnet.base import MXNetError

from memplan.mxnet.trace.environment import match_range
from memplan.mxnet.trace.nnvm import VARIABLE, Attrs, Entry, EntryInfo, Node, to_symbol
from memplan.mxnet.trace.operators import is_made_of_symbol
from memplan.step.graph import Handover

# MXNet's CPU subgraph backend, which would rewrite a graph bound without gradients, is tied to
# cpu(0); a graph bound to another CPU context is taken as it is.
CONTEXT = mx.cpu(1)

_MIB = 1 << 20

Candidate = tuple[int, int, bool]
_handovers: dict[tuple[str, Attrs, tuple[Candidate, ...]], tuple[Handover, ...]] = {}


def handovers(
    node: Node, inputs: Sequence[EntryInfo | None], outputs: Sequence[EntryInfo | None]
) -> tuple[Handover, ...]:
    """The hand-overs that MXNet may make at ``node``, whose entries have these shapes and dtypes.

    None where MXNet cannot bind the op by itself: memory is then over-estimated, never under.
    """
    candidates = tuple(
        (i, o, source.dtype == target.dtype)
        for i, source in enumerate(inputs)
        for o, target in enumerate(outputs)
        if source is not None
        and target is not None
        and source.nelements == target.nelements
        and source.itemsize == target.itemsize
    )
    if not candidates:
        return ()
    key = (node.op, node.key, candidates)
    if key not in _handovers:
        try:
            _handovers[key] = _Probe(node, inputs, outputs).ask(candidates)
        except MXNetError:
            _handovers[key] = ()
    return _handovers[key]


class _Probe:
    """One op fed by copies of variables, so that each of its inputs owns a buffer."""

    def __init__(
        self, node: Node, inputs: Sequence[EntryInfo | None], outputs: Sequence[EntryInfo | None]
    ) -> None:
        self.arrays: dict[str, mx.nd.NDArray] = {}
        self.inputs = [
            Node("_copy", f"input{i}", inputs=[(self._variable(f"value{i}", info), 0)])
            for i, info in enumerate(inputs)
        ]
        self.node = Node(
            node.op,
            "probed",
            node.attrs,
            [(source, 0) for source in self.inputs],
            noutputs=node.noutputs,
            subgraphs=node.subgraphs,
        )
        held = [*inputs, *outputs]
        if node.control and node.forward is not None:
            held += self._add_forward(node.forward)
        self.full_nbytes = 4 * sum(info.nelements for info in held if info is not None)

    def _variable(self, name: str, info: EntryInfo | None) -> Node:
        if info is None:
            raise MXNetError(f"the shape of {name} is unknown")
        self.arrays[name] = mx.nd.empty(info.shape, CONTEXT, info.dtype)
        return Node(VARIABLE, name)

    def _add_forward(self, forward: Node) -> list[EntryInfo | None]:
        """A backward op may need its forward op's state: run that on variables of its own."""
        infos = forward.infos
        sources = [(self._variable(f"forward{i}", info), 0) for i, info in enumerate(infos.inputs)]
        call = Node(
            forward.op,
            "forward",
            forward.attrs,
            sources,
            noutputs=forward.noutputs,
            subgraphs=forward.subgraphs,
        )
        self.node.control.append(call)
        return list(infos.outputs)

    def ask(self, candidates: tuple[Candidate, ...]) -> tuple[Handover, ...]:
        everything = range(len(self.inputs))
        if not self._shares(everything, range(self.node.noutputs)):
            return ()
        return tuple(
            Handover(i, o, same_dtype and self._shares((), [o]))
            for i, o, same_dtype in candidates
            if self._shares([i], [o])
        )

    def _shares(self, dying: Sequence[int], read: Sequence[int]) -> bool:
        """Does any output in ``read`` get the buffer of an input?

        The inputs in ``dying`` are read by the op alone, the others survive it.
        """
        heads: list[Entry] = [(self.node, o) for o in read]
        heads += [(source, 0) for i, source in enumerate(self.inputs) if i not in dying]
        # Padded to a whole number of MiB, the total that MXNet prints tells the last byte.
        padding = -self.full_nbytes % _MIB // 4
        heads.append((Node("_zeros", "padding", {"shape": f"({padding or _MIB // 4},)"}), 0))
        expected = -(-self.full_nbytes // _MIB) + (0 if padding else 1)
        with match_range(0):
            return allocated_mib(describe(to_symbol(heads), self.arrays)) < expected


def merges(node: Node) -> bool:
    """Does MXNet replace two calls of ``node``'s op on the same inputs by one?"""
    infos = node.infos
    arrays = {}
    sources: list[Entry] = []
    for i, info in enumerate(infos.inputs):
        if info is None:
            return False
        arrays[f"value{i}"] = mx.nd.empty(info.shape, CONTEXT, info.dtype)
        sources.append((Node(VARIABLE, f"value{i}"), 0))
    calls = [
        Node(node.op, name, node.attrs, sources, noutputs=node.noutputs, subgraphs=node.subgraphs)
        for name in ("one", "two")
    ]
    text = describe(to_symbol([(call, 0) for call in calls]), arrays)
    return not re.search(r", Name=two$", text, re.MULTILINE)


@cache
def _changes_inputs(op: str, attrs: Attrs, ninputs: int, noutputs: int) -> bool:
    sources: list[Entry] = [(Node(VARIABLE, f"value{i}"), 0) for i in range(ninputs)]
    call = Node(op, "asked", dict(attrs), sources, noutputs=noutputs)
    return bool(to_symbol([(call, 0)]).list_auxiliary_states())


def changes_inputs(node: Node) -> bool:
    """Does ``node`` write into any of its inputs (statistics, states of an optimizer)?"""
    return _changes_inputs(node.op, node.key, len(node.inputs), node.noutputs)


@cache
def _counts_as_backward(op: str, attrs: Attrs, ninputs: int, noutputs: int) -> bool:
    sources: list[Entry] = [(Node(VARIABLE, f"value{i}"), 0) for i in range(ninputs)]
    # Of an op whose gradient MXNet can look up without knowing any shape.
    others: list[Entry] = [(Node(VARIABLE, f"other{i}"), 0) for i in range(3)]
    other = Node("FullyConnected", "other", {"num_hidden": "1"}, others)
    call = Node(op, "asked", dict(attrs), sources, [other], noutputs)
    try:
        to_symbol([(call, 0)]).infer_shape_partial(other0=(1, 1))
    except MXNetError as error:
        return "Cannot find matching backward op" in str(error)
    return False


def counts_as_backward(node: Node) -> bool:
    """Does MXNet take the first control dependency of ``node`` for its forward op?

    It does so for backward ops, and for gather_nd and scatter_nd.
    """
    if is_made_of_symbol(node):
        return False
    return _counts_as_backward(node.op, node.key, len(node.inputs), node.noutputs)


def describe(symbol: mx.sym.Symbol, arrays: dict[str, mx.nd.NDArray]) -> str:
    """MXNet's description of ``symbol`` bound without gradients to ``arrays``."""
    executor = symbol.bind(
        CONTEXT,
        {name: arrays[name] for name in symbol.list_arguments()},
        grad_req="null",
        aux_states={name: arrays[name] for name in symbol.list_auxiliary_states()},
    )
    return executor.debug_str()


def allocated_mib(description: str) -> int:
    """Whole MiB in "Total N MB allocated"."""
    return int(re.findall(r"^Total (\d+) MB allocated$", description, re.MULTILINE)[-1])
