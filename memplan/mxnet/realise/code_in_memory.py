"""What code takes on a CPU as a process first trains: MXNet's, and that which oneDNN writes.

The pages of MXNet's library are read from its file as they are first run, and oneDNN writes code
for its operators, and for products of matrices, as they are first called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import reads_any_layout
from memplan.step.graph import TrainingGraph

# By so much a process grows that trains a network of next to no bytes, for three steps: 10 MB for a
# dense layer, 14 for an LSTM's cell, 15 for a convolution with a BatchNorm, each 3 MB less without
# AVX-512 (3.6 to 5.9 MB are written by oneDNN there, 4 to 10 read from MXNet's library).
FIRST_NBYTES = 12 << 20

# What an operator takes beside that which is called once in a step: the growth of such a process by
# the number of steps of an LSTM (1,292 operators, and 128), in executors and in packed memory.
CALL_NBYTES, PACKED_CALL_NBYTES = 5_600, 3_400

# All that counts up to a twentieth of the bytes that the operators of a step write: what no plan
# can lower would else be more than most of a small network, of which nobody is short.
MOST_OF_WRITTEN = 20

# oneDNN writes code for each of its operators on each set of shapes and attributes: 200 kB were
# seen for a convolution and its two gradients, as little as 30 for others. The first ones are
# within what a process takes that trains the smallest networks.
OPERATOR_NBYTES, FIRST_OPERATORS = 50_000, 48


def code_nbytes(graph: TrainingGraph, nodes: Sequence[Node], call_nbytes: int) -> int:
    """The code for the ops of ``graph``, which ``nodes`` are, and what their calls take."""
    return first_nbytes(graph, call_nbytes) + _of_operators(nodes)


def first_nbytes(graph: TrainingGraph, call_nbytes: int) -> int:
    """What is counted of the code as it is first used, and of calls of so many bytes each."""
    written = sum(tensor.nbytes for tensor in graph.tensors)
    return min(FIRST_NBYTES + call_nbytes * len(graph.ops), written // MOST_OF_WRITTEN)


def _of_operators(nodes: Iterable[Node]) -> int:
    """The code for the operators of oneDNN that differ, but for the first ones."""
    kinds: set[Any] = set()
    for node in nodes:
        if reads_any_layout(node):
            call = node if node.forward is None else node.forward
            kinds.add((node.op, call.op, call.key, node.infos.inputs))
    return OPERATOR_NBYTES * max(0, len(kinds) - FIRST_OPERATORS)
