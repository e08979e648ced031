"""Arrays that a Reshape turns into the usual layout while other operators read them, too.

With oneDNN a Reshape, Flatten, expand_dims or squeeze, which shares the array that it reads, turns
that into the usual layout where it lay in one of oneDNN's (MKLDNNReshapeForward of MXNet's
src/operator/nn/mkldnn/mkldnn_reshape.cc). What reads the array before sees another layout than what
reads it after that, and a copy that no Reshape has read lies in oneDNN's again.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from memplan.mxnet.realise.estimate.layout_rules import SUM
from memplan.mxnet.realise.varying_layouts import (
    deciding,
    may_be_own,
    takes_notes,
    varying_layouts,
    with_ops_once,
)
from memplan.mxnet.trace.layouts import KEEPS_LAYOUT, adds_along_axes, reads_any_layout
from memplan.mxnet.trace.nnvm import Node
from memplan.step.graph import TrainingGraph

# They compute each element from the same places of what they read, and hand on its layout. Of more
# terms than two MXNet's add_n adds in another order by the layouts.
_ELEMENTWISE = {SUM}.union(
    """Activation LeakyReLU _copy amp_cast _backward_Activation _backward_LeakyReLU _backward_add
    _backward_amp_cast _backward_copy""".split()
)


def with_layouts_as_turned(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph``, in which ops read arrays in the layouts of MXNet's own step where that counts.

    Such an array is computed once. What reads it before the first Reshape runs once, before that,
    and what reads it later runs after that. Where that is a max pooling, the gradient is another
    one, and not only its last bits, if the array has another layout until it is turned: the notes
    are for that, and the backward op reads the turned array. So what decides on the layout runs
    once, and in MXNet's order, too.
    """
    readers = _Readers(graph, nodes)
    once: set[int] = set()
    noted: list[int] = []
    after: dict[int, set[int]] = defaultdict(set)
    for tensor in may_be_own(graph, nodes):
        first = readers.first_to_turn(tensor)
        dependent = set() if first is None else readers.dependent(tensor)
        if first is None or not dependent:
            continue
        # What reads a copy before the Reshape has that, whenever it runs: the array lives on.
        before = {op for op in dependent if op < first and reads_any_layout(nodes[op])}
        once |= {graph.producer[tensor], *before}
        if any(takes_notes(nodes[op]) for op in before):
            noted.append(tensor)
        after[first] |= before
        for op in dependent:
            if op > first:
                after[op].add(first)
    for op, others in deciding(graph, varying_layouts(graph, nodes), noted).items():
        once |= {op, *others}
        for other in others:
            after[max(op, other)].add(min(op, other))
    ops = list(with_ops_once(graph, once).ops)
    for index, others in after.items():
        order = dict.fromkeys((*ops[index].after, *sorted(others)))
        ops[index] = dataclasses.replace(ops[index], after=tuple(order))
    return dataclasses.replace(graph, ops=tuple(ops))


class _Readers:
    """Which ops turn arrays, and which depend on the layout that those have."""

    def __init__(self, graph: TrainingGraph, nodes: Sequence[Node]) -> None:
        self.graph, self.nodes = graph, nodes
        self.index_of = {node: index for index, node in enumerate(nodes)}

    def first_to_turn(self, tensor: int) -> int | None:
        """The first op that turns the array of ``tensor``, an output of the forward pass."""
        if self.graph.producer[tensor] >= self.graph.nforward:
            return None
        return min(
            (op for op, read in self._of_array(tensor) if self._turns(op, read)), default=None
        )

    def dependent(self, tensor: int) -> set[int]:
        """The ops that read the array of ``tensor`` and depend on its layout."""
        return {op for op, read in self._of_array(tensor) if self._depends(op, read)}

    def _of_array(self, tensor: int) -> Iterator[tuple[int, int]]:
        """The ops that read the array of ``tensor``, and which of the tensors that share it."""
        stack = [tensor]
        while stack:
            shared = stack.pop()
            for op in self.graph.readers[shared]:
                outputs = self._sharing(op, shared)
                if outputs and not self._turns(op, shared):
                    stack += outputs
                else:
                    yield op, shared

    def _sharing(self, index: int, tensor: int) -> list[int]:
        """The outputs of an op that share the array of ``tensor``, whoever else reads it."""
        op = self.graph.ops[index]
        places = [o for i, o, alias in op.handovers if alias and op.inputs[i] == tensor]
        return [op.outputs[place] for place in places]

    def _turns(self, index: int, tensor: int) -> bool:
        """Does an op share the array and turn it? What writes in the same shape does not."""
        node = self.nodes[index]
        if not self._sharing(index, tensor) or node.op in KEEPS_LAYOUT:
            return False
        data, out = node.infos.inputs[0], node.infos.outputs[0]
        has_same_shape = data is not None and out is not None and data.shape == out.shape
        return reads_any_layout(node) or not has_same_shape

    def _depends(self, index: int, tensor: int) -> bool:
        """Does an op, or what it hands the layout of ``tensor`` on to, compute by that layout?"""
        pairs, seen = [(index, tensor)], set[tuple[int, int]]()
        while pairs:
            pair = pairs.pop()
            if pair in seen or self._turns(*pair) or self._brings_to_data(*pair, tensor):
                continue
            seen.add(pair)
            op, read = pair
            node, kind = self.nodes[op], self.nodes[op].op
            is_sum_of_two = kind == "add_n" and len(node.inputs) == 2
            if not reads_any_layout(node) or kind in _ELEMENTWISE or is_sum_of_two:
                for written in self._handed_on(op, read):
                    pairs += [(reader, written) for reader in self.graph.readers[written]]
            elif kind in KEEPS_LAYOUT or adds_along_axes(node):
                return True
        return False

    def _handed_on(self, index: int, tensor: int) -> list[int]:
        """What an op writes in the layout of ``tensor``: if it is none of oneDNN's, over that."""
        op = self.graph.ops[index]
        if reads_any_layout(self.nodes[index]):
            return list(op.outputs)
        return [
            op.outputs[output] for place, output, _ in op.handovers if op.inputs[place] == tensor
        ]

    def _brings_to_data(self, index: int, read: int, tensor: int) -> bool:
        """Does the gradient of what wrote ``tensor`` bring what it reads to its data's layout?

        That of a pooling reads its output for nothing. That of a BatchNorm, right before or before
        an activation, has data in a layout of oneDNN's if ``tensor`` is, unless a Reshape turns it.
        """
        node, writer = self.nodes[index], self.nodes[self.graph.producer[tensor]]
        if node.op == "_backward_Pooling":
            return node.forward is writer and read == tensor
        norm = writer.inputs[0][0] if writer.op == "Activation" else writer
        if node.op != "_backward_BatchNorm" or node.forward is not norm:
            return False
        data = self.graph.ops[self.index_of[norm]].inputs[:1]
        return read not in data and all(self.first_to_turn(each) is None for each in data)
