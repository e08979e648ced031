"""Arrays whose memory layout a schedule decides on, and what would compute other numbers by it.

On a CPU an operator that is none of oneDNN's leaves oneDNN's layout only where it writes over an
array in it, and a plan has other tensors die there than MXNet (MXNet's src/common/exec_utils.h).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set

from memplan.errors import TraceError
from memplan.mxnet.realise.estimate.layout_rules import SUM
from memplan.mxnet.trace.layouts import KEEPS_LAYOUT, must_be_in_place, writes_in_layout_of_place
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import is_gradient_of_slopes
from memplan.step.graph import Op, TrainingGraph

# They choose the layout of what they write by their shapes, whatever that of what they read.
_CHOOSE = frozenset({"Convolution", "Deconvolution"})

# They write over a term in the layout that this has.
_SUMS = frozenset({SUM, "add_n"})


def with_notes_for_their_data(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph``, in which no data comes again in a layout that the notes on it are not for.

    A max pooling notes the places of the largest for its backward op, in the layout that its data
    had when it ran. So data whose layout may be another one in a copy is computed once. Where a
    Reshape turns the data after that, :mod:`memplan.mxnet.realise.turned_layouts` does the
    rest.
    """
    varying = varying_layouts(graph, nodes)
    once = {
        graph.producer[op.inputs[0]]
        for op, node in zip(graph.ops, nodes, strict=True)
        if takes_notes(node) and not node.inputs[0][0].is_variable and op.inputs[0] in varying
    }
    return with_ops_once(graph, once)


def check_sensitive(graph: TrainingGraph, nodes: Sequence[Node]) -> None:
    """TraceError for an op whose gradient depends on a layout that a plan would decide on."""
    varying = varying_layouts(graph, nodes)
    for node, tensors in _sensitive(graph, nodes):
        if varying.isdisjoint(tensors):
            continue
        forward, advice = node.forward, "set MXNET_MKLDNN_ENABLED=0"
        assert forward is not None
        what, of_what = f"op {forward.name!r} ({forward.op})", "its data"
        if is_gradient_of_slopes(node):
            what = f"op {forward.name!r} (LeakyReLU, act_type='prelu')"
            of_what, advice = "its slopes", "freeze the slopes (grad_req 'null')"
        raise TraceError(
            f"{what} cannot be trained by an explicit plan: the schedule would decide on the "
            f"memory layout of what its backward op reads, and MXNet computes another gradient of "
            f"{of_what} by it. Use realisation='packed', or {advice}"
        )


def with_layouts_of_unmirrored(graph: TrainingGraph, nodes: Sequence[Node]) -> TrainingGraph:
    """``graph``, in which ops run once that decide on a layout by which a gradient is another one.

    They are what it is computed from as far as layouts vary, with all that reads the same: each
    writes over what it does in MXNet's own step then.
    """
    read = [tensor for _, tensors in _sensitive(graph, nodes) for tensor in tensors]
    order = deciding(graph, varying_layouts(graph, nodes), read)
    return with_ops_once(graph, {*order}.union(*order.values()))


def deciding(
    graph: TrainingGraph, varying: Set[int], tensors: Iterable[int]
) -> dict[int, set[int]]:
    """The ops that decide on the layouts of ``tensors``, and for each the others that count.

    Those that write these tensors decide, and those that write what they are computed from, as far
    as layouts in ``graph`` are ``varying``. Each writes over an array that it reads if nobody reads
    that later, so the others are all that write that array or read it, under any name. Where all of
    these ops run once, and the others before or after the op as in MXNet's own step, the layouts
    are those of that step.
    """
    array_of = arrays(graph)
    others: dict[int, set[int]] = {}
    stack = list(tensors)
    while stack:
        tensor = stack.pop()
        op = graph.producer[tensor]
        if tensor not in varying or op in others:
            continue
        shared = [each for source in graph.ops[op].inputs for each in array_of[source]]
        others[op] = {reader for each in shared for reader in graph.readers[each]}
        others[op].update(graph.producer[each] for each in shared)
        others[op].discard(op)
        stack += shared
    return others


