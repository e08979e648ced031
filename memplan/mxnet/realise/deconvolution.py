"""Deconvolution's weight gradient by other ops: its own kernel aborts in an explicit graph.

On the CPU oneDNN refuses to write that gradient into memory that the executor has planned. With
y = Deconvolution(x, w), which is the gradient of a convolution with respect to its input,

    dx = Convolution(dy, w),
    dw = the weight's gradient of that convolution when its output's gradient is x,

which are Deconvolution's own gradients: bit for bit where oneDNN works in the same layouts, as it
does for the usual numbers of channels (multiples of 8 in, 16 out), otherwise but for rounding.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence

import mxnet as mx

from memplan.mxnet.trace.nnvm import Entry, Node, depth_first

_DATA, _WEIGHT = 0, 1


def replace_weight_gradients(full: Sequence[Entry]) -> list[Entry]:
    """``full`` with the gradients of Deconvolution by Convolution; its nodes are changed."""
    if not _uses_onednn():
        return list(full)
    order = depth_first(full)
    read = {(id(source), k) for node in order for source, k in node.inputs}
    read |= {(id(source), k) for source, k in full}
    instead: dict[tuple[int, int], Entry] = {}
    for node in order:
        if (id(node), _WEIGHT) in read and _aborts(node):
            data, weight = _gradients(node)
            instead[id(node), _DATA] = data
            instead[id(node), _WEIGHT] = weight
    for node in order:
        node.inputs = [instead.get((id(source), k), (source, k)) for source, k in node.inputs]
    return [instead.get((id(source), k), (source, k)) for source, k in full]


def _uses_onednn() -> bool:
    return mx.runtime.Features().is_enabled("MKLDNN") and os.environ.get(
        "MXNET_MKLDNN_ENABLED", "1"
    ) not in ("0", "false")


def _aborts(node: Node) -> bool:
    if node.op != "_backward_Deconvolution" or node.forward is None:
        return False
    data = node.forward.infos.inputs[0]
    return data is not None and data.dtype == "float32" and len(data.shape) <= 5


def _gradients(node: Node) -> tuple[Entry, Entry]:
    ograd, data, weight = node.inputs[:3]
    assert node.forward is not None
    given = node.forward.attrs
    shape = node.forward.infos.inputs[0]
    assert shape is not None
    names = ("kernel", "stride", "dilate", "num_group")
    attrs: dict[str, str] = {name: given[name] for name in names if name in given}
    attrs |= {"num_filter": str(shape.shape[1]), "no_bias": "True", "pad": str(_pad(node.forward))}
    convolution = Node("Convolution", f"{node.name}_data", attrs, [ograd, weight])
    gradient = Node(
        "_backward_Convolution",
        f"{node.name}_weight",
        dict(attrs),
        [data, ograd, weight],
        [convolution],
        noutputs=2,
        forward=convolution,
    )
    return (convolution, 0), (gradient, 1)


def _pad(node: Node) -> tuple[int, ...]:
    """The padding of a Deconvolution: as given, or so that its output gets the target shape."""

    def values(name: str, default: int) -> tuple[int, ...]:
        found = ast.literal_eval(node.attrs.get(name, "()"))
        found = found if isinstance(found, tuple) else (found,)
        return found or (default,) * len(kernel)

    kernel = ast.literal_eval(node.attrs["kernel"])
    target = values("target_shape", 0)
    if not any(target):
        return values("pad", 0)
    data = node.infos.inputs[0]
    assert data is not None
    full = (
        stride * (size - 1) + dilate * (width - 1) + 1
        for stride, size, dilate, width in zip(
            values("stride", 1), data.shape[2:], values("dilate", 1), kernel, strict=True
        )
    )
    return tuple((size - wanted + 1) // 2 for size, wanted in zip(full, target, strict=True))
