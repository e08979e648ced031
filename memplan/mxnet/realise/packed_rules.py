"""What packed memory, where MXNet's operators are called one by one, asks of a training graph."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from memplan.errors import TraceError
from memplan.mxnet.realise.loop_copies import DO_NOT_ADD, DO_NOT_ADD_ONE
from memplan.mxnet.realise.loops import check_gradients, check_loop, check_shapes_within
from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.einsum import is_optimized
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.gradient import ZERO_OPS
from memplan.mxnet.trace.nnvm import Entry, Node, count_readers, depth_first
from memplan.mxnet.trace.operators import (
    COND,
    EMBEDDINGS,
    RECURRENT,
    has_sparse_gradient,
    has_state_or_user_code,
    is_made_of_symbol,
    is_true,
    must_not_be_in_place,
)
from memplan.mxnet.trace.probe import keeps_state_of_library
from memplan.mxnet.trace.user_operators import is_of_library
from memplan.step.graph import TrainingGraph

# Only autograd can call their backward ops: these need the state of the forward call, or refuse to
# write the gradient of indices and labels. MXNet 1.9.1 registers them with
# FCreateOpState, or as layers (MXNET_REGISTER_OP_PROPERTY).
_STATEFUL = frozenset(
    """Dropout RNN _npx_rnn _npi_einsum BatchNorm_v1 BilinearSampler Convolution_v1 Correlation Crop
    Embedding GridGenerator InstanceNorm L2Normalization MakeLoss Pad Pooling_v1 ROIPooling
    SVMOutput SequenceLast SequenceMask SequenceReverse SliceChannel SpatialTransformer SwapAxis
    _contrib_DeformableConvolution _contrib_DeformablePSROIPooling _contrib_PSROIPooling
    _contrib_ModulatedDeformableConvolution _contrib_count_sketch _contrib_fft
    _contrib_ifft _contrib_MultiBoxDetection _contrib_MultiBoxPrior _contrib_MultiBoxTarget
    _contrib_MultiProposal _contrib_Proposal _contrib_SparseEmbedding
    softmax_cross_entropy""".split()
)

# Of those that do not add: from which gradient on they do, those of a weight and a bias.
_ADDED_FROM = {"_contrib_DeformableConvolution": 2, "_contrib_ModulatedDeformableConvolution": 3}


# What MXNet does otherwise where it calls these operators by themselves: why they are refused.
_SHAPE = "MXNet infers a wrong shape where the op is given an array to write into"
# oneDNN knows one dtype of floating-point numbers only.
_MIXED = (
    "MXNet cannot read inputs of several dtypes there with oneDNN; cast each of them with Cast, "
    "or set MXNET_MKLDNN_ENABLED=0"
)
_OTHERWISE_ALONE = {
    "_npi_vstack": f"{_SHAPE}; write np.concatenate",
    "_npi_column_stack": f"{_SHAPE}; write np.concatenate",
    "_npi_insert_scalar": _SHAPE,
    # Of two numbers: it asks whether a draw has failed by a flag in temporary space that it has not
    # set (numpy/random/np_gamma_op.h), and so draws anew where other ops have left one below zero.
    "_npi_gamma": "MXNet draws anew by what other ops have left in temporary space; give it an "
    "array for the shape or the scale",
}


def packable(graph: TrainingGraph, nodes: Sequence[Node], device_type: str) -> TrainingGraph:
    """``graph``, whose ops are ``nodes``, as far as packed memory can run it.

    No tensor takes over the memory of one of another shape: MXNet sees two arrays, and writes the
    one while it reads the other. Nor is an op in place that must not be, whatever MXNet lets it do.
    And autograd must find what it kept: see :func:`_run_once`. Raises TraceError for an op that
    cannot be called so: with a state that it keeps from step to step.
    """
    read = {*graph.heads, *(tensor for op in graph.ops for tensor in op.inputs)}
    for op, node in zip(graph.ops, nodes, strict=True):
        if _keeps_state(node):
            raise TraceError(_refused(node))
        if reason := _otherwise_alone(node, device_type):
            raise TraceError(
                f"op {node.name!r} ({node.op}) cannot run in packed memory: {reason}. "
                f"Use realisation='explicit'"
            )
        check_shapes_within(node)
        if needs_state(node):
            gradients_read(node)
            _check_branches(node)
            check_loop(node.call)
        if node.forward is not None:
            check_gradients(node.forward, [k for k, t in enumerate(op.outputs) if t in read])
    once = _run_once(nodes)
    kinds = [info and (info.shape, info.dtype) for node in nodes for info in node.infos.outputs]
    ops = [
        dataclasses.replace(
            op,
            recomputable=op.recomputable and node not in once,
            handovers=tuple(
                handover
                for handover in op.handovers
                if kinds[op.inputs[handover.input]] == kinds[op.outputs[handover.output]]
                and not is_made_of_symbol(node.call)
                and not must_not_be_in_place(node)
            ),
        )
        for op, node in zip(graph.ops, nodes, strict=True)
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


def _keeps_state(node: Node) -> bool:
    """Does ``node`` keep a state from step to step? Custom ops do in objects that memplan keeps."""
    if is_of_library(node.op):
        return keeps_state_of_library(node)
    # The state of recurrent layers is that of one step.
    return has_state_or_user_code(node) and not (node.op in RECURRENT or is_made_of_symbol(node))


def _otherwise_alone(node: Node, device_type: str) -> str | None:
    """What MXNet does otherwise where it calls ``node`` by itself, if that is known."""
    forward = node.call
    floats = {info.dtype for info in forward.infos.inputs if info and "float" in info.dtype}
    by_onednn = is_by_onednn(device_type)
    if by_onednn and forward.op == "amp_multicast" and len(floats) > 1:
        return _MIXED
    if node.op == "_npi_gamma" and node.inputs:
        return None
    return _OTHERWISE_ALONE.get(node.op)


def join_parts(heads: Sequence[Entry]) -> None:
    """Have the gradients of the parts of an array joined by an operator that keeps no state.

    To equal bits, for they are copied. So no autograd is asked, which takes longer than to copy
    them, and the array may be cut again. Both write in the usual layout, whatever they read.
    """
    for node in depth_first(heads):
        forward = node.forward
        if node.op == "_backward_SliceChannel" and forward is not None and len(node.inputs) > 1:
            for place, (source, _) in enumerate(node.inputs):
                info = forward.infos.outputs[place]
                if source.op == "_zeros_without_dtype" and info is not None:
                    # MXNet infers their shape from the op that reads them.
                    attrs = {"shape": str(info.shape), "dtype": info.dtype}
                    node.inputs[place] = (Node("_zeros", source.name, attrs), 0)
            axis = forward.attrs.get("axis", "1")
            is_squeezed = is_true(forward.attrs.get("squeeze_axis"))
            node.op = "stack" if is_squeezed else "_npi_concatenate"
            node.attrs = {"axis": axis, "num_args": str(len(node.inputs))}
            node.control, node.forward = (), None


def gradients_outside(
    heads: Sequence[Entry], noutputs: int, requests: Mapping[str, str]
) -> set[Entry]:
    """The gradients that autograd writes into arrays of the caller's.

    See :meth:`memplan.mxnet.trace.form.Form.outside`. Autograd adds as in any other loop, an
    Embedding row by row, and writes sparse gradients sparse. Only gradients that nothing else reads
    can be there, and none of an operator that would not add. TraceError for other sparse arrays.
    """
    order = [node for node in depth_first(heads) if not node.is_variable]
    nreaders = count_readers(order, heads)
    result = set()
    for name, entry in zip(wanted(requests), heads[noutputs:], strict=True):
        node, is_added = entry[0], requests[name] == "add"
        # What user code or a loop adds to would have to be zeros.
        by_autograd = needs_state(node) and not (
            is_made_of_symbol(node.call) or _does_not_add(*entry)
        )
        if by_autograd and nreaders[entry] == 1 and is_added is not _is_sparse(node):
            result.add(entry)
    for node in order:
        if _is_sparse(node) and not _finds_a_place(node, nreaders, result):
            raise TraceError(_refused(node.call))
    return result


def _does_not_add(backward: Node, output: int) -> bool:
    """Does MXNet not add this gradient, told to, but write over what is there, or leave it alone?

    An einsum adds, but an optimized one of several products hands the request on to those that go
    before the last, whose memory MXNet has not written.
    """
    forward = backward.forward
    if forward is None or output >= _ADDED_FROM.get(forward.op, backward.noutputs):
        return False
    if forward.op == "_npi_einsum":
        return is_optimized(forward)
    return forward.op in DO_NOT_ADD or DO_NOT_ADD_ONE.get(forward.op) == output


def _finds_a_place(node: Node, nreaders: Mapping[Entry, int], outside: Collection[Entry]) -> bool:
    """Is the only sparse array of this op a gradient that is ``outside``, or that nobody wants?"""
    if node.call.op not in EMBEDDINGS or _reads_sparse(node):
        return False
    return node.forward is None or not nreaders.get((node, 1)) or (node, 1) in outside


def _check_branches(backward: Node) -> None:
    """TraceError for a branch within a loop or another branch: MXNet calls it by itself."""
    forward = backward.forward
    if forward is not None and f'"{COND}"' in json.dumps(forward.subgraphs):
        raise TraceError(
            f"op {forward.name!r} ({forward.op}) has a cond within, and MXNet leaves the gradients "
            f"of the branch that is not taken as memory was before; write F.where for that cond"
        )


def _run_once(order: Iterable[Node]) -> set[Node]:
    """The ops that must not run twice, so that autograd finds the tensors it kept.

    Where a backward op needs a state and tensors of the forward call, these are the forward op and
    the producers of its inputs: copies would lie elsewhere.
    """
    result: set[Node] = set()
    for node in order:
        if needs_state(node):
            assert node.forward is not None
            read = {source for source, _ in _tensors_of_forward(node) if not source.is_variable}
            result |= read | {node.forward} if read else read
    return result


def needs_state(backward: Node) -> bool:
    """Can only autograd call ``backward``, which keeps what the forward call leaves?

    Where the gradients of its outputs are known to be zero, those of its inputs are just zeros.
    """
    if backward.forward is None or backward.op in ZERO_OPS:
        return False
    # Called by itself, a backward op is taken to write one dtype only: BatchNorm's in half
    # precision writes two.
    dtypes = {info.dtype for info in backward.infos.outputs if info is not None}
    forward = backward.forward
    return forward.op in _STATEFUL or is_made_of_symbol(forward) or len(dtypes) > 1


def gradients_read(backward: Node) -> list[int]:
    """Which inputs of ``backward`` are the gradients of its forward op's outputs, in their order.

    TraceError if that cannot be told: the others must be tensors of the forward op, and the outputs
    the gradients of its first inputs.
    """
    forward = backward.forward
    assert forward is not None
    known = set(_tensors_of_forward(backward))
    places = [place for place, entry in enumerate(backward.inputs) if entry not in known]
    if is_made_of_symbol(forward) and len(places) not in (0, forward.noutputs):
        raise TraceError(
            f"op {forward.name!r} ({forward.op}) reads the gradients of some of its outputs only; "
            f"let its declare_backward_dependency return all of out_grad, or none"
        )
    if len(places) > forward.noutputs or backward.noutputs > len(forward.inputs):
        raise TraceError(_refused(forward))
    return places


def _tensors_of_forward(backward: Node) -> list[Entry]:
    """The inputs of ``backward`` that its forward op read or wrote."""
    forward = backward.forward
    assert forward is not None
    known = set(forward.inputs)
    return [entry for entry in backward.inputs if entry[0] is forward or entry in known]


def _is_sparse(node: Node) -> bool:
    return (
        has_sparse_gradient(node)
        or (node.op == "cast_storage" and node.attrs["stype"] != "default")
        or _reads_sparse(node)
    )


def _reads_sparse(node: Node) -> bool:
    """Is an input of ``node`` a variable that is declared to be sparse?"""
    sources = (source for source, _ in node.inputs)
    return any(s.is_variable and s.attrs.get("__storage_type__", "0") != "0" for s in sources)


def _refused(node: Node) -> str:
    return (
        f"op {node.name!r} ({node.op}) cannot run in packed memory: it keeps a state from step to "
        "step, or has sparse arrays. Use realisation='explicit'"
    )
