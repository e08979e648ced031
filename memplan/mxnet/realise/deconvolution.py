"""Deconvolution's weight gradient by other ops: its own kernel aborts in an explicit graph.

On the CPU oneDNN refuses to write that gradient into memory that the executor has planned: a part
of a larger array. Called by itself, as in packed steps, it writes into an array of its own. With
y = Deconvolution(x, w), which is the gradient of a convolution with respect to its input,

    dx = Convolution(dy, w),
    dw = the weight's gradient of that convolution when its output's gradient is x,

which are Deconvolution's own gradients: bit for bit where oneDNN works in the same layouts, as it
does for the usual numbers of channels (multiples of 16; without AVX-512 of 8 in), otherwise but for
rounding.

A Convolution leaves dx in a layout of oneDNN's, of which the backward op of a BatchNorm of anything
but pictures cannot make the view that it needs (limits.md). Deconvolution's own gradient is none,
and is computed there, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import mxnet as mx

from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.environment import onednn_is_enabled
from memplan.mxnet.trace.layouts import viewed_inputs
from memplan.mxnet.trace.nnvm import Entry, Node, depth_first

_DATA, _WEIGHT = 0, 1

# Ops behind which the layout in which a gradient came does not matter.
_LAID_ANEW = ("_backward_Convolution", "_backward_Deconvolution", "_backward_FullyConnected")

Readers = Mapping[Entry, Sequence[Node]]


def replace_weight_gradients(full: Sequence[Entry]) -> list[Entry]:
    """``full`` with the gradients of Deconvolution by Convolution; its nodes are changed."""
    if not (mx.runtime.Features().is_enabled("MKLDNN") and onednn_is_enabled()):
        return list(full)
    order = depth_first(full)
    readers: dict[Entry, list[Node]] = defaultdict(list)
    for node in order:
        for entry in node.inputs:
            readers[entry].append(node)
    reads = {*readers, *full}
    replacements: dict[Entry, Entry] = {}
    for node in order:
        if (node, _WEIGHT) in reads and _aborts(node):
            data_gradient, replacements[node, _WEIGHT] = _gradients(node)
            if not _is_viewed((node, _DATA), readers):
                replacements[node, _DATA] = data_gradient
    for node in order:
        node.inputs = [replacements.get(entry, entry) for entry in node.inputs]
    return [replacements.get(entry, entry) for entry in full]


def _aborts(node: Node) -> bool:
    if node.op != "_backward_Deconvolution" or node.forward is None:
        return False
    data = node.forward.infos.inputs[0]
    return data is not None and data.dtype == "float32" and len(data.shape) <= 5


def _is_viewed(gradient: Entry, readers: Readers) -> bool:
    """Does an op that makes a view of it read ``gradient``, or what is computed of it?"""
    entries, seen = [gradient], {gradient}
    while entries:
        for node in readers.get(entries.pop(), ()):
            if viewed_inputs(node):
                return True
            outputs = [] if node.op in _LAID_ANEW else [(node, k) for k in range(node.noutputs)]
            entries += [entry for entry in outputs if entry not in seen]
            seen.update(outputs)
    return False


def _gradients(node: Node) -> tuple[Entry, Entry]:
    ograd, data, weight = node.inputs[:3]
    assert node.forward is not None
    forward_attrs = node.forward.attrs
    shape = node.forward.infos.inputs[0]
    assert shape is not None
    names = ("kernel", "stride", "dilate", "num_group")
    attrs: dict[str, str] = {name: forward_attrs[name] for name in names if name in forward_attrs}
    attrs |= {"num_filter": str(shape.shape[1]), "no_bias": "True", "pad": str(_pad(node.forward))}
    convolution = Node("Convolution", f"{node.name}_data", attrs, [ograd, weight])
    gradient = Node(
        "_backward_Convolution",
        f"{node.name}_weight",
        dict(attrs),
        [data, ograd, weight],
        (convolution,),
        noutputs=2,
        forward=convolution,
    )
    return (convolution, 0), (gradient, 1)


def _pad(node: Node) -> tuple[int, ...]:
    """The padding of a Deconvolution: as given, or so that its output gets the target shape."""
    data = node.infos.inputs[0]
    assert data is not None
    attrs, sizes = Attributes(node), data.shape[2:]
    target = attrs.each("target_shape", sizes, 0)
    if not any(target):
        return tuple(attrs.each("pad", sizes, 0))
    pairs = zip(attrs.spread(sizes), target, strict=True)
    return tuple((full - size + 1) // 2 for full, size in pairs)
