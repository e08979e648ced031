"""What an executor takes on a CPU beside its blocks, by the shapes of its ops: an estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from memplan.mxnet.realise.layout_copies import copies, wanted_layouts
from memplan.mxnet.realise.workspace_estimate import (
    columns_nbytes,
    largest_nbytes,
    threads,
)
from memplan.mxnet.trace.nnvm import Node
from memplan.step.graph import TrainingGraph


def executor_nbytes(graph: TrainingGraph, nodes: Sequence[Node]) -> tuple[int, tuple[int, ...]]:
    """The bytes for a run of each op of ``graph``, which ``nodes`` are, and for each further one.

    They are

    - the copies that the executor keeps (:mod:`memplan.mxnet.realise.layout_copies`); those alone
      count for a further run;
    - temporary space, of which it has one (MXNet's src/executor/attach_op_resource_pass.cc): twice
      what the largest op that is not oneDNN's reads and writes, or twice the copies that one of
      oneDNN's makes, for the C library keeps some of them as they come and go;
    - scratchpads of the convolutions that differ.

    The factors are set on the networks of benchmarks/process_networks.py, at AVX-512.
    """
    all_copies = copies(graph, nodes, of_weight_gradients=False)  # those are among the scratchpads
    temporary = 2 * max(max(all_copies.temporary_nbytes, default=0), largest_nbytes(nodes))
    nbytes = sum(all_copies.kept_nbytes) + temporary + _scratchpads(graph, nodes)
    return nbytes, all_copies.kept_nbytes


def _scratchpads(graph: TrainingGraph, nodes: Sequence[Node]) -> int:
    """Those of oneDNN for all convolutions, of which equal ones share theirs."""
    nbytes_of: dict[Any, int] = {}
    for index, node in enumerate(nodes):
        call = node if node.forward is None else node.forward
        if call.op in ("Convolution", "Deconvolution"):
            tensor = graph.ops[index].outputs[0]
            is_read = bool(graph.readers[tensor]) or tensor in graph.heads
            kind = (node.op, call.key, call.infos.inputs[:2], is_read)
            nbytes_of[kind] = _scratchpad(node, call, is_read)
    return sum(nbytes_of.values())


def _scratchpad(node: Node, call: Node, is_read: bool) -> int:
    """That of a convolution, or of its gradients: of the weights, and of the data if it is read.

    As matrices, pictures are rolled out for each thread, by a forward op as well
    (jit_gemm_convolution_utils.cpp: im2col). oneDNN's own kernels bring the weights' gradients into
    the usual layout.
    """
    weight, out = call.infos.inputs[1], call.infos.outputs[0]
    if weight is None or out is None:
        return 0
    if call.op == "Deconvolution":
        out = call.infos.inputs[0] or out
    of_data, of_output = wanted_layouts(call)
    is_pointwise = math.prod(weight.shape[2:]) == 1
    columns = columns_nbytes(weight, out)
    matrix = weight.nbytes if is_pointwise else columns
    if node is call:
        return 0 if of_output or is_pointwise else threads() * columns
    of_weights = weight.nbytes if of_output else threads() * matrix
    of_inputs = 0 if of_data or not is_read else threads() * matrix
    return of_weights + of_inputs
