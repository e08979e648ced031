"""Operators that MXNet 1.9.1 has in a Symbol, but of which it makes no graph that can be planned.

They are refused by name: MXNet's own errors name none of them. So are those that MXNet cannot
compute under the variables of the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memplan.errors import TraceError
from memplan.mxnet.trace.environment import onednn_has_recurrent_layers, onednn_is_enabled
from memplan.mxnet.trace.nnvm import Node, shape_is_known, to_symbol
from memplan.mxnet.trace.operators import RECURRENT

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


def check_without_onednn(nodes: Sequence[Node], device_type: str) -> None:
    """TraceError for an op that MXNet cannot run on a CPU where it is told not to use oneDNN.

    A fused recurrent layer is told so by a variable of its own: by the other alone MXNet calls its
    ordinary function for the state of oneDNN's (CreateRNNState of src/operator/rnn.cc), which ends
    with an error, or leaves its output as memory was. The nodes must have their ``infos``.
    """
    if device_type != "cpu" or onednn_is_enabled():
        return
    of_its_own = onednn_has_recurrent_layers()
    for node in nodes:
        if node.op == "_contrib_BatchNormWithReLU":
            raise TraceError(
                f"{node.name!r} ({node.op}) is computed by oneDNN alone, and MXNET_MKLDNN_ENABLED "
                f"tells MXNet not to use that; unset it, or write a BatchNorm and an Activation"
            )
        if node.op in RECURRENT and of_its_own and _may_be_onednn_rnn(node):
            raise TraceError(
                f"{node.name!r} ({node.op}) cannot be run by MXNet where MXNET_MKLDNN_ENABLED is 0 "
                f"and MXNET_USE_MKLDNN_RNN is not: it ends with an error, or returns what lies in "
                f"memory; set MXNET_USE_MKLDNN_RNN=0, too, for one layer (MXNet's gradients of "
                f"several are garbage then), or unset MXNET_MKLDNN_ENABLED, or unfuse the layers"
            )


def _may_be_onednn_rnn(node: Node) -> bool:
    """Does oneDNN compute a fused recurrent layer, if it is not told otherwise?"""
    data = node.infos.inputs[0]
    is_projected = node.attrs.get("projection_size", "None") != "None"
    return data is not None and data.dtype == "float32" and not is_projected


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