def arrays(graph: TrainingGraph) -> dict[int, list[int]]:
    """For each tensor all that share its array, as the output of a Reshape shares its input's."""
    array_of: dict[int, list[int]] = {}
    for op in graph.ops:
        array_of.update((tensor, [tensor]) for tensor in op.outputs)
        for handover in op.handovers:
            if handover.alias:
                written = op.outputs[handover.output]
                array_of[written] = array_of[op.inputs[handover.input]]
                array_of[written].append(written)
    return array_of


def varying_layouts(graph: TrainingGraph, nodes: Sequence[Node]) -> set[int]:
    """The tensors of ``graph`` that other schedules of its ops, ``nodes``, may lay out otherwise.

    All other ones are in the usual layout, or in one that follows from the shapes.
    """
    return _layouts(graph, nodes)[1]


def may_be_own(graph: TrainingGraph, nodes: Sequence[Node]) -> set[int]:
    """The tensors of ``graph`` that may be in a layout of oneDNN's as its ops, ``nodes``, end.

    So may the gradient of a dense layer's data, which MXNet may write over these, and what has the
    layout of that.
    """
    return _layouts(graph, nodes)[0]


def _layouts(graph: TrainingGraph, nodes: Sequence[Node]) -> tuple[set[int], set[int]]:
    """What may be in a layout of oneDNN's, and what another schedule may lay out otherwise."""
    own: set[int] = set()
    varying: set[int] = set()
    for op, node in zip(graph.ops, nodes, strict=True):
        call = node.call
        if call.op in _CHOOSE:
            own.update(op.outputs)
        elif writes_in_layout_of_place(node):
            for handover in op.handovers:
                source, written = op.inputs[handover.input], op.outputs[handover.output]
                if source in own:
                    own.add(written)
                if source in own and (source in varying or not _is_written_over(graph, op, source)):
                    varying.add(written)
        elif must_be_in_place(node):
            own.update(op.outputs if own & {*op.inputs} else ())
            varying.update(op.outputs if varying & {*op.inputs} else ())
        elif node.op in KEEPS_LAYOUT and (node.op == "_backward_Pooling" or own & {*op.inputs}):
            own.update(op.outputs)
            if _varies(op, node, own, varying):
                varying.update(op.outputs)
    return own, varying


def _is_written_over(graph: TrainingGraph, op: Op, source: int) -> bool:
    """Does ``op`` write over ``source`` whatever the schedule? Nobody else reads it, and once."""
    runs_once = not (op.recomputable or graph.ops[graph.producer[source]].recomputable)
    is_last = len(graph.readers[source]) == 1 and source not in graph.heads
    return runs_once and is_last and len(op.handovers) == 1


def _varies(op: Op, node: Node, own: set[int], varying: set[int]) -> bool:
    """May what an op of oneDNN's writes be in another layout, by what it is written over?"""
    is_of_one_layout = not op.handovers or own.issuperset(op.inputs)
    return node.op in _SUMS or not is_of_one_layout or not varying.isdisjoint(op.inputs)


def takes_notes(node: Node) -> bool:
    """Does ``node`` note for its backward op places in its data, by the layout of that?"""
    if node.op == "Pooling":
        return node.attrs.get("pool_type", "max") == "max"
    return node.op == "_contrib_BatchNormWithReLU"


def _sensitive(
    graph: TrainingGraph, nodes: Sequence[Node]
) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """Ops that compute other gradients by the layouts of some of what they read, and which.

    The backward op of a PReLU writes over the gradient of the output before it computes that of
    the slopes, unless the former is in a layout of oneDNN's: then it has read a copy. That of an
    LRN gives another gradient for data in one layout and a gradient in another.
    """
    for op, node in zip(graph.ops, nodes, strict=True):
        if node.op == "_backward_LRN":
            yield node, op.inputs
        elif is_gradient_of_slopes(node) and not node.inputs[0][0].is_variable:
            of_slopes = op.outputs[1]
            if graph.readers[of_slopes] or of_slopes in graph.heads:
                yield node, op.inputs[:1]


def with_ops_once(graph: TrainingGraph, once: Iterable[int]) -> TrainingGraph:
    """``graph``, of which these ops must not run twice."""
    ops = list(graph.ops)
    for index in once:
        ops[index] = dataclasses.replace(ops[index], recomputable=False)
    return dataclasses.replace(graph, ops=tuple(ops))
