"""The buffers in which oneDNN puts parts of matrices that it multiplies together, on a CPU.

Those of dense layers, and where there are several threads those of gradients of convolutions.

Read in the source of oneDNN 2.4 (src/cpu/gemm_inner_product.cpp and gemm_convolution.cpp, and
gemm_driver.cpp and gemm_info.cpp of src/cpu/x64/gemm). A product of small matrices is computed
where they are. Of others so many rows and columns are copied at a time, into memory that is freed
behind each product. Counted is what is written of that memory, not what is allocated: where all
columns are copied at once, rows are copied by a few, each time to the same place. Threads that make
a product together copy parts of their own, each in memory of its own, or share the rows, which are
then all copied. The array that they get for a deep product of matrices that are not copied is as
large as 19 MB with 16 threads, but none writes to it: what is multiplied at a time fits the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memplan.mxnet.realise.estimate.onednn_kernels import kernels
from memplan.mxnet.realise.estimate.openmp import threads
from memplan.mxnet.realise.estimate.operator_space import is_convolution_of_mxnet
from memplan.mxnet.realise.estimate.processor import has_avx512
from memplan.mxnet.realise.estimate.scratchpads import columns_of
from memplan.mxnet.trace.environment import engine_has_one_worker, onednn_is_enabled
from memplan.mxnet.trace.nnvm import Node, total_nbytes
from memplan.mxnet.trace.operators import CONVOLUTIONS
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

# For each thread that makes a product of matrices where they are, so many numbers are allocated by
# term to add, if there are more terms than fit its stack (STACK_K_CAPACITY of
# jit_avx512_common_gemm_f32.cpp and jit_avx_gemm_f32.cpp). A malloc that prints showed 4.9 MB of 4
# threads and 6,400 terms, 3.6 MB of 8 and 2,304, and none of 8 and 1,936 (AVX-512).
_ARRAY_AVX512, _ARRAY_AVX2 = 48, 16
_DEPTH_OF_STACK_AVX512, _DEPTH_OF_STACK_AVX2 = 2048, 8192

# Buffers of this size and more go back to the system where as many of the largest as may lie beside
# each other are more than one byte in so many that the step writes, and than 16 MiB, for it takes
# time: a perceptron of six layers of 1,024, of which they are 15 MB, spent 5 to 12% more of it
# (:func:`kept_below`).
_LEAST_RETURNED, _BESIDE_EACH_OTHER, _ONE_IN, _LEAST_GROWTH = 1 << 20, 7, 20, 16 << 20


class _Product(NamedTuple):
    """``nrows`` by ``ncolumns`` of sums of ``depth`` terms, and how long the rows are in memory.

    So many threads make it together. The first matrix, or the second one, ``is_turned``.
    """

    nrows: int
    ncolumns: int
    depth: int
    lengths: tuple[int, int, int]
    nthreads: int
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
    counted for all of them: there what is larger than 128 KiB is returned. So it is for gradients
    of convolutions that several threads compute as products of matrices. They allocate such buffers
    for every picture, or arrays as large, and a process grew with every step. So it is, too, where
    more than one thread runs operators, as each would keep what it has freed, and in a thread that
    runs other code as well, whose holes would be cut up.
    """
    if not engine_has_one_worker():
        return 0
    sizes = [size for node in nodes for size in buffers_nbytes(node)]
    sizes += (_allocated(each) * times for node in nodes for each, times in _of_gradients(node))
    returned = [size for size in sizes if size >= _LEAST_RETURNED]
    written_nbytes = sum(total_nbytes(node.infos.outputs) for node in nodes)
    growth_nbytes = _BESIDE_EACH_OTHER * max(returned, default=0)
    if growth_nbytes <= max(written_nbytes // _ONE_IN, _LEAST_GROWTH):
        return KEPT_NBYTES
    return 0 if threads() > 1 else min(KEPT_NBYTES, *returned)


def convolution_nbytes(node: Node) -> int:
    """What all threads take for a product that is a gradient of a convolution ``node``, at most.

    Nothing where there is one thread, of which it is within what counts for code.
    """
    return max((_nbytes(each) * times for each, times in _of_gradients(node)), default=0)


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
        return [_Product(noutputs, batch, ninputs, lengths, threads(), first_is_turned=True)]
    lengths = ninputs, noutputs, ninputs
    return [
        _Product(ninputs, batch, noutputs, lengths, threads()),
        _Product(ninputs, noutputs, batch, lengths, threads(), second_is_turned=True),
    ]


def _of_gradients(node: Node) -> list[tuple[_Product, int]]:
    """The gradients of convolutions that ``node`` computes as products of matrices.

    And how many threads make one for themselves at a time. A deconvolution is the gradient of the
    data of a convolution. Convolutions themselves are multiplied in parts that fit a cache.
    """
    call, nthreads = node.call, threads()
    if nthreads == 1 or call.op not in CONVOLUTIONS or is_convolution_of_mxnet(call):
        return []
    columns = columns_of(call)
    if columns is None:
        return []
    found, is_back = kernels(call), call.op == "Deconvolution"
    conv, nplaces = columns.conv, columns.nplaces
    noutputs, ncolumns = conv.noutputs, conv.ninputs * columns.kernel
    products = []
    if (node is call) == is_back and (found.forward if is_back else found.of_data).has_columns:
        of_each = 1 if columns.splits_gradient_of_data() else nthreads
        lengths = nplaces, ncolumns, nplaces
        turned = _Product(nplaces, ncolumns, noutputs, lengths, of_each, second_is_turned=True)
        products.append(turned)
    if node is not call and found.of_weight.has_columns:
        of_each = 1 if columns.splits_gradient_of_weight() else nthreads
        lengths = nplaces, nplaces, ncolumns
        turned = _Product(ncolumns, noutputs, nplaces, lengths, of_each, first_is_turned=True)
        products.append(turned)
    at_once = min(nthreads, conv.batch * conv.groups)
    return [(each, at_once if each.nthreads == 1 else 1) for each in products]


def _allocated(product: _Product) -> int:
    """What is copied of a product, or allocated for one that is made where it is."""
    by_term = _ARRAY_AVX512 if has_avx512() else _ARRAY_AVX2
    of_stack = _DEPTH_OF_STACK_AVX512 if has_avx512() else _DEPTH_OF_STACK_AVX2
    if product.depth <= of_stack:
        return _nbytes(product)
    return _nbytes(product) or 4 * by_term * product.depth * product.nthreads


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
        most_rows = blocks.most_rows * max(product.nthreads, _LEAST_TIMES_SHARED)
        nrows = _whole(min(nrows, most_rows), blocks.rows)
        return 4 * depth * (nrows + product.nthreads * ncolumns)
    most_rows = blocks.rows if of_thread <= most_columns else blocks.most_rows
    nrows = _whole(min(nrows, most_rows), blocks.rows)
    return 4 * depth * (nrows + ncolumns) * product.nthreads


def _have_shared_rows(product: _Product) -> bool:
    """Do threads copy the rows of a product together, for all of them?"""
    if product.nthreads == 1 or product.nrows < _SHARED_ROWS:
        return False
    of_threads = _SHARED_COLUMNS_BY_THREAD * product.nthreads
    return product.ncolumns >= (of_threads if has_avx512() else _SHARED_COLUMNS_AVX2)


def _of_each_thread(product: _Product) -> tuple[int, int]:
    """The rows and columns of a product that each thread computes (set_thread_opts_nopack)."""
    nrows, ncolumns, nthreads = product.nrows, product.ncolumns, product.nthreads
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
    if product.nthreads == 1 and first and nrows > 100 and (is_small or are_uneven):
        return False
    is_plain = not first and not second
    if product.nthreads <= 8 and is_plain and is_very_uneven and depth > 500 and ncolumns > 100:
        return False
    if 1 / nrows + 1 / ncolumns >= _FEW_AVX512 and not (is_very_uneven and second):
        return True
    if any(length % _UNEVEN == 0 for length in product.lengths) and nrows >= 32 and ncolumns > 16:
        return False
    if _is_deep(product):
        return False
    few = 28 * product.nthreads
    return ncolumns <= few or depth <= product.nthreads or (nrows <= few and not second)


def _is_where_it_is_with_avx2(product: _Product) -> bool:
    """The same with AVX2."""
    nrows, ncolumns, depth = product[:3]
    if 1 / nrows + 1 / ncolumns >= _FEW_AVX2:
        return True
    if _is_deep(product):
        return False
    few, shallow = (1, 1) if product.second_is_turned else (16, 2)
    return ncolumns <= few * product.nthreads or depth <= shallow * product.nthreads


def _is_deep(product: _Product) -> bool:
    """Have the threads many terms to add, of a small product or of one with many rows?"""
    nrows, ncolumns, depth = product[:3]
    many = _NOT_FEW * product.nthreads
    return depth >= many and (max(nrows, ncolumns) <= _NOT_FEW or nrows >= many)


def _whole(number: int, block: int) -> int:
    """``number`` rounded up to whole blocks."""
    return -(-number // block) * block
