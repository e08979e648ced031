"""The buffers in which oneDNN puts parts of the matrices of a dense layer together, on a CPU.

Read in the source of oneDNN 2.4 (src/cpu/gemm_inner_product.cpp, and gemm_driver.cpp and
gemm_info.cpp of src/cpu/x64/gemm). A product of small matrices is computed where they are. Of
others so many rows and columns are copied at a time, into memory that is freed behind each product.
Counted is what is written of that memory, not what is allocated: where all columns are copied at
once, rows are copied by a few, each time to the same place. Threads that make a product together
copy parts of their own, each in memory of its own, or share the rows, which are then all copied.
The array that they get for a deep product of matrices that are not copied is as large as 19 MB with
16 threads, but none writes to it: what is multiplied at a time fits the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memplan.mxnet.realise.estimate.openmp import threads
from memplan.mxnet.realise.estimate.processor import has_avx512
from memplan.mxnet.trace.environment import engine_has_one_worker, onednn_is_enabled
from memplan.mxnet.trace.nnvm import Node, total_nbytes
from memplan.util.heap import KEPT_NBYTES


class _Blocks(NamedTuple):
    """How many rows and columns a kernel computes at once, and how many are copied for it."""

    rows: int
    columns: int
    most_rows: int
    most_columns: int
    most_depth: int
    depth_at_once: int


_AVX512 = _Blocks(48, 8, 9984, 384, 384, 384)
_AVX2 = _Blocks(24, 4, 10000, 384, 192, 256)
_SMALL_DEPTH, _COLUMNS_IF_SMALL = 48, 24

# Threads share the copied rows of products of so many rows, and columns for each thread or, with
# AVX2, in all; they copy ten times as many rows at a time as one does alone, or as many times as
# there are threads, if these are more (set_thread_opts_nopack and get_m_padd_parallel_a of
# gemm_driver.cpp).
_SHARED_ROWS, _SHARED_COLUMNS_BY_THREAD, _SHARED_COLUMNS_AVX2 = 1000, 96, 4000
_LEAST_TIMES_SHARED = 10

# Otherwise they cut both rows and columns, of products with at least twice so many rows and, for
# each thread, more columns than that, or at most half of it; up to four times rows.
_UNCUT, _MOST_CUTS_OF_ROWS = 384, 4

# Up to this size matrices are computed where they are (nocopy_checker of gemm_driver.cpp).
_FEW_AVX512, _FEW_AVX2, _NOT_FEW = 0.00196, 0.0038, 378
_UNEVEN, _VERY_UNEVEN = 256, 1024

# What a thread takes for its part of a product was seen to be 0.4 to 1.26 MB with 4 and 16 threads
# (a malloc that prints).
MOST_BY_THREAD = 1_250_000

# Buffers of this size and more go back to the system where as many of the largest as may lie beside
# each other are more than one byte in so many that the step writes, and than 16 MiB, for it takes
# time: a perceptron of six layers of 1,024, of which they are 15 MB, spent 5 to 12% more of it
# (:func:`kept_below`).
_LEAST_RETURNED, _BESIDE_EACH_OTHER, _ONE_IN, _LEAST_GROWTH = 1 << 20, 7, 20, 16 << 20


class _Product(NamedTuple):
    """``nrows`` by ``ncolumns`` of sums of ``depth`` terms, and how long the rows are in memory.

    The first matrix, or the second one, ``is_turned``.
    """

    nrows: int
    ncolumns: int
    depth: int
    lengths: tuple[int, int, int]
    first_is_turned: bool = False
    second_is_turned: bool = False


def buffers_nbytes(node: Node) -> list[int]:
    """What all threads take for each product of a dense layer ``node``, or of its gradients.

    Nothing for another node.
    """
    return list(map(_nbytes, _products(node)))


def kept_below(nodes: Sequence[Node]) -> int:
    """What packed and explicit steps of ``nodes`` keep when it is freed: memory of fewer bytes.

    oneDNN's buffers begin at a multiple of 128 bytes. What glibc cuts off before that is a sliver
    that it keeps for the thread, up to seven of a size (tcache_count of its malloc.c), and freed
    memory is not joined over one: the next buffer comes from elsewhere, so that a process grew for
    20 steps, by seven of the largest. Buffers that are returned to the system leave no slivers.
    That takes time, and what other operators take is returned with them: small ones are kept, and
    all where they are little of the step. The parts of several threads are smaller than what is
    counted for all of them: there what is larger than 128 KiB is returned. So it is where more
    than one thread runs operators, as each would keep what it has freed, and in a thread that runs
    other code as well, whose holes would be cut up.
    """
    if not engine_has_one_worker():
        return 0
    sizes = (size for node in nodes for size in buffers_nbytes(node))
    returned = [size for size in sizes if size >= _LEAST_RETURNED]
    written_nbytes = sum(total_nbytes(node.infos.outputs) for node in nodes)
    growth_nbytes = _BESIDE_EACH_OTHER * max(returned, default=0)
    if growth_nbytes <= max(written_nbytes // _ONE_IN, _LEAST_GROWTH):
        return KEPT_NBYTES
    return 0 if threads() > 1 else min(KEPT_NBYTES, *returned)


def threads_nbytes(nbytes: int) -> int:
    """What threads take, if there are several, for products of which parts of ``nbytes`` are made.

    It stays with them, as the C library gives every thread memory of its own. No thread takes more
    than half as much again as one that is alone.
    """
    return 0 if threads() == 1 else threads() * min(MOST_BY_THREAD, 3 * nbytes // 2)


def _products(node: Node) -> list[_Product]:
    call = node.call
    if call.op != "FullyConnected" or not onednn_is_enabled():
        return []
    data, weight = call.infos.inputs[:2]
    if data is None or weight is None or data.dtype != "float32" or not data.nbytes:
        return []
    noutputs, ninputs = weight.shape
    batch = data.nbytes // (4 * ninputs)
    if node is call:
        lengths = ninputs, ninputs, noutputs
        return [_Product(noutputs, batch, ninputs, lengths, first_is_turned=True)]
    lengths = ninputs, noutputs, ninputs
    return [
        _Product(ninputs, batch, noutputs, lengths),
        _Product(ninputs, noutputs, batch, lengths, second_is_turned=True),
    ]


def _nbytes(product: _Product) -> int:
    """What all threads write of the parts of both matrices that are copied at a time."""
    blocks = _AVX512 if has_avx512() else _AVX2
    if (_is_where_it_is if has_avx512() else _is_where_it_is_with_avx2)(product):
        return 0
    depth = product.depth
    if depth > blocks.depth_at_once:
        depth = -(-depth // 2) if depth < 2 * blocks.most_depth else blocks.most_depth
    most_columns = _COLUMNS_IF_SMALL if product.depth < _SMALL_DEPTH else blocks.most_columns
    nrows, of_thread = _of_each_thread(product)
    ncolumns = _whole(min(of_thread, most_columns), blocks.columns)
    if _have_shared_rows(product):
        most_rows = blocks.most_rows * max(threads(), _LEAST_TIMES_SHARED)
        nrows = _whole(min(nrows, most_rows), blocks.rows)
        return 4 * depth * (nrows + threads() * ncolumns)
    most_rows = blocks.rows if of_thread <= most_columns else blocks.most_rows
    nrows = _whole(min(nrows, most_rows), blocks.rows)
    return 4 * depth * (nrows + ncolumns) * threads()


def _have_shared_rows(product: _Product) -> bool:
    """Do threads copy the rows of a product together, for all of them?"""
    if threads() == 1 or product.nrows < _SHARED_ROWS:
        return False
    of_threads = _SHARED_COLUMNS_BY_THREAD * threads()
    return product.ncolumns >= (of_threads if has_avx512() else _SHARED_COLUMNS_AVX2)


def _of_each_thread(product: _Product) -> tuple[int, int]:
    """The rows and columns of a product that each thread computes (set_thread_opts_nopack)."""
    nrows, ncolumns, nthreads = product.nrows, product.ncolumns, threads()
    rows_cut, columns_cut = 1, nthreads
    are_many = ncolumns > nthreads * _UNCUT
    are_odd = are_many or ncolumns <= nthreads * _UNCUT // 2
    only_rows = not has_avx512() and ncolumns <= _UNCUT and nrows >= nthreads * _UNCUT
    if _have_shared_rows(product):
        pass  # they cut the columns alone
    elif are_odd and nrows >= 2 * _UNCUT and not only_rows:
        while (
            columns_cut % 2 == 0
            and (ncolumns // nthreads > _UNCUT or ncolumns // columns_cut <= _UNCUT // 2)
            and nrows // rows_cut >= 2 * _UNCUT
            and rows_cut < _MOST_CUTS_OF_ROWS
        ):
            rows_cut, columns_cut = 2 * rows_cut, columns_cut // 2
    elif nrows > ncolumns:
        rows_cut, columns_cut = nthreads, 1
    return -(-nrows // rows_cut), -(-ncolumns // columns_cut)


def _is_where_it_is(product: _Product) -> bool:
    """Is a product computed without copies, with AVX-512?"""
    nrows, ncolumns, depth = product[:3]
    first, second = product.first_is_turned, product.second_is_turned
    of_first, of_second, _ = product.lengths
    is_small = nrows < 1200 and ncolumns < 200 and depth < 1200
    are_uneven = of_first % _UNEVEN == of_second % _UNEVEN == 0
    is_very_uneven = of_first % _VERY_UNEVEN == 0
    if threads() == 1 and first and nrows > 100 and (is_small or are_uneven):
        return False
    is_plain = not first and not second
    if threads() <= 8 and is_plain and is_very_uneven and depth > 500 and ncolumns > 100:
        return False
    if 1 / nrows + 1 / ncolumns >= _FEW_AVX512 and not (is_very_uneven and second):
        return True
    if any(length % _UNEVEN == 0 for length in product.lengths) and nrows >= 32 and ncolumns > 16:
        return False
    if _is_deep(product):
        return False
    few = 28 * threads()
    return ncolumns <= few or depth <= threads() or (nrows <= few and not second)


def _is_where_it_is_with_avx2(product: _Product) -> bool:
    """The same with AVX2."""
    nrows, ncolumns, depth = product[:3]
    if 1 / nrows + 1 / ncolumns >= _FEW_AVX2:
        return True
    if _is_deep(product):
        return False
    few, shallow = (1, 1) if product.second_is_turned else (16, 2)
    return ncolumns <= few * threads() or depth <= shallow * threads()


def _is_deep(product: _Product) -> bool:
    """Have the threads many terms to add, of a small product or of one with many rows?"""
    nrows, ncolumns, depth = product[:3]
    many = _NOT_FEW * threads()
    return depth >= many and (max(nrows, ncolumns) <= _NOT_FEW or nrows >= many)


def _whole(number: int, block: int) -> int:
    """``number`` rounded up to whole blocks."""
    return -(-number // block) * block
