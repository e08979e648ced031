"""What operators take on a CPU beside what they read and write, by their shapes.

MXNet gives an operator temporary space, and oneDNN primitives have scratchpads and code of their
own. Where an operator wants another layout than an array has, it makes a copy of it. What the
schedule decides is told apart. Of each part the module that counts it has the constants, and says
what they were set on:

- copies in other layouts, kept or temporary: ``layout_copies``, with ``layout_rules``;
- what is computed beside its place and copied there: ``copied_back``;
- the temporary space of operators without oneDNN: ``operator_space``, with ``numpy_space``,
  ``box_space`` and ``no_space``;
- scratchpads: ``scratchpads``, with ``columns``, and ``pooling_scratchpads``;
- buffers of products of matrices, and what threads take: ``matrix_buffers``;
- what recurrent layers keep: ``recurrent_workspace``;
- code: ``code_in_memory``.

Here these are added up, and it is counted what the C library keeps of what comes and goes: holes,
where something of another size lies next.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from memplan.memory.temporary import Temporary
from memplan.mxnet.realise.estimate.code_in_memory import (
    CALL_NBYTES,
    EXPLICIT_CALL_NBYTES,
    PACKED_CALL_NBYTES,
    code_nbytes,
    further_calls,
    uncounted_nbytes,
)
from memplan.mxnet.realise.estimate.copied_back import (
    copied_back_nbytes,
    is_beside_space,
    nbytes_if_overwriting,
    nbytes_if_unread,
)
from memplan.mxnet.realise.estimate.layout_copies import Copies, copies
from memplan.mxnet.realise.estimate.matrix_buffers import (
    buffers_nbytes,
    convolution_nbytes,
    kept_below,
    threads_nbytes,
)
from memplan.mxnet.realise.estimate.openmp import threads
from memplan.mxnet.realise.estimate.operator_space import is_known, label_nbytes, space_nbytes
from memplan.mxnet.realise.estimate.pooling_scratchpads import pooling_scratchpads
from memplan.mxnet.realise.estimate.processor import has_avx512
from memplan.mxnet.realise.estimate.recurrent_workspace import all_nbytes_moved, nbytes_kept
from memplan.mxnet.realise.estimate.scratchpads import largest_columns_nbytes, scratchpads
from memplan.mxnet.trace.layouts import reads_any_layout
from memplan.mxnet.trace.nnvm import Node, total_nbytes
from memplan.step.graph import UPDATE, TrainingGraph

# Products of matrices are made of copies of parts of them, of which each thread that makes one
# keeps its own: the process grows by up to 2 MB with each of the first products of 33 MB. What is
# kept for small ones is within what code takes.
MOST_FOR_PRODUCTS, SMALL_PRODUCT = 8 << 20, 1 << 20
_PRODUCTS = frozenset(
    """_contrib_interleaved_matmul_encdec_qk _contrib_interleaved_matmul_encdec_valatt
    _contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_selfatt_valatt
    _linalg_gemm _linalg_gemm2 _np_dot _npi_einsum _npi_matmul _npi_tensordot
    _npi_tensordot_int_axes batch_dot dot""".split()
)

# Those of them that multiply many matrices, one by one.
_BATCHED = frozenset({"_linalg_gemm", "_linalg_gemm2", "_npi_matmul", "batch_dot"})

# What is as large as this or larger goes back to the system when it is freed (M_MMAP_THRESHOLD of
# glibc's mallopt): 65 MB of copies of one weight leave no holes.
MOST_KEPT = 32 << 20

# The copies that an executor keeps for one operator without oneDNN count once more, but no more
# than this. Set on 28 networks of benchmarks/ and others, of which a relu's gradient has copies of
# 4 to 75 MB: with all of them the unplanned step of three-dimensional convolutions took 0.86 of
# what was promised and that of depthwise ones 0.94, with none of them that of `detector` 1.12.
MOST_COPIED_FIRST = 16 << 20

# So many buffers of dense layers lie beside each other in packed and explicit steps of one thread,
# and so often there is what else several threads take for such layers, in all steps: without it a
# transformer with four threads took 1.08 of what it was promised, and a translator 1.11.
BUFFERS = 2


@dataclass(frozen=True)
class _Figures:
    """Figures that are others where an executor leaves holes (:func:`executor_nbytes`).

    - ``nbuffers``: dense layers have buffers of oneDNN's. Packed and explicit steps return those
      that are much of a step (kept_below of matrix_buffers.py); of others the two largest lie
      beside each other, and five where there are holes, or several threads: what is freed does not
      join. Five were seen in use in turn.
    - ``times``: so often what threads take for convolutions was seen, in packed steps once.
    - ``call_nbytes``: what a call takes (:mod:`memplan.mxnet.realise.estimate.code_in_memory`).
    - ``further_nbytes``: what each further one takes. Mirrored steps were seen to take less than is
      counted for their calls, without further ones.
    - ``one_in``: of copies of every size one byte in so many counts: some lie in holes, where these
      count.
    """

    nbuffers: int
    times: int
    call_nbytes: int
    further_nbytes: int
    one_in: int


WITHOUT_HOLES = _Figures(BUFFERS, 1, EXPLICIT_CALL_NBYTES, EXPLICIT_CALL_NBYTES, one_in=5)
WITH_HOLES = _Figures(5, 2, CALL_NBYTES, 0, one_in=10)

# How much counts in packed steps of what a second operator without oneDNN copies. With AVX-512 the
# memory in which these copies lie was seen to grow by 4 to 6 MB more than with AVX2, of `dilated`
# and of `shuffled` on one machine (malloc_info behind the third step; DNNL_MAX_CPU_ISA=AVX2).
QUARTERS_OF_SECOND, QUARTERS_OF_SECOND_WITH_AVX512 = 2, 3


def executor_nbytes(
    graph: TrainingGraph, nodes: Sequence[Node], *, leaves_holes: bool
) -> tuple[int, tuple[int, ...], Temporary]:
    """The bytes beside an executor's blocks for a run of each op of ``graph``, which ``nodes`` are.

    And, op by op, what an explicit call takes for each further run, and what temporary space a step
    takes more if the schedule has the op computed beside its place. Of the copies that the executor
    keeps those of the base order are counted
    (:mod:`memplan.mxnet.realise.estimate.layout_copies`); other schedules keep others
    (:mod:`memplan.memory.layouts`). Beside these and scratchpads it has one temporary space
    (MXNet's src/executor/attach_op_resource_pass.cc), and the C library keeps some of what comes
    and goes: some of every size, at least as much as one op takes, and as much again
    where it ``leaves_holes``, because nobody tells it to give memory back, and no copies that are
    kept fill them, which leave a quarter of that; of large arrays it keeps nothing.
    Set on 130 schedules of the networks of benchmarks/process_networks.py, of Gluon's zoo and of
    GluonCV's, at AVX-512, and the holes on 26 networks of benchmarks/, at AVX2, by what an
    unplanned step takes more than an explicit one that recomputes nothing, and on 35 further ones,
    at AVX-512, for which those of copies of many sizes had been too large.
    """
    all_copies, figures = copies(graph, nodes), WITH_HOLES if leaves_holes else WITHOUT_HOLES
    nbytes, temporary = _in_space(graph, nodes, all_copies, leaves_holes=leaves_holes)
    nbytes += max(map(space_nbytes, nodes), default=0)
    nbytes += _of_dense_layers(nodes, figures) + _of_threads(nodes, figures.times)
    nbytes += code_nbytes(nodes, figures.call_nbytes)
    # Executors were seen to hold more: there every call that meets oneDNN's layouts counts.
    layouts = [n if any(met) else None for n, met in enumerate(all_copies.layouts)]
    kept_behind = scratchpads(graph, nodes, layouts) + _kept_nbytes(nodes)
    kept_behind += pooling_scratchpads(nodes, all_copies.layouts)
    further = further_calls(graph, figures.further_nbytes)
    return sum(all_copies.kept_nbytes) + nbytes + kept_behind, tuple(further), temporary


def _in_space(
    graph: TrainingGraph, nodes: Sequence[Node], all_copies: Copies, *, leaves_holes: bool
) -> tuple[int, Temporary]:
    """What comes and goes, with its holes, in the base order; and what some schedules add to that.

    MXNet's temporary space stays as large as it was once: what oneDNN computes in memory of its own
    comes beside it.
    """
    copied, beside = _apart(all_copies)
    copied_back = copied_back_nbytes(graph, nodes)
    space, with_holes = _spaces(copied, copied_back)
    most_beside = max(beside, default=0)
    space, with_holes = space + most_beside, max(with_holes, min(most_beside, MOST_KEPT))
    nbytes_of = functools.cache(
        functools.partial(_of_copies, all_copies, largest_nbytes(nodes), leaves_holes=leaves_holes)
    )
    counted = nbytes_of(space, with_holes)
    most = {False: 0, True: 0}
    for node, nbytes in zip(nodes, map(operator.add, copied, copied_back), strict=True):
        most[is_beside_space(node)] = max(most[is_beside_space(node)], nbytes)

    def further(index: int, nbytes: int) -> int:
        in_space, holes = _spaces([copied[index]], [nbytes])
        more = in_space - most[is_beside_space(nodes[index])]
        if not nbytes or more <= 0:
            return 0
        return nbytes_of(space + more, max(with_holes, holes)) - counted

    overwriting, unread = (
        tuple(further(index, nbytes) for index, nbytes in enumerate(of_ops))
        for of_ops in (nbytes_if_overwriting(graph, nodes), nbytes_if_unread(graph, nodes))
    )
    return counted, Temporary(overwriting, unread)


def _of_copies(
    all_copies: Copies, largest: int, space: int, with_holes: int, *, leaves_holes: bool
) -> int:
    """What comes and goes, and its holes, with so much ``space`` for an op of oneDNN."""
    kept, sizes = all_copies.kept_nbytes, set(all_copies.temporary_nbytes)
    for_copies, copied_first = max(sizes, default=0), min(max(kept, default=0), MOST_COPIED_FIRST)
    of_others = max(3 * largest // 2, copied_first)
    of_one = max(space, of_others)
    one_in = (WITH_HOLES if leaves_holes else WITHOUT_HOLES).one_in
    nbytes = max(of_one, for_copies + sum(size for size in sizes if size < MOST_KEPT) // one_in)
    if not leaves_holes:
        return nbytes
    holes = max(with_holes, min(of_others, MOST_KEPT))
    return nbytes + max(holes // 4, holes - sum(kept))


def packed_nbytes(
    graph: TrainingGraph, nodes: Sequence[Node], copying: Collection[int] = ()
) -> int:
    """The bytes beside their array for the ops of ``graph``, which ``nodes`` are, called in turn.

    One temporary space, in which operators of oneDNN have their copies, and a loss that of its
    label, with half the largest of the former (but for what goes back to the system), and the
    copies of an operator without oneDNN (CreateDefaultInputs of MXNet's src/common/exec_utils.h).
    Where these are more, some of those of a second such operator count, as copies often do not fit
    where those of an operator before were, beside the space. What a norm takes comes on top, or
    what a sort does, or, for an op of which nobody knows what it takes, what it reads and writes,
    and three quarters of it.
    Set on 34 networks, those of benchmarks/process_networks.py and of Gluon's and GluonCV's zoos,
    by ``chen_sqrt`` at AVX2, and on those of benchmarks/ at AVX-512. Half the copies of an
    operator were counted on top before MXNet's code was: they still are in small networks, up to
    what is not counted of the code there. The ops that are ``copying`` from one shape to another
    have no copies beside what they write.
    """
    all_copies = copies(graph, nodes, by_executor=False)
    copied_back = copied_back_nbytes(graph, nodes)
    in_space, beside_it = _apart(all_copies)
    space, _ = _spaces(in_space, copied_back)
    space = max(space, max(map(label_nbytes, nodes), default=0))
    # What an operator copies leaves a hole, or what it computes beside its place, not both.
    largest = max(*_holes(in_space), *_kept(copied_back), 0)
    in_calls = map(operator.add, all_copies.kept_nbytes, beside_it)
    *_, second, kept = 0, 0, *sorted(n for op, n in enumerate(in_calls) if op not in copying)
    quarters = QUARTERS_OF_SECOND_WITH_AVX512 if has_avx512() else QUARTERS_OF_SECOND
    again = quarters * second // 4 + min(kept // 2, uncounted_nbytes(nodes, PACKED_CALL_NBYTES))
    for_copies = space + kept + max(largest // 2, again)
    of_others = max(7 * largest_nbytes(nodes) // 4, max(map(space_nbytes, nodes), default=0))
    nbytes = for_copies + of_others + _kept_nbytes(nodes) + all_nbytes_moved(nodes)
    nbytes += scratchpads(graph, nodes, all_copies.layouts)
    nbytes += pooling_scratchpads(nodes, all_copies.layouts)
    nbytes += _of_dense_layers(nodes, WITHOUT_HOLES) + _of_threads(nodes)
    return nbytes + code_nbytes(nodes, PACKED_CALL_NBYTES)


def _apart(all_copies: Copies) -> tuple[list[int], list[int]]:
    """Op by op the bytes of temporary copies: those in MXNet's temporary space, and the others."""
    in_space, beside = list(all_copies.temporary_nbytes), [0] * len(all_copies.temporary_nbytes)
    for index in all_copies.beside:
        in_space[index], beside[index] = 0, in_space[index]
    return in_space, beside


def _spaces(copied: Sequence[int], copied_back: Sequence[int]) -> tuple[int, int]:
    """The most that an op copies and computes beside its place, and the most that leaves holes.

    What is computed beside its place leaves none where the C library gives it back at once.
    """
    both = map(operator.add, copied, copied_back)
    with_holes = map(operator.add, _holes(copied), _kept(copied_back))
    return max(both, default=0), max(with_holes, default=0)


def _holes(copied: Iterable[int]) -> list[int]:
    """What the C library keeps of the copies of each op, which are two arrays at most, mostly."""
    return [min(nbytes, MOST_KEPT) if nbytes < 2 * MOST_KEPT else 0 for nbytes in copied]


def _kept(sizes: Iterable[int]) -> list[int]:
    """Of arrays of these sizes the bytes that the C library keeps."""
    return [nbytes if nbytes < MOST_KEPT else 0 for nbytes in sizes]


def largest_nbytes(nodes: Iterable[Node]) -> int:
    """The most that an op reads and writes of which nobody knows what it takes, oneDNN's left out.

    Parameters and their gradients are not counted. Sums of gradients, and updates, read and write
    in place.
    """
    in_place = (UPDATE, "_grad_add")
    others = (node for node in nodes if node.op not in in_place and not reads_any_layout(node))
    unknown = (node for node in others if not is_known(node))
    return max(map(_read_and_written, unknown), default=0)


def _read_and_written(node: Node) -> int:
    call = node.call
    reads = zip(node.inputs, node.infos.inputs, strict=False)
    writes = list(node.infos.outputs)
    if call is not node:  # what it writes are gradients of what the forward op reads
        writes = [
            info
            for place, info in enumerate(writes)
            if place >= len(call.inputs) or not call.inputs[place][0].is_variable
        ]
    of_tensors = [info for (source, _), info in reads if not source.is_variable]
    return total_nbytes((*of_tensors, *writes))


def _kept_nbytes(nodes: Sequence[Node]) -> int:
    """What is kept behind operators: states of recurrent layers, parts of matrices."""
    return _recurrent_nbytes(nodes) + _for_matrices(nodes)


def _for_matrices(nodes: Iterable[Node]) -> int:
    """Copies of parts of matrices of which products are made, in the largest product."""
    sizes = (
        total_nbytes((*node.infos.inputs, *node.infos.outputs)) // _nproducts(node.call)
        for node in nodes
        if node.call.op in _PRODUCTS
    )
    return min(MOST_FOR_PRODUCTS, max(0, max(sizes, default=0) - SMALL_PRODUCT))


def _nproducts(call: Node) -> int:
    """How many products ``call`` makes, one after another."""
    data, out = call.infos.inputs[0], call.infos.outputs[0]
    if data is None or out is None:
        return 1
    if "heads" in call.attrs:  # of heads that lie side by side, by picture or text
        return max(1, int(call.attrs["heads"]) * data.shape[1])
    return max(1, math.prod(out.shape[:-2])) if call.op in _BATCHED else 1


def _of_dense_layers(nodes: Sequence[Node], figures: _Figures) -> int:
    """The largest buffer of dense layers or, if these are more, several of those that are kept."""
    sizes = sorted((size for node in nodes for size in buffers_nbytes(node)), reverse=True)
    most_kept = MOST_KEPT if figures is WITH_HOLES else kept_below(nodes)
    kept = [size for size in sizes if size < most_kept]
    nbuffers = (WITH_HOLES if threads() > 1 else figures).nbuffers
    return max(sizes[0], sum(kept[:nbuffers])) if sizes else 0


def _of_threads(nodes: Sequence[Node], times: int = 1) -> int:
    """What threads keep of the largest product, of a convolution so many ``times``."""
    dense = max((size for node in nodes for size in buffers_nbytes(node)), default=0)
    of_columns = threads_nbytes(largest_columns_nbytes(nodes))
    of_products = max(map(convolution_nbytes, nodes), default=0)
    return max(BUFFERS * threads_nbytes(dense), times * max(of_columns, of_products))


def _recurrent_nbytes(nodes: Iterable[Node]) -> int:
    """What the recurrent layers keep from their forward to their backward ops."""
    return sum(nbytes_kept(node) for node in nodes if node.op == "RNN")
