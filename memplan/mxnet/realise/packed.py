"""A training step in packed memory: every tensor at an offset of one array.

MXNet's executors place tensors in whole blocks, which neither split nor merge. Its imperative
calls write where they are told: a step is its ops, called one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mxnet as mx

from memplan.errors import ArgumentError
from memplan.memory import memory as memories
from memplan.memory.additions import LoweredMemory
from memplan.memory.packing import Packing
from memplan.memory.temporary import NOTHING
from memplan.mxnet.realise import gradient_of_lrn
from memplan.mxnet.realise.estimate.workspace_estimate import packed_nbytes
from memplan.mxnet.realise.explicit import Explicit, in_order
from memplan.mxnet.realise.in_place import with_layouts_of_unplanned, with_slopes_of_unplanned
from memplan.mxnet.realise.lowering import lowered_memory
from memplan.mxnet.realise.packed_layouts import as_run
from memplan.mxnet.realise.packed_rules import gradients_outside, join_parts, packable
from memplan.mxnet.realise.rewrite import left_as_it_was, repeatable_nodes, runnable
from memplan.mxnet.realise.unread import without_unread
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.nnvm import Entry, Node, count_readers, depth_first
from memplan.step.graph import TrainingGraph
from memplan.step.schedule import Schedule


@dataclass(frozen=True)
class Packed(Explicit):
    """By calls of the step's operators one by one, each tensor at an offset of one array."""

    name: ClassVar[str] = "packed"
    in_one_array: ClassVar[bool] = True

    def rewritten(self, heads: Sequence[Entry], device_type: str) -> list[Entry]:
        """``heads`` as their ops can be called one by one; nothing is refused yet.

        A warning tells of gradients that MXNet does not write.
        """
        _warn_of_unwritten(heads, device_type)
        join_parts(heads)
        gradient_of_lrn.as_in_blocks(heads, device_type)
        return runnable(heads)

    def repeatable(self, forward: Sequence[Node], order: Sequence[Node]) -> set[Node]:
        """All but random ops, those that keep a state or change what they read."""
        return repeatable_nodes(forward)

    def outside(
        self, heads: Sequence[Entry], noutputs: int, requests: Mapping[str, str]
    ) -> set[Entry]:
        """Gradients that autograd writes sparse, or adds up; TraceError for other sparse arrays."""
        return gradients_outside(heads, noutputs, requests)

    def finished(
        self,
        graph: TrainingGraph,
        nodes: Sequence[Node],
        stock_order: Sequence[int],
        device_type: str,
    ) -> TrainingGraph:
        """Fewer ops may run twice, and fewer inputs be written over, on a CPU above all.

        Gradients that nobody reads are left out.
        TraceError for an op that cannot be called by itself.
        """
        graph = packable(in_order(graph, nodes), nodes, device_type)
        graph = with_slopes_of_unplanned(graph, nodes, stock_order)
        if is_by_onednn(device_type):
            graph = with_layouts_of_unplanned(graph, nodes, stock_order)
        return without_unread(graph, nodes, device_type)

    def check_context(self, ctx: mx.Context | None) -> None:
        """ArgumentError for a context of the CPU other than ``cpu(0)``.

        MXNet says of an array at a given address of a CPU that it is on ``cpu(0)``, whatever was
        asked for, and it bundles no calls of several contexts.
        """
        if ctx is not None and ctx.device_type != "gpu" and ctx != mx.cpu(0):
            raise ArgumentError(
                f"packed memory is on cpu(0) or a GPU, not on {ctx}; use realisation='explicit', "
                f"or cpu(0) alone. What explicit steps refuse, mx.mod.Module may train there by "
                f"the Symbol that memplan.search_plan returns"
            )

    def workspace(self, trace: Trace, device_type: str) -> memories.Workspace | None:
        """An estimate for a CPU, where all calls find one workspace."""
        if device_type != "cpu":
            return None
        graph, copying, copied = as_run(trace)
        return packed_nbytes(graph, trace.nodes, copying) + copied, (), (), NOTHING

    def memory(self, trace: Trace) -> LoweredMemory:
        """One array."""
        return lowered_memory(trace, memories.Packed())

    def allocated(
        self, trace: Trace, schedule: Schedule, packing: Packing | None
    ) -> tuple[int, int]:
        """The bytes of the array: MXNet allocates what it is asked for. No match range counts."""
        assert packing is not None
        return packing.nbytes, trace.graph.match_range


def _warn_of_unwritten(heads: Sequence[Entry], device_type: str) -> None:
    """Warn of the first op of which MXNet leaves a gradient as memory was."""
    order, by_onednn = depth_first(heads), is_by_onednn(device_type)
    nreaders = count_readers(order, heads)
    for node in order:
        if reason := left_as_it_was(node, nreaders, by_onednn=by_onednn):
            warnings.warn(
                f"{reason}. A packed step computes it, and trains otherwise. So does MXNet where "
                f"it has both gradients; what is frozen by lr_mult = 0 has one",
                stacklevel=2,
            )
            return
