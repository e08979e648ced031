"""Arrays of which MXNet makes views in packed steps, which it cannot in a layout of oneDNN's.

MXNet's own step ends with ``Check failed: !is_view`` there, unless a Reshape has turned the array
into the usual layout, as it does where it shares the array. A packed Reshape writes another array.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from memplan.mxnet.realise.varying_layouts import arrays, may_be_own, takes_notes
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.layouts import viewed_inputs
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import places_of_tensors
from memplan.step.graph import TrainingGraph


def turned_inputs(
    graph: TrainingGraph, nodes: Sequence[Node], device_type: str
) -> dict[int, list[int]]:
    """For each op of ``graph`` the inputs of its node to be turned into the usual layout before it.

    They are those of which MXNet makes views. And data on which an op takes notes by their layout
    for its backward op, where they are turned for another: for both of these ops, as the data may
    be turned between them, or computed anew. All as far as they may be in a layout of oneDNN's.
    """
    result: dict[int, list[int]] = defaultdict(list)
    viewing = [index for index, node in enumerate(nodes) if viewed_inputs(node)]
    if not (viewing and is_by_onednn(device_type)):
        return result
    own, array_of = may_be_own(graph, nodes), arrays(graph)
    for index in viewing:
        tensors = _tensors(graph, nodes, index)
        for place in viewed_inputs(nodes[index]):
            if tensors.get(place) not in own:
                continue
            result[index].append(place)
            for tensor in array_of[tensors[place]]:
                for reader in graph.readers[tensor]:
                    noted = _noted_input(nodes[reader])
                    if noted is not None and _tensors(graph, nodes, reader).get(noted) == tensor:
                        result[reader] = [noted]
    return result


def _noted_input(node: Node) -> int | None:
    """Which input of ``node`` are data that it takes notes on, or reads by the notes taken."""
    call = node.call
    return node.inputs.index(call.inputs[0]) if takes_notes(call) else None


def _tensors(graph: TrainingGraph, nodes: Sequence[Node], index: int) -> dict[int, int]:
    """The tensors that an op reads, by the input of its node."""
    return dict(zip(places_of_tensors(nodes[index]), graph.ops[index].inputs, strict=False))
