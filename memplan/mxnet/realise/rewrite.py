"""The form of a training graph that can be written as a Symbol, and what may run twice in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from memplan.errors import TraceError
from memplan.mxnet.trace.nnvm import Entry, Node, dependencies, depth_first, is_hidden
from memplan.mxnet.trace.operators import (
    has_state_or_user_code,
    is_random,
    is_true,
    may_draw,
)
from memplan.mxnet.trace.probe import changed_inputs
from memplan.mxnet.trace.states import reads_states, states_of, states_shared, states_touched
from memplan.mxnet.trace.sums import is_link
from memplan.step.graph import Op

# Forward operators whose backward op reads through raw pointers what the forward call read: the
# very tensors must stay, so their producers run once.
_KEEPS_POINTERS = frozenset({"RNN", "_npx_rnn"})

# Their mutable inputs, the moving statistics, are looked after.
_STATISTICS = frozenset({"BatchNorm", "BatchNorm_v1"})

# Backward operators that leave some gradients alone, and which: of labels, lengths, indices, and
# the state before a Hawkes process.
_UNWRITTEN: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        """_backward_SoftmaxOutput _backward_SVMOutput _backward_linear_reg_out
        _backward_mae_reg_out _backward_logistic_reg_out _backward_SequenceMask
        _backward_SequenceLast _backward_SequenceReverse _contrib_backward_index_copy""".split(),
        (1,),
    ),
    "_backward__contrib_MultiBoxTarget": (0, 1),
    "_backward_ctc_loss": (1, 2, 3),
    "_contrib_backward_hawkesll": (3,),
}

# Those of sums, products and the like of mx.np: where one operand is a float and the other is none,
# they leave the gradient of the latter alone (NumpyBinaryBackwardUseIn of MXNet's
# numpy/np_elemwise_broadcast_op.h).
_MIXED = frozenset(
    f"_backward_npi_broadcast_{name}" for name in ("add", "sub", "mul", "mod", "power", "div")
)

# The storage type of a variable that is a csr array, in its attributes (include/mxnet/ndarray.h).
_CSR = "2"

# Backward operators that write some gradients only where one other is asked for: that one's place,
# and theirs. Their kernels return early without it (FullyConnected: oneDNN's).
_WRITTEN_WITH: dict[str, tuple[int, tuple[int, ...]]] = {
    "_backward_FullyConnected": (1, (2,)),
    "_backward_interleaved_matmul_selfatt_valatt": (0, (1,)),
    "_backward_interleaved_matmul_encdec_qk": (0, (1,)),
    "_npi_backward_polyval": (0, (1,)),
    "_npi_backward_ediff1d": (0, (1, 2)),
}

# Operators that read an array for its shape alone, and those that are told it.
_TOLD_SHAPES = {"zeros_like": "_zeros", "ones_like": "_ones", "_npi_full_like": "_full"}


def runnable(full: Sequence[Entry]) -> list[Entry]:
    """``full`` (heads of a training graph), changed so that its ops run as they stand."""
    order = depth_first(full)
    for node in order:
        forward = node.forward
        if node.op == "_backward_gather_nd" and forward is not None:
            info = forward.infos.inputs[0]
            assert info is not None
            node.attrs["shape"] = str(info.shape)
    return _with_unwritten_gradients(full, order)


def _with_unwritten_gradients(full: Sequence[Entry], order: Sequence[Node]) -> list[Entry]:
    """``full`` with zeros for gradients that MXNet's kernels do not write, those of labels.

    Its executor leaves the array that is given for one as it was, which is zeros if it made it.
    TraceError for one of which they write a part.
    """
    zeros: dict[Entry, Node] = {}

    def written(entry: Entry) -> Entry:
        node, k = entry
        if node.forward is None:
            return entry
        _check_diagonal(node.forward, k)
        _check_places(node.forward)
        if k not in _taken_for_zeros(node, node.forward):
            return entry
        if entry not in zeros:
            name = f"{node.name}_zeros{k}"
            zeros[entry] = Node("zeros_like", name, inputs=[node.forward.inputs[k]])
        return (zeros[entry], 0)

    for node in order:
        node.inputs = list(map(written, node.inputs))
    return list(map(written, full))


def tell_shapes(order: Sequence[Node]) -> None:
    """Tell those in ``order`` that read an array for its shape alone what it is: they read none.

    To MXNet's executor that array is dead by then, and the step ends with an error where oneDNN has
    written an array of another size in its place. What they are told is dense, and retained rows
    are not.
    """
    retained = {
        source for node in order if node.op == "_sparse_retain" for source, _ in node.inputs
    }
    for node in order:
        if node.op not in _TOLD_SHAPES or node in retained or node.inputs[0][0].is_variable:
            continue
        source, k = node.inputs[0]
        info = source.infos.outputs[k] if source.infos.outputs else None
        if info is None:
            continue
        # Of another dtype are those alone that a script calls, which are inferred.
        dtype = next((each.dtype for each in node.infos.outputs if each), info.dtype)
        # They would refuse attributes of the user's, of which what reads a shape takes any.
        attrs = {name: value for name, value in node.attrs.items() if is_hidden(name)}
        attrs |= {"shape": str(info.shape), "dtype": dtype}
        if "fill_value" in node.attrs:
            attrs["value"] = node.attrs["fill_value"]
        node.op, node.attrs = _TOLD_SHAPES[node.op], attrs
        node.inputs, node.control = [], (*node.control, source)


def unwritten(backward: Node, forward: Node) -> tuple[int, ...]:
    """The gradients that ``backward`` leaves alone: an RNN that of the lengths, its last input."""
    if backward.op == "_backward_RNN" and is_true(forward.attrs.get("use_sequence_length")):
        return (len(forward.inputs) - 1,)
    if backward.op in _MIXED:
        return _beside_floats(forward)
    return _UNWRITTEN.get(backward.op, ())


def _beside_floats(forward: Node) -> tuple[int, ...]:
    """The inputs that are no floats, if another is one."""
    are_floats = [info is None or info.dtype.startswith("float") for info in forward.infos.inputs]
    return tuple(k for k, is_float in enumerate(are_floats) if not is_float and any(are_floats))


def _taken_for_zeros(backward: Node, forward: Node) -> tuple[int, ...]:
    """The gradients that are zeros, or never written: a resize's of what it takes the size of.

    MXNet writes those zeros only where the sizes differ (contrib/bilinear_resize-inl.h).
    """
    if backward.op == "_backward_contrib_BilinearResize2D" and forward.attrs.get("mode") == "like":
        return (1,)
    return unwritten(backward, forward)


def _check_diagonal(forward: Node, place: int) -> None:
    """TraceError where an einsum takes a diagonal of the input at this ``place``.

    MXNet leaves the gradient beside the diagonal as memory was before.
    """
    if forward.op != "_npi_einsum":
        return
    parts = forward.attrs["subscripts"].partition("->")[0].split(",")
    letters = [letter for letter in parts[place] if letter.isalpha()]
    if len(set(letters)) < len(letters):
        raise TraceError(
            f"op {forward.name!r} (einsum {forward.attrs['subscripts']!r}) takes a diagonal, and "
            f"MXNet does not write the gradient of what is beside it; take np.diagonal(...) of "
            f"that array first, or np.trace(...) for the sum of a diagonal"
        )


def _check_places(forward: Node) -> None:
    """TraceError for the gradient of a SequenceLast without lengths.

    It reads places that the forward op has written into temporary space, where other ops write,
    too (sequence_last-inl.h): so it is memory that nobody has written, or the process ends.
    """
    if forward.op == "SequenceLast" and not is_true(forward.attrs.get("use_sequence_length")):
        raise TraceError(
            f"op {forward.name!r} (SequenceLast without sequence_length) has a gradient in MXNet "
            f"that depends on what other ops left in memory; write slice_axis(x, axis=0, begin=-1, "
            f"end=None) and reshape that, or give it the lengths"
        )


def check_sparse_products(order: Sequence[Node], nreaders: Mapping[Entry, int]) -> None:
    """TraceError for the gradient of an operand of a dot that may be a csr array.

    MXNet's kernel for such does not write it (DotBackwardEx of tensor/dot-inl.h). Its own executor
    calls the one for dense arrays instead where the weight has a dense gradient.
    """
    compressed: set[Node] = set()
    for node in order:
        if node.forward is None:
            if _may_be_csr(node, compressed):
                compressed.add(node)
        elif node.op == "_backward_dot":
            for place, (source, _) in enumerate(node.forward.inputs):
                if source in compressed and nreaders.get((node, place)):
                    raise TraceError(
                        f"op {node.forward.name!r} (dot) reads {source.name!r}, which may be a csr "
                        f"array, and MXNet does not write the gradient of one; take it as a dense "
                        f"array, by cast_storage(..., stype='default')"
                    )


def _may_be_csr(node: Node, compressed: Set[Node]) -> bool:
    """May ``node`` of the forward pass be a csr array, if those ``compressed`` may?

    What reads one may be one, too, but a dot is only of a dense array and a csr one, on a CPU.
    """
    if node.is_variable:
        return node.attrs.get("__storage_type__") == _CSR
    if node.op == "cast_storage":
        return node.attrs["stype"] == "csr"
    are_csr = [source in compressed for source, _ in node.inputs]
    if node.op == "dot":
        kind = node.attrs.get("forward_stype", "None")
        return kind == "csr" or (kind == "None" and are_csr == [False, True])
    return any(are_csr)


def left_as_it_was(node: Node, nreaders: Mapping[Entry, int], *, by_onednn: bool) -> str:
    """What is to be said where MXNet does not write a gradient of ``node`` that is read; else "".

    It asks the operator only for those that are read. ``by_onednn``: does oneDNN compute?
    """
    forward, (needed, others) = node.forward, _WRITTEN_WITH.get(node.op, (0, ()))
    if forward is None or nreaders.get((node, needed)):
        return ""
    data = forward.infos.inputs[0]
    if node.op == "_backward_FullyConnected" and not (
        by_onednn and data is not None and data.dtype == "float32"
    ):
        return ""
    if not any(nreaders.get((node, k)) for k in others):
        return ""
    return (
        f"op {forward.name!r} ({forward.op}) has no gradient in MXNet where that of its input "
        f"{needed} is not wanted: it is what memory was before"
    )


def explicit_order(order: Sequence[Node], rank_of: Mapping[Node, int] | None = None) -> list[Node]:
    """``order`` with every sum of gradients as early as possible; sums are made safe.

    The nodes must have their ``infos``. Those in ``rank_of`` come as early as possible, too; of
    several that become possible by the same op, the one of the smallest rank comes first. But what
    reads or writes a state that others do, too, or may draw random numbers, keeps MXNet's order.
    """
    rank_of, shared = rank_of or {}, states_shared(order)
    plain_sums = _make_sums_safe(order)
    nmissing = {
        node: len(_awaited(node))
        for node in order
        if (node in rank_of or is_link(node) or node in plain_sums)
        and not (states_touched(node, shared) or may_draw(node))
    }
    waiters: dict[Node, list[Node]] = {}
    for node in order:
        if node in nmissing:
            for other in _awaited(node):
                waiters.setdefault(other, []).append(node)
    for nodes in waiters.values():
        nodes.reverse()  # for a stack
        nodes.sort(key=lambda node: -rank_of.get(node, 0))
    result: list[Node] = []
    members: set[Node] = set()
    for node in order:
        stack = [node]
        while stack:
            ready = stack.pop()
            if ready in members:
                continue
            members.add(ready)
            result.append(ready)
            for other in waiters.get(ready, ()):
                nmissing[other] -= 1
                if not nmissing[other]:
                    stack.append(other)
    return result


def _awaited(node: Node) -> dict[Node, None]:
    return dict.fromkeys(other for other in dependencies(node) if not other.is_variable)


def _make_sums_safe(order: Sequence[Node]) -> set[Node]:
    """Make plain sums of those by _grad_add, into which MXNet's executor has ops add their term.

    Many write it over what is there instead, and in a layout of oneDNN's most leave garbage. Nor
    does another reader of the first term know that it holds a sum by then. A plain sum has the same
    buffers, and the bits of a block, for which MXNet calls _grad_add.
    """
    sums = {node for node in order if node.op == "_grad_add"}
    for node in sums:
        node.op = "elemwise_add"
    return sums


def repeatable_nodes(forward: Sequence[Node]) -> set[Node]:
    """The ops of the forward pass that may run twice."""
    inputs = {source for node in forward if node.op in _KEEPS_POINTERS for source, _ in node.inputs}
    states = states_of(forward)
    return {
        node
        for node in forward
        if not (node.is_variable or node in inputs or reads_states(node, states))
        and not (is_random(node) or has_state_or_user_code(node))
        and (node.op in _STATISTICS or not changed_inputs(node))
    }


def keep_order(ops: Sequence[Op], nodes: Sequence[Node]) -> tuple[Op, ...]:
    """``ops``, of which some must follow the one before them, whatever the schedule.

    Those that may be random: so the same seed gives the same numbers. And those that read or write
    the same state: a BatchNorm that is called twice counts the one batch, then the other.
    """
    states = states_of(nodes)
    result = list(ops)
    latest: dict[Node | None, int] = {}
    for index, node in enumerate(nodes):
        touched: list[Node | None] = [*states_touched(node, states)]
        if may_draw(node):
            touched.append(None)
        if before := [latest[key] for key in touched if key in latest]:
            op = result[index]
            after = tuple(dict.fromkeys((*op.after, *before)))
            result[index] = dataclasses.replace(op, after=after)
        latest.update(dict.fromkeys(touched, index))
    return tuple(result)
