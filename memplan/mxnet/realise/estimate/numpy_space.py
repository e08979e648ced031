"""The temporary space of operators of mx.np on a CPU (MXNet's src/operator/numpy)."""

from __future__ import annotations

import math
from collections.abc import Callable

from memplan.mxnet.trace.nnvm import Node
from memplan.mxnet.trace.operators import is_true

Shape = tuple[int, ...]

# Random numbers of these are made of others, of so many bytes for each: one of 32 bits, or four of
# 64 (numpy/random).
_RANDOM_NBYTES = {
    "_npi_bernoulli": 4,
    "_npi_gamma": 32,
    "_npi_powerd": 4,
    "_npi_uniform": 4,
    "_npi_uniform_n": 4,
}

# Those that turn what they read of another dtype than they write into theirs.
_ARITHMETIC = ("add", "mod", "multiply", "power", "subtract", "true_divide")


def _of_matrices(node: Node, call: Node) -> int:
    """What a matmul writes beside the products (np_matmul_op-inl.h).

    It copies both arrays where matrices of one are multiplied by several of the other. The gradient
    has both gradients before they are summed up, and multiplies the output's by either array. What
    they ask for beyond that is not written.
    """
    left, right, out = *call.infos.inputs[:2], call.infos.outputs[0]
    if left is None or right is None or out is None:
        return 0
    left_shape = left.shape if len(left.shape) > 1 else (1, *left.shape)
    right_shape = right.shape if len(right.shape) > 1 else (*right.shape, 1)
    batch = _broadcast(left_shape[:-2], right_shape[:-2])
    nleft, nright = (math.prod((*batch, *shape[-2:])) for shape in (left_shape, right_shape))
    nout = math.prod((*batch, left_shape[-2], right_shape[-1]))
    copied = (left_shape[:-2], nleft), (right_shape[:-2], nright)
    if node is call:
        nelements = 0 if _same(left_shape[:-2], right_shape[:-2]) else nleft + nright
    else:
        nelements = nleft + nright
        nelements += sum(nout + n for shape, n in copied if not _same(shape, batch))
    return nelements * out.itemsize


def _broadcast(left: Shape, right: Shape) -> Shape:
    ndim = max(len(left), len(right))
    padded = ((1,) * (ndim - len(shape)) + shape for shape in (left, right))
    return tuple(map(max, *padded))


def _same(left: Shape, right: Shape) -> bool:
    """Are the shapes equal, but for dimensions of one in front?"""
    ndim = max(len(left), len(right))
    return (1,) * (ndim - len(left)) + left == (1,) * (ndim - len(right)) + right


def _of_tensordot(node: Node, call: Node) -> int:
    """Both arrays, with their axes turned, and their gradients (np_tensordot_op-inl.h)."""
    left, right = call.infos.inputs[:2]
    if left is None or right is None or not left.shape or not right.shape:
        return _of_scaled(node, call)
    return (left.nbytes + right.nbytes) * (1 if node is call else 2)


def _of_scaled(node: Node, call: Node) -> int:
    """What the gradient of a number is the sum of, by which an array is multiplied."""
    out = call.infos.outputs[0]
    is_scaled = any(info is not None and not info.shape for info in call.infos.inputs[:2])
    return 0 if node is call or out is None or not is_scaled else out.nbytes


def _of_dot(node: Node, call: Node) -> int:
    """That by more than a matrix is a tensordot (np_dot-inl.h)."""
    right = call.infos.inputs[1]
    is_tensordot = right is not None and len(right.shape) > 2
    return _of_tensordot(node, call) if is_tensordot else _of_scaled(node, call)


def _of_choice(node: Node, call: Node) -> int:
    """What the gradient of what is chosen from is the sum of, where it is broadcast."""
    out = call.infos.outputs[0]
    if node is call or out is None:
        return 0
    chosen_from = (info for info in call.infos.inputs[1:] if info is not None)
    return out.nbytes if any(info.shape != out.shape for info in chosen_from) else 0


def _of_arithmetic(node: Node, call: Node) -> int:
    """An array of another dtype as one of the output's, and its gradient.

    See np_elemwise_broadcast_op.h. The forward op copies integers only.
    """
    out = call.infos.outputs[0]
    arrays = [info for info in call.infos.inputs[:2] if info is not None]
    if out is None or len({info.dtype for info in arrays}) < 2:
        return 0
    if node is call and any(info.dtype.startswith("float") for info in arrays):
        return 0
    times = 1 if node is call else 2
    return max(times * info.nelements * out.itemsize for info in arrays if info.dtype != out.dtype)


def of_scalar(node: Node, call: Node) -> int:
    """A copy of truths, or of integers that meet a broken number, in 64 bits.

    See tensor/elemwise_binary_scalar_op.h. Truths are not copied to be compared, nor is anything to
    be divided (np_true_divide-inl.h).
    """
    data, out = call.infos.inputs[0], call.infos.outputs[0]
    if node is not call or data is None or out is None or "true_divide" in call.op:
        return 0
    if data.dtype.startswith("float"):
        return 0
    is_truth = data.dtype == "bool"
    is_copied = out.dtype != "bool" if is_truth else not is_true(call.attrs.get("is_int", "True"))
    return 8 * data.nelements if is_copied else 0


def _of_average(_: Node, call: Node) -> int:
    """The weighted numbers (np_broadcast_reduce_op.h)."""
    data = call.infos.inputs[0]
    return data.nbytes if data is not None and is_true(call.attrs.get("weighted", "True")) else 0


def _of_turn(node: Node, _: Node) -> int:
    """What is turned by 90 or 270 degrees lies in between (np_matrix_op-inl.h)."""
    data = node.infos.inputs[0]
    return data.nbytes if data is not None and int(node.attrs.get("k", "1")) % 2 else 0


def _of_random(node: Node, call: Node) -> int:
    """Uniform and normal numbers of which others are made."""
    out = call.infos.outputs[0]
    return 0 if node is not call or out is None else _RANDOM_NBYTES[call.op] * out.nelements


NUMPY_FORMULAS: dict[str, Callable[[Node, Node], int]] = {
    **{f"_npi_{name}": _of_arithmetic for name in _ARITHMETIC},
    **dict.fromkeys(_RANDOM_NBYTES, _of_random),
    "_np_dot": _of_dot,
    "_npi_average": _of_average,
    "_npi_matmul": _of_matrices,
    "_npi_rot90": _of_turn,
    "_npi_tensordot": _of_tensordot,
    "_npi_tensordot_int_axes": _of_scaled,
    "_npi_where": _of_choice,
    "_npi_where_lscalar": _of_choice,
    "_npi_where_rscalar": _of_choice,
}
