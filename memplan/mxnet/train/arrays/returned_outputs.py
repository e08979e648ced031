"""Which outputs of a step in halves its second half reads: to MXNet a script may write into them.

What a block returns is to MXNet the array that an op has written, and which backward ops read: if a
script writes into it before ``backward``, be it through ``detach()`` or a reshape of it, they read
that. A planned block returns copies, so what is written into them is copied back. An output is
never computed twice, but what is recomputed may read it.
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

    Recomputed ops read those in ``again``, too. A tensor is one output at most: where a block
    returns it twice, the network has a copy.
    """

    places: tuple[int, ...]
    again: frozenset[int]

    @classmethod
    def of(cls, trace: Trace, schedule: Schedule) -> ReturnedOutputs:
        """Those of a ``schedule`` of ``trace``."""
        graph = trace.graph
        heads = trace.heads[: len(trace.symbol.list_outputs())]
        by_backward = _read(trace, range(graph.nforward, len(graph.ops)))
        by_recomputed = _read(trace, schedule.recomputed)
        places = tuple(place for place, entry in enumerate(heads) if entry in by_backward)
        return cls(places, frozenset(k for k in places if heads[k] in by_recomputed))


def _read(trace: Trace, ops: Iterable[int]) -> set[Entry]:
    """The tensors of which these ``ops`` read more than the shape."""
    nodes = [trace.nodes[op] for op in ops]
    return {
        entry
        for node in nodes
        for place, entry in enumerate(node.inputs)
        if place not in ignored_inputs(node)
    }
