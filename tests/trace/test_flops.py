"""Operations of matrix products, whichever operator makes them."""

from __future__ import annotations

from collections.abc import Iterator

import mxnet as mx
import pytest

from memplan.mxnet.trace.build import trace

S, NP, CONTRIB = mx.sym, mx.sym.np, mx.sym.contrib
A, B, C = (S.Variable(name) for name in "abc")
X, Y, Z = (each.as_np_ndarray() for each in (A, B, C))
SCORES, OFFSETS, MASK = S.Variable("scores"), S.Variable("offsets"), S.Variable("mask")
SQUARE = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 6, "no_bias": True}
PICTURES = {"a": (2, 4, 8, 8), "offsets": (2, 18, 8, 8)}
OF_3X5X7 = 2 * 3 * 5 * 7

# A product, the shapes of what it reads, and what is counted of it.
PRODUCTS = {
    "dot": (S.dot(A, B), {"a": (3, 5), "b": (5, 7)}, OF_3X5X7),
    "dot, transposed": (
        S.dot(A, B, transpose_a=True, transpose_b=True),
        {"a": (5, 2, 3), "b": (7, 5)},
        2 * OF_3X5X7,
    ),
    "batch_dot": (
        S.batch_dot(A, B, transpose_a=True),
        {"a": (2, 5, 3), "b": (2, 5, 7)},
        2 * OF_3X5X7,
    ),
    "gemm": (
        S.linalg_gemm(A, B, C, transpose_a=True, axis=0),
        {"a": (5, 2, 3), "b": (5, 2, 7), "c": (3, 2, 7)},
        2 * OF_3X5X7,
    ),
    "gemm2": (S.linalg_gemm2(A, B), {"a": (2, 3, 5), "b": (2, 5, 7)}, 2 * OF_3X5X7),
    "np.dot": (NP.dot(X, Y), {"a": (3, 5), "b": (5, 7)}, OF_3X5X7),
    "np.dot, vectors": (NP.dot(X, Y), {"a": (5,), "b": (5,)}, 2 * 5),
    "np.dot, a vector": (NP.dot(X, Y), {"a": (2, 3, 5), "b": (5,)}, 2 * 2 * 3 * 5),
    "np.dot, a scalar": (NP.dot(X, Y), {"a": (), "b": (5, 7)}, 2 * 5 * 7),
    "np.dot, many": (NP.dot(X, Y), {"a": (2, 3, 5), "b": (4, 5, 7)}, 2 * 4 * OF_3X5X7),
    "np.matmul": (NP.matmul(X, Y), {"a": (2, 3, 5), "b": (2, 5, 7)}, 2 * OF_3X5X7),
    "tensordot": (
        NP.tensordot(X, Y, axes=([0, 1], [2, 0])),
        {"a": (2, 5, 3), "b": (5, 7, 2)},
        2 * OF_3X5X7,
    ),
    "tensordot, count": (
        NP.tensordot(X, Y, axes=2),
        {"a": (3, 2, 5), "b": (2, 5, 7)},
        2 * OF_3X5X7,
    ),
    "einsum": (NP.einsum("ij,jk->ik", X, Y), {"a": (3, 5), "b": (5, 7)}, OF_3X5X7),
    "einsum, dots": (
        NP.einsum("...ij, j...k", X, Y),
        {"a": (2, 3, 5), "b": (5, 1, 7)},
        2 * OF_3X5X7,
    ),
    "einsum, optimized": (
        NP.einsum("ij,jk,kl", X, Y, Z, optimize=True),
        {"a": (3, 5), "b": (5, 7), "c": (7, 2)},
        2 * 5 * 7 * 2 + 2 * 3 * 5 * 2,
    ),
    "einsum, optimized, dots": (
        NP.einsum("...ij,jk,kl->...il", X, Y, Z, optimize=True),
        {"a": (4, 3, 5), "b": (5, 7), "c": (7, 2)},
        2 * 5 * 7 * 2 + 2 * 4 * 3 * 5 * 2,
    ),
    "attention to itself, scores": (
        CONTRIB.interleaved_matmul_selfatt_qk(A, heads=2),
        {"a": (5, 3, 24)},
        2 * 6 * 5 * 5 * 4,
    ),
    "attention to itself": (
        CONTRIB.interleaved_matmul_selfatt_valatt(A, SCORES, heads=2),
        {"a": (5, 3, 24), "scores": (6, 5, 5)},
        2 * 6 * 5 * 5 * 4,
    ),
    "attention, scores": (
        CONTRIB.interleaved_matmul_encdec_qk(A, B, heads=2),
        {"a": (5, 3, 8), "b": (7, 3, 16)},
        2 * 6 * 5 * 7 * 4,
    ),
    "attention": (
        CONTRIB.interleaved_matmul_encdec_valatt(B, SCORES, heads=2),
        {"b": (7, 3, 16), "scores": (6, 5, 7)},
        2 * 6 * 5 * 7 * 4,
    ),
    "convolution": (S.Convolution(A, **SQUARE), {"a": (2, 4, 8, 8)}, 2 * 2 * 8 * 8 * 6 * 4 * 9),
    "deformable": (
        CONTRIB.DeformableConvolution(A, OFFSETS, **SQUARE),
        PICTURES,
        2 * 2 * 8 * 8 * 6 * 4 * 9,
    ),
    "deformable, modulated": (
        CONTRIB.ModulatedDeformableConvolution(A, OFFSETS, MASK, **SQUARE),
        PICTURES | {"mask": (2, 9, 8, 8)},
        2 * 2 * 8 * 8 * 6 * 4 * 9,
    ),
}


@pytest.fixture(autouse=True)
def _numpy_shapes() -> Iterator[None]:
    with mx.util.np_shape(True):
        yield


def counted(product: mx.sym.Symbol, shapes: dict[str, tuple[int, ...]]) -> list[int]:
    """The operations of ``product``, and of its gradients."""
    loss, name = S.MakeLoss(S.sum(product.as_nd_ndarray())), product.name
    ops = trace(loss, shapes=shapes, grad_req="write").graph.ops
    (forward,) = (op.flops for op in ops if op.name == name)
    return [forward, sum(op.flops for op in ops if op.name.startswith(f"{name}_backward"))]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_counted(name: str) -> None:
    """The gradients of what a product reads are two of its size."""
    product, shapes, expected = PRODUCTS[name]
    assert counted(product, shapes) == [expected, 2 * expected]


@pytest.mark.parametrize(
    ("subscripts", "noperands", "shapes", "expected"),
    [
        ("ij,jk,kl->il", 3, {"a": (3, 5), "b": (5, 7), "c": (7, 2)}, 3 * 3 * 5 * 7 * 2),
        ("ij->ji", 1, {"a": (3, 5)}, 3 * 5),
    ],
)
def test_an_einsum_of_all_at_once(
    subscripts: str, noperands: int, shapes: dict[str, tuple[int, ...]], expected: int
) -> None:
    """Each gradient is a product of all the others and of the gradient of the output."""
    product = NP.einsum(subscripts, *(X, Y, Z)[:noperands])
    assert counted(product, shapes) == [expected, noperands * expected]
