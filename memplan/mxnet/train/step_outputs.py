"""The outputs of a step in halves, told apart: by which of them backward goes into the block."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.nnvm import Node, depth_first
from memplan.mxnet.train.train_executor import TrainExecutor


@dataclass(frozen=True)
class StepOutputs:
    """The places of the outputs of a step, each in one of the first three.

    - ``paired``: of their gradients those of parameters are computed; with the names of these.
    - ``losses``: they are of loss operators, which need no gradients.
    - ``constants``: by them no parameter has a gradient.

    ``behind_trained`` are those that depend on a parameter that is trained, be it by BlockGrad:
    MXNet goes through these into a block that it does not run as a graph.
    """

    paired: Mapping[int, str]
    losses: Sequence[int]
    constants: Sequence[int]
    behind_trained: Collection[int]

    @classmethod
    def of(cls, executor: TrainExecutor, losses_read: Sequence[Collection[object]]) -> StepOutputs:
        """Those of ``executor``.

        ``losses_read`` are the loss operators that train where a loss reads an output, if any do.
        """
        trace, head_grads = executor.trace, executor.head_grads
        names = {place: node.name for place, node in trace.head_grads.items()}
        paired = {place: name for place, name in names.items() if name in head_grads}
        differentiated = {node.forward for node in trace.nodes}
        outputs = trace.heads[: len(executor.outputs)]
        others = [place for place in range(len(outputs)) if place not in paired]
        losses = [i for i in others if outputs[i][0] in differentiated and i not in names]
        constants = [i for i in others if i not in losses]
        # A loss operator beside what an output is computed of trains, too, if a loss reads that.
        has_losses = [bool(ops) for ops in losses_read] or [False] * len(outputs)
        behind_trained = {
            place
            for place, ((node, _), has_loss) in enumerate(zip(outputs, has_losses, strict=True))
            if has_loss or _depends_on_trained(node, trace)
        }
        return cls(paired, losses, constants, behind_trained)


def _depends_on_trained(output: Node, trace: Trace) -> bool:
    """Does the ``output`` depend on a parameter of which the step computes the gradient?"""
    variables = (node for node in depth_first([(output, 0)]) if node.is_variable)
    return any(trace.grad_req.get(node.name, "null") != "null" for node in variables)
