"""What code takes on a CPU as a process first trains: MXNet's, and that which oneDNN writes.

The pages of MXNet's library are read from its file as they are first run, and oneDNN writes code
for its operators, and for products of matrices, as they are first called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from memplan.mxnet.realise.estimate.onednn_kernels import knows_dtype
from memplan.mxnet.realise.estimate.processor import has_avx512
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.layouts import reads_any_layout
from memplan.mxnet.trace.nnvm import Node, total_nbytes
from memplan.mxnet.trace.operators import CONVOLUTIONS
from memplan.step.graph import TrainingGraph

# By so much a process grows that trains a network of next to no bytes, for three steps: 9 MB for a
# dense layer, 11 for an LSTM's cell, 14 for a convolution with a BatchNorm, each 3 MB less without
# AVX-512 (benchmarks/code_memory.py). The arrays of these networks are in that, too.
FIRST_NBYTES, OF_CONVOLUTIONS_NBYTES, OF_AVX512_NBYTES = 7 << 20, 3 << 20, 3 << 20

# The same where oneDNN computes nothing, or a loss alone: 2 to 3 MB for nine layers of float64, and
# 4 to 5 for fifteen operators of float32. Fifteen of oneDNN's, no dense layer or convolution among
# them, take 8 MB.
FIRST_NBYTES_WITHOUT_ONEDNN = 3 << 20
_LOSS = "SoftmaxOutput"

# The operators whose calls by oneDNN take more than those of others.
_TAKING_MORE = {*CONVOLUTIONS, "BatchNorm"}

# What each further operator takes that is called like others: in executors as MXNet binds them, in
# executors of explicit steps, and in packed steps (the same script, of an LSTM's cell).
CALL_NBYTES, EXPLICIT_CALL_NBYTES, PACKED_CALL_NBYTES = 6_700, 9_500, 6_000

# What a call of a convolution or a BatchNorm by oneDNN takes beyond that. Set by least squares on
# networks like those of benchmarks/small_convolutions.py, which has the promises that follow.
FURTHER_CALL_NBYTES = 8_000

# The code and the calls count each up to a tenth of the bytes that the operators of a step write:
# what no plan can lower would else be more than most of a small network, of which nobody is short.
# With a twentieth executors' steps of 40 to 100 MB took up to 1.19 of their promise.
MOST_OF_WRITTEN = 10

# But no more than this is left out: a process is to take 10 MB more than a twentieth above its
# promise at most (check.py), and what is counted here falls up to 4 MB short (of convolutions in
# groups, benchmarks/small_convolutions.py). The price: of a step of a few hundred kB most of a
# promise is code, and a budget that leaves room for it saves little.
MOST_UNCOUNTED_NBYTES = 6_000_000

# The calls of operators that run again count, too, each at most a quarter of what its operator
# writes, in steps whose calls take more than this and more than a fiftieth of all that is written:
# in others nobody misses it, and a search is quicker if it need not know how often operators run.
FEW_NBYTES = 8 << 20
MOST_OF_OUTPUTS, FEW_OF_WRITTEN = 4, 50

# oneDNN writes code for each of its operators on each set of shapes and attributes. Set like the
# above, on small convolutions, BatchNorms and ReLUs that all differ. The first ones are within what
# a process takes that trains the smallest networks.
OPERATOR_NBYTES, FIRST_OPERATORS = 58_000, 12


def code_nbytes(nodes: Sequence[Node], call_nbytes: int) -> int:
    """What is counted of the code for the operators ``nodes``, and of calls of so many bytes each.

    Gradients of parameters are written, too, into whatever memory.
    """
    code, calls = _of_code(nodes), _of_calls(nodes, call_nbytes)
    most = sum(total_nbytes(node.infos.outputs) for node in nodes) // MOST_OF_WRITTEN
    return max(min(code, most) + min(calls, most), code + calls - MOST_UNCOUNTED_NBYTES)


def further_calls(graph: TrainingGraph, call_nbytes: int) -> list[int]:
    """Op by op, what is counted of a further call of ``call_nbytes``."""
    written = [sum(graph.tensors[output].nbytes for output in op.outputs) for op in graph.ops]
    if call_nbytes * len(graph.ops) <= max(FEW_NBYTES, sum(written) // FEW_OF_WRITTEN):
        return [0] * len(graph.ops)
    return [min(call_nbytes, nbytes // MOST_OF_OUTPUTS) for nbytes in written]


def uncounted_nbytes(nodes: Sequence[Node], call_nbytes: int) -> int:
    """What is not counted of it in a small network."""
    return _of_code(nodes) + _of_calls(nodes, call_nbytes) - code_nbytes(nodes, call_nbytes)


def _of_code(nodes: Sequence[Node]) -> int:
    """The code of MXNet's library as it is first used, and that which oneDNN writes."""
    return _of_library(nodes) + _of_operators(nodes)


def _of_calls(nodes: Sequence[Node], call_nbytes: int) -> int:
    """What the calls take, those of ``_TAKING_MORE`` more than the others."""
    further = sum(node.call.op in _TAKING_MORE for node in nodes if _is_onednns(node))
    return call_nbytes * len(nodes) + FURTHER_CALL_NBYTES * further


def _of_library(nodes: Iterable[Node]) -> int:
    """The code that a process takes as it first trains by ``nodes``."""
    calls = {node.call.op for node in nodes if node.op != _LOSS and _is_onednns(node)}
    if not calls:
        return FIRST_NBYTES_WITHOUT_ONEDNN
    nbytes = FIRST_NBYTES + OF_AVX512_NBYTES * has_avx512()
    return nbytes + OF_CONVOLUTIONS_NBYTES * (not calls.isdisjoint(CONVOLUTIONS))


def _of_operators(nodes: Iterable[Node]) -> int:
    """The code for the operators of oneDNN that differ, but for the first ones."""
    kinds: set[Any] = set()
    for node in filter(_is_onednns, nodes):
        call = node.call
        kinds.add((node.op, call.op, call.key, node.infos.inputs))
    return OPERATOR_NBYTES * max(0, len(kinds) - FIRST_OPERATORS)


def _is_onednns(node: Node) -> bool:
    """Does oneDNN compute ``node``?"""
    return onednn_is_enabled() and reads_any_layout(node) and knows_dtype(node.call)
