"""The temporary space of operators of detectors on a CPU (MXNet's src/operator/contrib).

Their backward ops take none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memplan.mxnet.trace.nnvm import Node

# Places are 32-bit numbers. A sort has a copy of what it sorts by and of the places, and 64-bit
# numbers of these (SortByKey of tensor/sort_op.h).
_PLACE_NBYTES = 4
_OF_SORT = 8 + _PLACE_NBYTES

# The last input of a convolution by offsets and masks that is not its bias.
_MODULATED_WEIGHT = 3


def _of_targets(node: Node, call: Node) -> int:
    """Eleven numbers for each anchor and box of each picture (multibox_target-inl.h)."""
    anchors, labels = call.infos.inputs[:2]
    if node is not call or anchors is None or labels is None:
        return 0
    return 11 * math.prod(labels.shape[:2]) * anchors.shape[1] * anchors.itemsize


def _of_detections(node: Node, call: Node) -> int:
    """A copy of what it writes, and what it writes of a picture (multibox_detection-inl.h)."""
    out = call.infos.outputs[0]
    if node is not call or out is None:
        return 0
    return out.nbytes + out.nbytes // max(1, out.shape[0])


def _of_proposals(node: Node, call: Node) -> int:
    """Seven numbers for each anchor, and eight for each that is looked at (proposal.cc)."""
    scores = call.infos.inputs[0]
    if node is not call or scores is None:
        return 0
    nanchors = scores.shape[1] // 2 * math.prod(scores.shape[2:])
    most = int(call.attrs.get("rpn_pre_nms_top_n", "6000"))
    looked_at = min(most, nanchors) if most > 0 else nanchors
    return 4 * scores.shape[0] * (7 * nanchors + 8 * looked_at)


def _of_suppression(node: Node, call: Node) -> int:
    """Three numbers and places for each box, a sort, and the boxes (bounding_box-inl.h).

    The boxes are copied where the op writes over them.
    """
    boxes = call.infos.inputs[0]
    if node is not call or boxes is None:
        return 0
    nboxes = math.prod(boxes.shape[:-1])
    of_box = 3 * (boxes.itemsize + _PLACE_NBYTES) + boxes.itemsize + _OF_SORT
    return boxes.nbytes + nboxes * of_box


def _of_matching(node: Node, call: Node) -> int:
    """The scores, two places for each, and a sort (bounding_box-inl.h)."""
    scores = call.infos.inputs[0]
    if node is not call or scores is None:
        return 0
    return scores.nelements * (2 * scores.itemsize + 2 * _PLACE_NBYTES + _OF_SORT)


def _of_modulated_pictures(_: Node, call: Node) -> int:
    """The columns of some pictures, and what all of them become.

    See modulated_deformable_convolution-inl.h. The gradients ask for as much.
    """
    data, weight = call.infos.inputs[0], call.infos.inputs[_MODULATED_WEIGHT]
    out = call.infos.outputs[0]
    if data is None or weight is None or out is None:
        return 0
    npictures = min(int(call.attrs.get("im2col_step", "64")), data.shape[0])
    places = int(call.attrs.get("num_group", "1")) * math.prod(out.shape[2:])
    return npictures * math.prod(weight.shape[1:]) * places * weight.itemsize + out.nbytes


BOX_FORMULAS: dict[str, Callable[[Node, Node], int]] = {
    "_contrib_bipartite_matching": _of_matching,
    "_contrib_box_nms": _of_suppression,
    "_contrib_ModulatedDeformableConvolution": _of_modulated_pictures,
    "_contrib_MultiBoxDetection": _of_detections,
    "_contrib_MultiBoxTarget": _of_targets,
    "_contrib_MultiProposal": _of_proposals,
    "_contrib_Proposal": _of_proposals,
}
