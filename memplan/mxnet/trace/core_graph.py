"""The ops of a step, as MXNet runs them, as the graph that strategies plan."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.environment import current_match_range
from memplan.mxnet.trace.flops import flops
from memplan.mxnet.trace.form import Form
from memplan.mxnet.trace.nnvm import Attrs, Entry, Infos, Node, depth_first, total_nbytes
from memplan.mxnet.trace.operators import places_of_tensors
from memplan.mxnet.trace.probe import handovers
from memplan.mxnet.trace.sums import OLD_GRADIENT
from memplan.step.graph import Op, Tensor, TrainingGraph


def core_graph(
    order: list[Node],
    full: Sequence[Entry],
    noutputs: int,
    form: Form,
    requests: Mapping[str, str],
) -> TrainingGraph:
    """The graph of a step whose ops run in this ``order``; its heads are ``full``.

    Of these the first ``noutputs`` are the outputs of the network.
    """
    outside = form.outside(full, noutputs, requests)
    index_of = {node: i for i, node in enumerate(order)}
    tensors_of: dict[Node, tuple[int, ...]] = {}  # the same integers wherever a tensor is named
    tensors: list[Tensor] = []
    for node in order:
        tensors_of[node] = tuple(range(len(tensors), len(tensors) + node.noutputs))
        for k, info in enumerate(node.infos.outputs):
            name = f"{node.name}[{k}]"
            if info is None or (node, k) in outside:
                tensors.append(Tensor(name, 0, 0))
            else:
                tensors.append(Tensor(name, info.nbytes, info.nelements))
    forward = depth_first(full[:noutputs])
    repeatable = form.repeatable(forward, order)
    ops = tuple(_op(node, index_of, tensors_of, node in repeatable, outside) for node in order)
    heads = tuple(tensors_of[node][k] for node, k in full if not node.is_variable)
    nforward = sum(not node.is_variable for node in forward)
    fixed_nbytes = _fixed_nbytes(full, _held(full[noutputs:], requests, outside))
    return TrainingGraph(ops, tuple(tensors), heads, nforward, fixed_nbytes, current_match_range())


def _op(
    node: Node,
    index_of: Mapping[Node, int],
    tensors_of: Mapping[Node, tuple[int, ...]],
    recomputable: bool,
    outside: set[Entry],
) -> Op:
    place_of = {place: number for number, place in enumerate(places_of_tensors(node))}
    read = [node.inputs[place] for place in place_of]
    of_shape = (source for n, (source, _) in enumerate(node.inputs) if n not in place_of)
    after = [*(source for source in of_shape if not source.is_variable), *node.control]
    return Op(
        name=node.name,
        kind=node.op,
        inputs=tuple(tensors_of[source][k] for source, k in read),
        outputs=tensors_of[node],
        recomputable=recomputable,
        differentiates=None if node.forward is None else index_of[node.forward],
        after=tuple(index_of[source] for source in after),
        handovers=tuple(
            handover._replace(input=place_of[handover.input])
            for handover in handovers(node)
            if handover.input in place_of and (node, handover.output) not in outside
        ),
        flops=flops(node),
        traffic_nbytes=total_nbytes((*node.infos.inputs, *node.infos.outputs)),
        signature=signature(node),
        mirror_stage=node.attrs.get("__mirror_stage__"),
    )


def signature(node: Node) -> str:
    """Operator, attributes, shapes and dtypes: ops with equal ones take equal time."""
    return _signature(node.op, node.key, node.infos)


@lru_cache(maxsize=4096)
def _signature(op: str, attrs: Attrs, infos: Infos) -> str:
    entries = [
        [None if info is None else [*info.shape, info.dtype] for info in of_side]
        for of_side in (infos.inputs, infos.outputs)
    ]
    return json.dumps([op, dict(attrs), *entries], sort_keys=True, separators=(",", ":"))


def _held(
    gradients: Sequence[Entry], requests: Mapping[str, str], outside: set[Entry]
) -> list[str]:
    """The arguments with an array for the gradient beside the step.

    Gradients that are outputs of the step are none, but for those that are added to.
    """
    return [
        name
        for name, entry in zip(wanted(requests), gradients, strict=True)
        if requests[name] == "add" or entry in outside
    ]


def _fixed_nbytes(full: Sequence[Entry], with_gradient: Collection[str]) -> int:
    """Bytes of arguments, auxiliary states, given head gradients and arrays for gradients.

    ``with_gradient`` names the arguments with such an array.
    """
    total = 0
    for node in depth_first(full):
        info = node.infos.outputs[0] if node.is_variable else None
        if info is not None and OLD_GRADIENT not in node.attrs:
            total += info.nbytes * (2 if node.name in with_gradient else 1)
    return total
