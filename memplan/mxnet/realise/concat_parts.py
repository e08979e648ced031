"""The gradient of a Concat, part by part, by calls of oneDNN's that leak nothing.

MXNet's own operator makes an object of oneDNN's for each part in every call, and frees none
(MKLDNNConcatBackward of MXNet's src/operator/nn/mkldnn/mkldnn_concat.cc). A slice is the same copy
of oneDNN's, from the same array in whatever layout into one of the usual layout, by objects that
MXNet keeps for all slices of these shapes (mkldnn_slice.cc).
"""

from __future__ import annotations

from memplan.mxnet.realise.estimate.layout_rules import takes_parts
from memplan.mxnet.realise.estimate.onednn_kernels import knows_dtype
from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.layouts import reads_any_layout
from memplan.mxnet.trace.nnvm import Node

SLICE = "slice"


def slices(node: Node, device_type: str) -> list[dict[str, str]]:
    """The attributes of slices that are the outputs of ``node``, on this kind of device.

    No slices where it is not the gradient of a Concat by oneDNN (SupportMKLDNNConcat of
    src/operator/nn/concat.cc): MXNet's own code leaks nothing.
    """
    if not (takes_parts(node) and reads_any_layout(node) and is_by_onednn(device_type)):
        return []
    parts = [info for info in node.infos.outputs if info is not None and info.nelements]
    if not knows_dtype(node.call) or len(parts) < node.noutputs:
        return []
    axis, begin, result = int(node.attrs.get("dim", "1")), 0, []
    for part in parts:
        first, behind = [0] * len(part.shape), list(part.shape)
        first[axis], behind[axis] = begin, begin + part.shape[axis]
        begin = behind[axis]
        result.append({"begin": str(tuple(first)), "end": str(tuple(behind))})
    return result
