"""The gradient of an LRN before a dense layer: MXNet's executor gets it wrong, blocks do not.

oneDNN gets it wrong where it reads a gradient in a layout of its own: MXNet brings the data into
the usual layout, and hands that gradient over as it is (MKLDNNLRNBackward of MXNet's
src/operator/nn/mkldnn/mkldnn_lrn-inl.h). A dense layer leaves its gradient in the layout of what
it writes over: in MXNet's executor that is the output of the LRN, in a block it is nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.mxnet.trace.environment import is_by_onednn
from memplan.mxnet.trace.nnvm import Entry, Node, depth_first


def as_in_blocks(heads: Sequence[Entry], device_type: str) -> None:
    """Have the gradient of a dense layer that an LRN's reads in the usual layout, on a CPU.

    By a Reshape to the same shape, which costs nothing where it is in that layout: the array stays
    where it is, and an operator of oneDNN's, as Reshape is, turns it there. Nodes are changed.
    Behind other operators blocks have the gradient of the executor, right or wrong.
    """
    if not is_by_onednn(device_type):
        return
    for node in depth_first(heads):
        if node.op != "_backward_LRN" or node.inputs[0][0].op != "_backward_FullyConnected":
            continue
        assert node.forward is not None
        info = node.forward.infos.outputs[0]
        assert info is not None
        turned = Node("Reshape", f"{node.name}_usual", {"shape": str(info.shape)}, node.inputs[:1])
        node.inputs[0] = (turned, 0)
