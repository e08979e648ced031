"""The scratchpads that oneDNN keeps for poolings of data in the usual layout, by shapes."""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import activated, convolved, pictures
from memplan.mxnet.realise.estimate import (
    onednn_kernels,
    pooling_scratchpads,
    scratchpads,
    whole_pictures,
)
from memplan.mxnet.realise.estimate.layout_copies import copies
from memplan.planning.realisation import trace

Symbol = mx.sym.Symbol

# Of 20 channels in blocks of 16 there are two for each picture.
SHAPE, BLOCK, WINDOW = (3, 20, 8, 8), 16, {"kernel": (2, 2), "stride": (2, 2)}


@pytest.fixture(autouse=True)
def _one_thread_of_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does depends on the processor: that of another machine is imagined."""
    for module in (onednn_kernels, pooling_scratchpads, whole_pictures):
        monkeypatch.setattr(module, "has_avx512", lambda: True)
    monkeypatch.setattr(pooling_scratchpads, "cache_nbytes_of_onednn", {3: 1 << 20}.get)
    _have_threads(monkeypatch, 1)


def _have_threads(monkeypatch: pytest.MonkeyPatch, nthreads: int) -> None:
    for module in (scratchpads, pooling_scratchpads):
        monkeypatch.setattr(module, "threads", lambda: nthreads)


def _kept(net: Symbol, shape: tuple[int, ...] = SHAPE, realisation: str = "mirror") -> int:
    loss = mx.sym.MakeLoss(mx.sym.tanh(net))
    traced = trace(loss, shapes={"data": shape}, grad_req="write", realisation=realisation)
    is_packed = realisation == "packed"
    layouts = copies(traced.graph, traced.nodes, by_executor=not is_packed).layouts
    return pooling_scratchpads.pooling_scratchpads(traced.nodes, layouts)


def _pooled(data: Symbol, **options: Any) -> Symbol:
    return mx.sym.Pooling(data, **{"pool_type": "max", **WINDOW, **options})


def _block(nread: int, nwritten: int, note_nbytes: int = 1) -> int:
    return BLOCK * (4 * nread + (4 + note_nbytes) * nwritten)


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        (SHAPE, {}, 2 * _block(64, 16)),
        (SHAPE, {"pool_type": "avg"}, 2 * _block(64, 16, 0)),
        (SHAPE, {"pool_type": "sum"}, 0),  # none of oneDNN's
        ((2, 20, 32, 32), {"kernel": (16, 16)}, 2 * _block(1024, 81, 4)),
        ((2, 20, 4, 8, 8), {"kernel": (2,) * 3, "stride": (2,) * 3}, 2 * _block(256, 32)),
        ((2, 20, 28, 28), {"global_pool": True}, _block(784, 1, 4)),  # the gradient is turned
        ((2, 20, 1, 64), {"kernel": (1, 2), "stride": (1, 2)}, 0),
        ((2, 3, 8, 8), {}, _block(64, 16)),  # of so few channels the gradient alone is oneDNN's
        ((2, 1, 8, 8), {}, 0),
        ((2, 20, 120, 120), {}, 0),  # more than fits the cache
    ],
)
def test_a_pooling_and_its_gradient_keep_a_block_of_what_they_read_and_write(
    shape: tuple[int, ...], options: dict[str, Any], expected: int
) -> None:
    assert _kept(_pooled(mx.sym.tanh(pictures()), **options), shape) == expected


@pytest.mark.parametrize(("nthreads", "blocks"), [(2, 2), (64, 6)])
def test_each_thread_has_a_block_as_far_as_there_are_some(
    nthreads: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_threads(monkeypatch, nthreads)
    assert _kept(_pooled(mx.sym.tanh(pictures()))) == blocks * 2 * _block(64, 16)


def test_equal_poolings_keep_one() -> None:
    data = mx.sym.tanh(pictures())
    assert _kept(_pooled(data) + _pooled(mx.sym.sin(data))) == 2 * _block(64, 16)


@pytest.mark.parametrize(("nfilter", "has_one"), [(16, False), (8, False), (12, True)])
def test_poolings_of_data_in_a_layout_of_onednns_keep_none(nfilter: int, has_one: bool) -> None:
    net = _pooled(activated(convolved(pictures(), nfilter)))
    assert (_kept(net, (2, 16, 8, 8)) > 0) is has_one


def test_processors_without_avx512_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling_scratchpads, "has_avx512", lambda: False)
    assert _kept(_pooled(mx.sym.tanh(pictures()))) == 0


@pytest.mark.parametrize(
    ("size", "realisation", "has_one"),
    [((8, 8), "packed", False), ((4, 8, 8), "packed", True), ((4, 8, 8), "mirror", False)],
)
def test_norms_of_volumes_leave_the_usual_layout_in_packed_steps(
    size: tuple[int, ...], realisation: str, has_one: bool
) -> None:
    twos = (2,) * len(size)
    kernel = {"kernel": (1,) * len(size), "num_filter": 16}
    normed = mx.sym.BatchNorm(mx.sym.Convolution(pictures(), **kernel), fix_gamma=False)
    net = _pooled(activated(normed), kernel=twos, stride=twos)
    expected = 2 * _block(math.prod(size), math.prod(size) // 2 ** len(size)) if has_one else 0
    assert _kept(net, (2, 16, *size), realisation) == expected
