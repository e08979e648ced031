"""The temporary space of operators of mx.np, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from memplan.mxnet.realise.estimate.operator_space import space_nbytes
from memplan.mxnet.realise.estimate.workspace_estimate import largest_nbytes
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace

Shape = tuple[int, ...]
np = mx.sym.np


def _traced(net: Any, shapes: dict[str, Shape]) -> Trace:
    loss = mx.sym.MakeLoss(mx.sym.mean(mx.sym.cast(net.as_nd_ndarray(), dtype="float32")))
    grad_req = dict.fromkeys(shapes, "write")
    return trace(loss, shapes=shapes, grad_req=grad_req, realisation="mirror")


def _spaces(op: str, make: Callable[..., Any], *shapes: Shape) -> list[int]:
    """Of the calls of an op on arrays of these ``shapes``, and of its backward ops."""
    by_name = {f"x{place}": shape for place, shape in enumerate(shapes)}
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = make(*(mx.sym.var(name).as_np_ndarray() for name in by_name))
        nodes = _traced(net, by_name).nodes
    assert largest_nbytes(nodes) == 0
    return [space_nbytes(node) for node in nodes if op in (node.op, getattr(node.forward, "op", 0))]


# By shapes: the forward op copies where matrices of one meet several of the other; the backward op
# has both gradients, of as many matrices as there are products, and then copies, too.
MATRICES: dict[str, tuple[Shape, Shape, list[int]]] = {
    "of two": ((8, 16), (16, 4), [0, 128 + 64]),
    "of as many": ((3, 8, 16), (3, 16, 4), [0, 3 * (128 + 64)]),
    "of one and three": (
        (3, 8, 16),
        (16, 4),
        [3 * (128 + 64), 3 * (128 + 64) + 3 * (32 + 64)],
    ),
    "of two by three": (
        (2, 1, 8, 16),
        (3, 16, 4),
        [6 * (128 + 64), 6 * (128 + 64) + 6 * (32 + 128) + 6 * (32 + 64)],
    ),
    "of one and one in a row": ((1, 8, 16), (16, 4), [0, 128 + 64]),
    "by a vector": ((8, 16), (16,), [0, 128 + 16]),
    "of a vector": ((16,), (16, 4), [0, 16 + 64]),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_matmul_copies_what_is_multiplied_several_times(name: str) -> None:
    left, right, expected = MATRICES[name]
    assert _spaces("_npi_matmul", np.matmul, left, right) == [4 * n for n in expected]


def test_a_tensordot_turns_axes_and_a_dot_by_a_matrix_does_not() -> None:
    turned = _spaces(
        "_npi_tensordot",
        lambda x, y: np.tensordot(x, y, axes=[[0, 2], [1, 2]]),
        (2, 8, 16),
        (4, 2, 16),
    )
    assert turned == [4 * (256 + 128), 8 * (256 + 128)]
    by_place = _spaces(
        "_npi_tensordot_int_axes", lambda x, y: np.tensordot(x, y, axes=1), (8, 16), (16, 4)
    )
    assert by_place == [0, 0]
    assert _spaces("_np_dot", np.dot, (8, 16), (16, 4)) == [0, 0]
    assert _spaces("_np_dot", np.dot, (8, 16), (3, 16, 4)) == [4 * (128 + 192), 8 * (128 + 192)]


ROW, TABLE = (1, 16), (8, 16)


def test_a_choice_from_what_is_broadcast_has_its_gradient_before_it_is_summed() -> None:
    assert _spaces("_npi_where", lambda x, y: np.where(x > 0, x, y), TABLE, TABLE) == [0, 0]
    assert _spaces("_npi_where", lambda x, y: np.where(x > 0, x, y), TABLE, ROW) == [0, 4 * 128]
    numbers = _spaces("_npi_where_rscalar", lambda x: np.where(x > 0, x, 1.0), TABLE)
    assert numbers == [0, 0]


OF_OTHER_DTYPES: dict[str, tuple[str, Callable[[Any], Any], list[int]]] = {
    # The gradients by the truths are not asked for, but have room.
    "truths": ("_npi_multiply", lambda x: x * (x > 0), [0, 2 * 4 * 128]),
    "of one dtype": ("_npi_multiply", lambda x: x * np.tanh(x), [0, 0]),
    "integers": (
        "_npi_add",
        lambda x: x * (x.astype("int32") + x.astype("int64") > 0),
        [8 * 128],
    ),
    "truths and a number": ("_npi_multiply_scalar", lambda x: x * ((x > 0) * 0.5), [8 * 128]),
    "compared truths": ("_npi_equal_scalar", lambda x: x * ((x > 0) == 1), [0]),
    "integers and a number": ("_npi_add_scalar", lambda x: x * (x.astype("int32") + 1), [0]),
    "a broken number": ("_npi_add_scalar", lambda x: x * (x.astype("int32") + 1.5), [8 * 128]),
    "divided": ("_npi_true_divide_scalar", lambda x: x * (x.astype("int32") / 2.5), [0]),
}


@pytest.mark.parametrize("name", OF_OTHER_DTYPES)
def test_what_is_of_another_dtype_is_copied(name: str) -> None:
    op, make, expected = OF_OTHER_DTYPES[name]
    spaces = _spaces(op, make, TABLE)
    assert spaces[: len(expected)] == expected
    assert not any(spaces[len(expected) :])


OTHERS: dict[str, tuple[str, Callable[[Any], Any], list[int]]] = {
    "a mean": ("_npi_mean", lambda x: np.mean(x, axis=1), [0, 0]),
    "a weighted mean": (
        "_npi_average",
        lambda x: np.average(x, axis=1, weights=np.exp(x)),
        [512, 512],
    ),
    "a variance": ("_npi_var", lambda x: x + np.var(x), [512]),
    "a turn": ("_npi_rot90", np.rot90, [512, 512]),
    "half a turn": ("_npi_rot90", lambda x: np.rot90(x, 2), [0, 0]),
    "uniform": ("_npi_uniform", lambda x: x + np.random.uniform(size=TABLE), [512]),
    "normal": ("_npi_normal", lambda x: x + np.random.normal(size=TABLE), [0]),
    "padded": ("_npi_pad", lambda x: np.pad(x, ((1, 1), (0, 0))), [0, 0]),
    "stacked": ("_npi_stack", lambda x: np.stack([x, np.sin(x)]), [0, 0]),
    "gates": ("_npx_sigmoid", lambda x: x * mx.sym.npx.sigmoid(x), [0, 0]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_others_take(name: str) -> None:
    op, make, expected = OTHERS[name]
    assert _spaces(op, make, TABLE) == expected
