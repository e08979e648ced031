"""Which outputs of a step in halves its second half reads: to MXNet a script may write into them.

What a block returns is to MXNet the array that an op has written, and which backward ops read: if a
script writes into it before ``backward``, be it through ``detach()`` or a reshape of it, they read
that. A planned block returns copies, so what is written into them is copied back. An output is
never computed twice, but what is recomputed may read it. And where it is a reshape of another
tensor, or that of it, both have one memory in a step, but not to MXNet, which keeps outputs apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.nnvm import Entry
from memplan.mxnet.trace.operators import ignored_inputs
from memplan.step.schedule import Schedule


@dataclass(frozen=True)
class ReturnedOutputs:
    """The places of the outputs that backward ops read.

    Recomputed ops, or others that read what shares their memory, read those in ``beside``, too. A
    tensor is one output at most: where a block returns it twice, the network has a copy.
    """

    places: tuple[int, ...]
    beside: frozenset[int]

    @classmethod
    def of(cls, trace: Trace, schedule: Schedule) -> ReturnedOutputs:
        """Those of a ``schedule`` of ``trace``."""
        graph = trace.graph
        heads = trace.heads[: len(trace.symbol.list_outputs())]
        by_backward = _read(trace, range(graph.nforward, len(graph.ops)))
        others = _read(trace, schedule.recomputed) | _sharing(trace)
        places = tuple(place for place, entry in enumerate(heads) if entry in by_backward)
        return cls(places, frozenset(k for k in places if heads[k] in others))


def _sharing(trace: Trace) -> set[Entry]:
    """The tensors of the forward pass that share the memory of others, as reshapes do."""
    graph = trace.graph
    entries: dict[int, Entry] = {
        tensor: (node, place)
        for op, node in zip(graph.ops, trace.nodes, strict=True)
        for place, tensor in enumerate(op.outputs)
    }
    return {
        entries[tensor]
        for op in graph.ops[: graph.nforward]
        for handover in op.handovers
        if handover.alias
        for tensor in (op.inputs[handover.input], op.outputs[handover.output])
    }


def _read(trace: Trace, ops: Iterable[int]) -> set[Entry]:
    """The tensors of which these ``ops`` read more than the shape."""
    nodes = [trace.nodes[op] for op in ops]
    return {
        entry
        for node in nodes
        for place, entry in enumerate(node.inputs)
        if place not in ignored_inputs(node)
    }
