"""Arrays in oneDNN's layouts, and their readers that know none: no executor keeps copies of them.

On a CPU the operators of oneDNN write arrays in layouts of their own. An operator that cannot read
those gets a copy, which MXNet's executor keeps for every such operator, to the end
(StorageFallbackOpExecutor of MXNet's src/executor/attach_op_execs_pass.cc). A Reshape to the shape
that an array has brings it back into the usual layout where it lies: it shares the memory of its
input (FInplaceIdentity), goes by way of MXNet's workspace, and does nothing to an array that is in
the usual layout already (src/operator/nn/mkldnn/mkldnn_reshape.cc), or on a GPU.
"""

from __future__ import annotations

import dataclasses

from memplan.mxnet.trace.nnvm import Entry, EntryInfo, Node
from memplan.mxnet.trace.operators import ignored_inputs, reads_any_layout, writes_own_layout

# What MXNet's Reshape by oneDNN takes; others it leaves as they are.
_MOST_DIMENSIONS = 4


def converted_inputs(node: Node) -> list[int]:
    """Which inputs ``node`` may not be able to read as they are written, where a Reshape helps.

    Not those of sums that MXNet may compute by adding to one term (``_grad_add``): nothing can be
    added to what a Reshape writes.
    """
    if reads_any_layout(node) or node.op == "_grad_add":
        return []
    ignored = ignored_inputs(node)
    return [
        place
        for place, (entry, info) in enumerate(zip(node.inputs, node.infos.inputs, strict=False))
        if place not in ignored and _is_convertible(entry, info)
    ]


def _is_convertible(entry: Entry, info: EntryInfo | None) -> bool:
    if info is None or not writes_own_layout(*entry):
        return False
    return info.dtype == "float32" and 3 <= len(info.shape) <= _MOST_DIMENSIONS


def reshaped(node: Node, places: list[int]) -> tuple[list[Node], Node]:
    """A Reshape for each of the inputs of ``node`` at ``places``, and ``node`` as it reads them."""
    sources, reshapes = list(node.inputs), []
    for number, place in enumerate(places):
        info = node.infos.inputs[place]
        assert info is not None
        attrs = {"shape": str(info.shape)}
        reshapes.append(Node("Reshape", f"{node.name}_input{number}", attrs, [sources[place]]))
        sources[place] = (reshapes[-1], 0)
    return reshapes, dataclasses.replace(node, inputs=sources)
