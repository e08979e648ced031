"""The form in which a training graph is wanted: a realisation passes its own to the trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mxnet as mx

from memplan.mxnet.trace.layouts import must_be_in_place, must_not_be_over_convolution
from memplan.mxnet.trace.nnvm import Entry, Node, depth_first
from memplan.mxnet.trace.operators import (
    may_be_mirrored,
    may_run_on_cudnn,
    must_not_be_in_place,
)
from memplan.mxnet.trace.states import reads_states, states_of
from memplan.step.graph import TrainingGraph

# An attribute of the variables of a network whose step runs in halves (memplan/step/halves.py): of
# all, for the block may not read its inputs.
IN_HALVES = "__memplan_in_halves__"

# And one of the variables of a network that is a block's, which MXNet runs in no executor.
OF_BLOCK = "__memplan_of_block__"


def is_in_halves(nodes: Sequence[Node]) -> bool:
    """Is a step of these ops to be run in halves?"""
    return any(IN_HALVES in source.attrs for node in nodes for source, _ in node.inputs)


def is_of_block(nodes: Sequence[Node]) -> bool:
    """Are these the ops of a block's step?"""
    return any(OF_BLOCK in source.attrs for node in nodes for source, _ in node.inputs)


def run_once_by_executor(order: Sequence[Node]) -> set[Node]:
    """The nodes of a step that MXNet's executor must not run twice, lest one writes over its input.

    It lets an op that must not do so where that input dies. So the input must live until the
    backward op, which reads it: it is computed once, and the op does not come again after that.

    The backward op of an np.diff reads nothing of the forward pass. So nothing before the np.diff
    is computed again: then what lives for other readers, in one storage with the input after a
    Reshape, does so as without a plan. So it is with a cumsum of all that a convolution leaves.
    """
    result = set()
    for node in order:
        if must_not_be_in_place(node):
            result |= {node, node.inputs[0][0]}
        is_diff = must_not_be_in_place(node) and node.op == "_npi_diff"
        if is_diff or must_not_be_over_convolution(node):
            result.update(depth_first([(node, 0)]))
    return result


@dataclass(frozen=True)
class Form:
    """The graph of MXNet's own executor, which derives the backward ops itself.

    ``name`` is that of the realisation. A subclass with ``spells_out_backward`` has gradients that
    are tensors of the graph, and takes sums of few gradients term by term; one that runs
    ``in_one_array`` has all tensors in one array; one with ``updates`` updates the parameters
    within the step, and leaves no gradients.
    """

    name: ClassVar[str] = "mirror"
    spells_out_backward: ClassVar[bool] = False
    in_one_array: ClassVar[bool] = False
    updates: ClassVar[bool] = False

    def check_context(self, ctx: mx.Context | None) -> None:
        """ArgumentError where this realisation cannot run on ``ctx``: never, but for packed."""

    def check_environment(self) -> None:
        """Warn where a setting of the process undoes a plan: never, but for mirrored ones."""

    def rewritten(self, heads: Sequence[Entry], device_type: str) -> list[Entry]:
        """``heads`` of the whole step, changed so that it can be run on this kind of device.

        Raises TraceError for an op that cannot.
        """
        return list(heads)

    def ended(
        self, heads: Sequence[Entry], noutputs: int, requests: Mapping[str, str]
    ) -> list[Entry]:
        """``heads`` with what is added that MXNet has no operator for, such as updates.

        Their shapes are known; behind the ``noutputs`` outputs come the gradients of the arguments
        whose ``requests`` are not "null". TraceError for a request that cannot be met.
        """
        return list(heads)

    def outside(
        self, heads: Sequence[Entry], noutputs: int, requests: Mapping[str, str]
    ) -> set[Entry]:
        """The gradients that are written into arrays of their own, beside the memory planned for.

        ``heads`` and ``requests`` are those of :meth:`ended`. MXNet's executor writes all gradients
        so. TraceError for what has no place in that memory, and cannot be written elsewhere.
        """
        return set(heads[noutputs:])

    def ordered(self, order: Sequence[Node], forward: Collection[Node]) -> list[Node]:
        """The ops of the step, whose shapes are known now, in the base order.

        In ``order`` those of the ``forward`` pass come first, and so they do in the result.
        """
        return list(order)

    def repeatable(self, forward: Sequence[Node], order: Sequence[Node]) -> set[Node]:
        """Of the ``forward`` nodes, those that may run twice; ``order`` are all of the step.

        Those that MXNet's mirroring computes right on any device: a recomputed BatchNorm updates
        its moving statistics in its backward op only. One without such an op keeps them as they
        were on a CPU, while cuDNN updates them: it must not be recomputed. Nor must what reads
        such statistics, which may have been updated by then, and what must be in place: what that
        reads would be kept.
        """
        states = states_of(forward)
        differentiated = {node.forward for node in order if node.forward is not None}
        once = run_once_by_executor(order)
        return {
            node
            for node in forward
            if may_be_mirrored(node)
            and not must_be_in_place(node)
            and node not in once
            and (node in differentiated or not may_run_on_cudnn(node.op, node.attrs))
            and not reads_states(node, states)
        }

    def finished(
        self,
        graph: TrainingGraph,
        nodes: Sequence[Node],
        stock_order: Sequence[int],
        device_type: str,
    ) -> TrainingGraph:
        """``graph``, whose ops are ``nodes``, with what else must hold for it on such a device.

        MXNet's own executor would run the ops in ``stock_order``.
        """
        return graph


STOCK = Form()
