"""The buffers of products of matrices: what oneDNN's source says, and what it was seen to take."""

from __future__ import annotations

import mxnet as mx
import pytest

from memplan.mxnet.realise.estimate import matrix_buffers, workspace_estimate
from memplan.mxnet.realise.estimate.matrix_buffers import buffers_nbytes
from memplan.mxnet.realise.estimate.workspace_estimate import (
    BUFFERS,
    WITH_HOLES,
    WITHOUT_HOLES,
    executor_nbytes,
    packed_nbytes,
)
from memplan.mxnet.trace.build import Trace
from memplan.planning.realisation import trace


@pytest.fixture(autouse=True)
def _avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor, and the threads, of another machine are imagined."""
    monkeypatch.setattr(matrix_buffers, "has_avx512", lambda: True)
    for module in (matrix_buffers, workspace_estimate):
        monkeypatch.setattr(module, "threads", lambda: 1)


def _traced(batch: int, ninputs: int, noutputs: int, realisation: str = "packed") -> Trace:
    data = mx.sym.tanh(mx.sym.Variable("data"))
    dense = mx.sym.FullyConnected(data, num_hidden=noutputs, no_bias=True, name="dense")
    net = mx.sym.MakeLoss(mx.sym.mean(dense))
    return trace(net, shapes={"data": (batch, ninputs)}, realisation=realisation)


def _buffers(traced: Trace) -> tuple[int, int]:
    """That of the layer, and that of its gradients."""
    forward = next(node for node in traced.nodes if node.name == "dense")
    backward = next(node for node in traced.nodes if node.forward is forward)
    return max(buffers_nbytes(forward)), max(buffers_nbytes(backward))


# By how many MB a process was seen to grow: in a layer, in the gradient of its data, and in that of
# its weight (Intel Xeon with AVX-512). Where all columns of a product are copied at once, most of
# the buffer is never written: with 384 rows as much is allocated as with 400.
@pytest.mark.parametrize(
    ("sizes", "nthreads", "seen"),
    [
        ((256, 4096, 4096), 1, (0.23, 0.32, 4.51)),
        ((16, 16384, 2048), 1, (0.01, 0, 0.47)),
        ((384, 16384, 2048), 1, (0.59, 0.59, 15.8)),
        ((400, 16384, 2048), 1, (3.61, 15.74, 8.19)),
        ((256, 1024, 8192), 1, (0.33, 0.33, 1.38)),
        ((8, 25088, 4096), 1, (0, 0, 0.2)),
        # Four threads share all of these rows.
        ((384, 16384, 2048), 4, (0, 25.75, None)),
    ],
)
def test_as_much_counts_as_onednn_writes(
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    nthreads: int,
    seen: tuple[float | None, ...],
) -> None:
    monkeypatch.setattr(matrix_buffers, "threads", lambda: nthreads)
    nodes = _traced(*sizes).nodes
    forward = next(node for node in nodes if node.name == "dense")
    backward = next(node for node in nodes if node.forward is forward)
    counted = [nbytes / 1e6 for nbytes in buffers_nbytes(forward) + buffers_nbytes(backward)]
    for megabytes, grown in zip(counted, seen, strict=True):
        assert grown is None or grown <= megabytes < grown + 0.3


# Seen with a malloc that prints, but for two pages, of gradients of 2048 by 2048.
def test_buffers_of_many_columns_are_what_onednn_allocates() -> None:
    assert _buffers(_traced(256, 2048, 2048))[1] == 2_514_944 - 8192


def test_small_products_have_no_buffers() -> None:
    assert _buffers(_traced(8, 500, 100)) == (0, 0)
    # Of one whose first matrix is turned round, as that of the layer itself, these are copied.
    assert _buffers(_traced(8, 500, 600)) == (4 * 250 * (48 + 8), 0)


def test_avx2_copies_fewer_terms_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with_avx512 = _buffers(_traced(2048, 2048, 2048))
    monkeypatch.setattr(matrix_buffers, "has_avx512", lambda: False)
    assert _buffers(_traced(2048, 2048, 2048)) == (4 * 192 * (2064 + 384),) * 2
    assert with_avx512 == (4 * 384 * (2064 + 384),) * 2


# Of the gradients of 2048 by 784 by 2048 a malloc that prints showed 1,261,568 bytes for each of 4
# threads, and 1,064,960 for each of 16: but for two pages, and with 16 for the rows that lie where
# others did.
@pytest.mark.parametrize(
    ("nthreads", "of_each"), [(4, 1_261_568 - 8192), (16, 1_064_960 - 8192 - 4 * 384 * (432 - 48))]
)
def test_threads_have_parts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, nthreads: int, of_each: int
) -> None:
    monkeypatch.setattr(matrix_buffers, "threads", lambda: nthreads)
    nodes = _traced(2048, 784, 2048).nodes
    of_gradients = next(buffers_nbytes(node) for node in nodes if node.op.startswith("_backward_F"))
    assert of_gradients[0] == nthreads * of_each


@pytest.mark.parametrize("nthreads", [2, 9, 10, 12])
def test_threads_share_ten_times_the_rows_of_one_or_more(
    monkeypatch: pytest.MonkeyPatch, nthreads: int
) -> None:
    monkeypatch.setattr(matrix_buffers, "threads", lambda: nthreads)
    nrows = min(120_000, 9984 * max(nthreads, 10))
    columns = nthreads * -(-min(384, -(-2000 // nthreads)) // 8) * 8
    assert _buffers(_traced(2000, 64, 120_000))[0] == 4 * 64 * (-(-nrows // 48) * 48 + columns)


# What each of four threads copies at a time: they cut the rows of products with many columns, else
# columns, or both, or, where there are few columns, rows again.
@pytest.mark.parametrize(
    ("sizes", "rows", "columns"),
    [
        ((2048, 256, 20_000), 5016, 384),
        ((1500, 256, 20_000), 5016, 384),
        ((1000, 256, 900), 24, 252),
        ((400, 256, 20_000), 24, 200),
        ((300, 256, 20_000), 24, 300),
    ],
)
def test_threads_cut_rows_and_columns_with_avx2(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], rows: int, columns: int
) -> None:
    monkeypatch.setattr(matrix_buffers, "has_avx512", lambda: False)
    monkeypatch.setattr(matrix_buffers, "threads", lambda: 4)
    assert _buffers(_traced(*sizes))[0] == 4 * 4 * 256 * (rows + columns)


def test_convolutions_have_parts_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix_buffers.threads_nbytes(1 << 20) == 0
    monkeypatch.setattr(matrix_buffers, "threads", lambda: 4)
    assert matrix_buffers.threads_nbytes(1 << 20) == 4 * 1_250_000
    assert matrix_buffers.threads_nbytes(1000) == 4 * 1500


def test_what_is_smaller_than_large_buffers_is_kept_and_buffers_that_are_little_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = _traced(8, 500, 600).nodes, _traced(600, 256, 20_000).nodes
    assert matrix_buffers.kept_below(small) == 32 << 20
    assert matrix_buffers.kept_below(large) == 4 * 256 * (9984 + 384)
    assert matrix_buffers.kept_below(large * 100) == 32 << 20
    few = _traced(512, 1024, 1024).nodes
    assert matrix_buffers.kept_below(few) == 32 << 20, "seven of them are too few for the time"
    monkeypatch.setattr(matrix_buffers, "threads", lambda: 4)
    assert matrix_buffers.kept_below(large) == 0, "the parts of threads are smaller"


@pytest.mark.parametrize(
    ("name", "value", "kept_nbytes"),
    [
        ("MXNET_CPU_WORKER_NTHREADS", "1", 32 << 20),
        ("MXNET_CPU_WORKER_NTHREADS", "4", 0),
        ("MXNET_ENGINE_TYPE", "ThreadedEnginePerDevice", 32 << 20),
        ("MXNET_ENGINE_TYPE", "ThreadedEngine", 0),
        ("MXNET_ENGINE_TYPE", "NaiveEngine", 0),
    ],
)
def test_nothing_is_kept_where_one_worker_does_not_run_all(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, kept_nbytes: int
) -> None:
    """Each worker would keep memory of its own."""
    nodes = _traced(8, 500, 600).nodes
    monkeypatch.setenv(name, value)
    assert matrix_buffers.kept_below(nodes) == kept_nbytes


@pytest.mark.parametrize("nthreads", [1, 16])
@pytest.mark.parametrize("realisation", ["mirror", "explicit", "packed"])
def test_every_estimate_has_room_for_the_buffers(
    monkeypatch: pytest.MonkeyPatch, realisation: str, nthreads: int
) -> None:
    monkeypatch.setattr(matrix_buffers, "threads", lambda: nthreads)
    traced = _traced(2048, 2048, 2048, realisation)
    estimates = []
    for buffers in (buffers_nbytes, lambda _: []):
        monkeypatch.setattr(workspace_estimate, "buffers_nbytes", buffers)
        if realisation == "packed":
            estimates.append(packed_nbytes(traced.graph, traced.nodes))
        else:
            has_holes = realisation == "mirror"
            graph, nodes = traced.graph, traced.nodes
            estimates.append(executor_nbytes(graph, nodes, leaves_holes=has_holes)[0])
    # There are three products, of equal matrices. Large buffers go back behind each.
    times = min(3, WITH_HOLES.nbuffers) if realisation == "mirror" else 1
    of_threads = BUFFERS * nthreads * 1_250_000 if nthreads > 1 else 0
    assert estimates[0] - estimates[1] == times * max(_buffers(traced)) + of_threads


def test_two_small_buffers_count_in_packed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = _traced(64, 1024, 1024)
    counted = packed_nbytes(traced.graph, traced.nodes)
    sizes = [size for node in traced.nodes for size in buffers_nbytes(node)]
    assert sum(sizes) > max(sizes) > 0
    monkeypatch.setattr(workspace_estimate, "buffers_nbytes", lambda _: [])
    without = packed_nbytes(traced.graph, traced.nodes)
    assert counted - without == sum(sorted(sizes)[-BUFFERS:])


def test_small_buffers_of_several_threads_count_as_often_as_in_other_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = _traced(64, 1024, 1024)
    nodes = [node for node in traced.nodes if node.name == "dense"]
    for module in (matrix_buffers, workspace_estimate):
        monkeypatch.setattr(module, "threads", lambda: 4)
    monkeypatch.setattr(workspace_estimate, "buffers_nbytes", lambda _: [1000] * 6)
    counted = workspace_estimate._of_dense_layers(nodes, WITHOUT_HOLES)
    assert counted == WITH_HOLES.nbuffers * 1000
