"""Gradients to which MXNet adds in parts, and a planned step as a whole: the last bits may differ.

MXNet tells a backward op to add its gradient to what is there (grad_req="add"), and some add as
they compute, window by window. An explicit step computes the gradient first, and so does a packed
one, unless autograd adds it there.
"""

from __future__ import annotations

from memplan.mxnet.trace.arguments import wanted
from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.build import Trace
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.layouts import reads_any_layout
from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import FOREACH, WHILE_LOOP, is_true
from memplan.mxnet.trace.sums import is_added_late

# Which gradients are added so, by grad_req="add" and each operator in tests/helpers: whose last
# bits are not those of the sum of the gradients of each step.
_IN_PARTS = {
    "_backward_BilinearSampler": (0,),
    "_backward_Correlation": (0, 1),
    "_backward_Embedding": (1,),
    "_backward_GridGenerator": (0,),
    "_backward_GroupNorm": (0,),
    "_backward_LayerNorm": (0,),
    "_backward_ROIAlign": (0,),
    "_backward_ROIPooling": (0,),
    "_backward_UpSampling": (1,),
    "_backward__contrib_DeformableConvolution": (2,),
    "_backward__contrib_DeformablePSROIPooling": (0, 2),
    "_backward__contrib_PSROIPooling": (0,),
    "_backward_contrib_AdaptiveAvgPooling2D": (0,),
    "_backward_contrib_BilinearResize2D": (0,),
    "_backward_gather_nd": (0,),
    "_backward_im2col": (0,),
    "_backward_take": (0,),
}

# On a CPU without oneDNN also these, picture by picture, and window by window.
_WITHOUT_ONEDNN = {"_backward_Convolution": (0, 1), "_backward_Deconvolution": (1,)}


def gradients_added_late(trace: Trace, device_type: str) -> list[str]:
    """The arguments to whose gradients MXNet itself adds piece by piece, and a step at once.

    Their sums may differ from MXNet's in the last bits. In packed steps autograd adds those of an
    Embedding, and a loop adds what each iteration gives. Without oneDNN a convolution on a CPU adds
    picture by picture. Of 5 gradients or more each is added, unless oneDNN adds them all up first:
    that is not known here for an input of the network itself.
    """
    names = wanted(trace.grad_req)
    noutputs = len(trace.heads) - len(names)
    by_autograd = trace.form.outside(trace.heads, noutputs, trace.grad_req)
    return [
        name
        for name, (node, k) in zip(names, trace.heads[noutputs:], strict=True)
        if trace.grad_req[name] == "add"
        and (node, k) not in by_autograd
        and (_is_in_parts(node, k, device_type) or _is_of_loop(node) or is_added_late(node))
    ]


def _is_in_parts(backward: Node, output: int, device_type: str) -> bool:
    """Does MXNet add this gradient as it computes it?"""
    forward = backward.forward
    if output in _IN_PARTS.get(backward.op, ()):
        return True
    if forward is None or device_type != "cpu":
        return False
    if forward.op == "Pad":
        return forward.attrs["mode"] != "constant"
    if forward.op == "Pooling":
        return _adds_windows(forward)
    return not onednn_is_enabled() and output in _WITHOUT_ONEDNN.get(backward.op, ())


def _adds_windows(pooling: Node) -> bool:
    """Do the windows of ``pooling`` overlap, so that MXNet adds each, unless oneDNN does?

    oneDNN takes no other dtype than float32, nor all averages of windows that reach past the end.
    """
    attrs, info = Attributes(pooling), pooling.infos.inputs[0]
    kernel = attrs.numbers("kernel")
    pairs = zip(kernel, attrs.each("stride", kernel, 1), strict=True)
    if is_true(pooling.attrs.get("global_pool")) or all(width <= step for width, step in pairs):
        return False
    is_average = pooling.attrs.get("pool_type") == "avg"
    is_past_end = pooling.attrs.get("pooling_convention", "valid") != "valid"
    return (
        not onednn_is_enabled()
        or not reads_any_layout(pooling)
        or (info is not None and info.dtype != "float32")
        or (is_average and is_past_end)
    )


def _is_of_loop(node: Node) -> bool:
    return node.forward is not None and node.forward.op in (FOREACH, WHILE_LOOP)
