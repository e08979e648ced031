"""Operators that MXNet 1.9.1 has in a Symbol, but of which it makes no graph that can be planned.

They are refused by name: MXNet's own errors name none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memplan.errors import TraceError
from memplan.mxnet.trace.nnvm import Node, shape_is_known, to_symbol

_FORGETS = "MXNet's inference forgets the shapes of what it joins, so their memory is not known"

# Why there is no plan, and what to do.
_NOT_PLANNED = {
    "_npi_hstack": f"{_FORGETS}; write np.concatenate(..., axis=1), or axis=0 for vectors",
    "_npi_dstack": f"{_FORGETS}; write np.stack(..., axis=-1) for matrices, or "
    "np.concatenate(..., axis=2) where there are more dimensions",
}


def check_operators(nodes: Sequence[Node]) -> None:
    """TraceError for an op that MXNet cannot infer, or that stands for others.

    oneDNN's subgraph backend has made the latter, for inference: their gradients are zeros.
    """
    for node in nodes:
        if node.op in _NOT_PLANNED:
            raise TraceError(f"{node.name!r} ({node.op}): {_NOT_PLANNED[node.op]}")
        if node.op.startswith("_sg_"):
            raise TraceError(
                f"{node.name!r} ({node.op}) stands for ops that were fused for inference, and "
                f"MXNet has no gradient of it; plan the network that get_backend_symbol() or "
                f"optimize_for() was called on"
            )


def check_flat_parts(nodes: Sequence[Node], shapes: Mapping[str, Sequence[int]]) -> None:
    """TraceError where np.concatenate(axis=None) joins arrays that are not flat.

    MXNet's inference has them flat then, for whoever writes or reads them.
    """
    for node in nodes:
        if node.op != "_npi_concatenate" or node.attrs.get("axis") != "None":
            continue
        parts = to_symbol(node.inputs)
        known = {name: shapes[name] for name in parts.list_inputs() if name in shapes}
        for shape in parts.infer_shape_partial(**known)[1]:
            if not shape_is_known(shape) or len(shape) != 1:
                raise TraceError(
                    f"{node.name!r} (_npi_concatenate) joins arrays that are not flat with "
                    f"axis=None, and MXNet's inference takes these for flat wherever they are "
                    f"written and read; reshape each of them to (-1,), and join them with axis=0"
                )
