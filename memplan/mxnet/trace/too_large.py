"""What is too large for MXNet 1.9.1, whose arrays have fewer than 2^31 elements.

MXNet infers every dimension in 32 bits. Where an op makes one that is longer than its inputs', such
as tile, it wraps around: it is negative, none, or another size altogether, with which the inference
goes on. Here these sizes are computed without a limit. All other ops take their dimensions from
their inputs and attributes, or from parts of arrays that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import mxnet as mx
from mxnet.base import MXNetError

from memplan.errors import SizeError
from memplan.mxnet.trace import symbol_json
from memplan.mxnet.trace.attributes import Attributes
from memplan.mxnet.trace.nnvm import Node, depth_first, from_json, shape_is_known, to_symbol
from memplan.util.numbers import shown

Shape = tuple[int, ...]

# MXNet's wheels are built without USE_INT64_TENSOR_SIZE.
MAX_ELEMENTS = 2**31 - 1


def check_size(what: str, shape: Sequence[int]) -> None:
    """SizeError where ``what`` has more elements than an array of MXNet 1.9.1 holds."""
    nelements = max(math.prod(shape), *shape, 0)  # MXNet reads each size, whatever the others
    if nelements > MAX_ELEMENTS:
        raise SizeError(_refused(f"{what} of shape {shown(tuple(shape))}", nelements))


def check_op(node: Node) -> None:
    """SizeError where ``node``, whose shapes are inferred, has an array that is too large."""
    _check_true_size(node, [info.shape if info else None for info in node.infos.inputs])
    for info in filter(None, node.infos.outputs):
        check_size(f"an output of {node.name!r} ({node.op})", info.shape)


def check_uninferred(symbol: mx.sym.Symbol, shapes: Mapping[str, Shape]) -> None:
    """SizeError if it is for an array that is too large that MXNet cannot infer ``symbol``."""
    for node in depth_first(from_json(symbol_json.parse(symbol))[1]):
        if node.op in _COUNTS:
            inputs = to_symbol(node.inputs)
            known_shapes = {name: shapes[name] for name in inputs.list_inputs() if name in shapes}
            try:
                input_shapes = inputs.infer_shape_partial(**known_shapes)[1]
            except MXNetError:
                return
            _check_true_size(node, [s if shape_is_known(s) else None for s in input_shapes])


def _check_true_size(node: Node, shapes: Sequence[Shape | None]) -> None:
    nelements = true_nelements(node, shapes)
    if nelements is not None and nelements > MAX_ELEMENTS:
        what = "the parameters" if _COUNTS[node.op] is _rnn_parameters else "an output"
        raise SizeError(_refused(f"{what} of {node.name!r} ({node.op})", nelements))


def _refused(what: str, nelements: int) -> str:
    return (
        f"{what} would have {shown(nelements)} elements; MXNet 1.9.1 holds fewer than 2^31 in one "
        "array. Take a smaller batch or smaller inputs"
    )


def true_nelements(node: Node, shapes: Sequence[Shape | None]) -> int | None:
    """Elements of the first output of ``node``, or of an RNN's parameters, without a limit.

    ``shapes`` are those of the inputs. None where MXNet's own inference cannot wrap, or the shape
    of an input that counts is not known.
    """
    count = _COUNTS.get(node.op)
    first = shapes if count in (_joined, _products_of_columns) else shapes[:1]
    if count is None or not first or None in first:
        return None
    return count(Attributes(node), [shape for shape in first if shape is not None])


def _tile(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    return math.prod(shapes[0]) * math.prod(attrs.numbers("reps"))


def _repeat(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    times, axis = attrs.numbers("repeats"), attrs.get("axis")
    if len(times) == 1:
        return math.prod(shapes[0]) * int(times[0])
    along = math.prod(shapes[0]) if axis is None else shapes[0][axis]
    return math.prod(shapes[0]) // max(1, along) * sum(times)


def _joined(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _padded(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    width = attrs.get("pad_width")
    width = [n for pair in width for n in (pair if isinstance(pair, list | tuple) else [pair])]
    sides = zip(width[::2], width[1::2], strict=True)
    return math.prod(n + sum(pair) for n, pair in zip(shapes[0], sides, strict=True))


def _upsampled(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    return math.prod(shapes[0]) * int(attrs.get("scale", 1)) ** 2


def _products_of_columns(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    return math.prod(shape[0] for shape in shapes) * shapes[0][1]


def _deconvolved(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    batch, _, *sizes = shapes[0]
    places = (
        full - 2 * pad + adj
        for full, pad, adj in zip(
            attrs.spread(sizes),
            attrs.each("pad", sizes, 0),
            attrs.each("adj", sizes, 0),
            strict=True,
        )
    )
    return batch * int(attrs.get("num_filter")) * math.prod(attrs.get("target_shape") or places)


def _anchors(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    """MultiBoxPrior writes four numbers for each box at every place."""
    boxes = len(attrs.numbers("sizes", 1.0)) + len(attrs.numbers("ratios", 1.0)) - 1
    return math.prod(shapes[0][2:]) * boxes * 4


def _columns(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    """im2col writes a column for every place, and a row for every element of kernel and channel."""
    batch, channels, *sizes = shapes[0]
    places = (
        (size + 2 * pad - dilate * (k - 1) - 1) // stride + 1
        for size, pad, (k, stride, dilate) in zip(
            sizes, attrs.each("pad", sizes, 0), attrs.windows(sizes), strict=True
        )
    )
    return batch * channels * math.prod(attrs.each("kernel", sizes, 1)) * math.prod(places)


def _rnn_parameters(attrs: Attributes, shapes: Sequence[Shape]) -> int:
    """A row for each gate and number of a state: of inputs, of the state before, and two biases."""
    gates = {"lstm": 4, "gru": 3}.get(attrs.text("mode"), 1)
    directions = 2 if attrs.get("bidirectional", False) else 1
    state = int(attrs.get("state_size"))
    handed_on = attrs.get("projection_size") or state
    inputs = [shapes[0][-1]] + [directions * handed_on] * (int(attrs.get("num_layers")) - 1)
    rows = sum(n + handed_on + 2 for n in inputs) * gates * state
    projections = len(inputs) * handed_on * state if handed_on != state else 0
    return directions * (rows + projections)


_COUNTS: dict[str, Callable[[Attributes, Sequence[Shape]], int]] = {
    op: count
    for count, ops in {
        _tile: "tile _npi_tile",
        _repeat: "repeat _np_repeat",
        _joined: "Concat stack _npi_concatenate _npi_stack _npi_column_stack _npi_hstack "
        "_npi_vstack _npi_dstack _rnn_param_concat _npi_rnn_param_concat",
        _padded: "Pad _npi_pad",
        _upsampled: "UpSampling",
        _products_of_columns: "khatri_rao",
        _deconvolved: "Deconvolution _npx_deconvolution",
        _columns: "im2col",
        _anchors: "_contrib_MultiBoxPrior _npx_multibox_prior",
        _rnn_parameters: "RNN _npx_rnn",
    }.items()
    for op in ops.split()
}
