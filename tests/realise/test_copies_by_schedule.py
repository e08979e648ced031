"""Which copies of arrays in oneDNN's layouts an executor keeps depends on what a schedule drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import (
    SHAPE,
    N,
    activated,
    classified,
    convolved,
    normed,
    pictures,
    pooled,
)
from memplan.memory.layouts import kept_nbytes
from memplan.mxnet.realise.estimate import onednn_kernels
from memplan.mxnet.realise.estimate.layout_copies import copies
from memplan.mxnet.realise.estimate.layout_rules import rules
from memplan.planning.job import Job
from memplan.planning.realisation import load, trace
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol


@pytest.fixture(autouse=True)
def _avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does depends on the processor: that of another machine is imagined."""
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: True)


def _prelu(data: Symbol) -> Symbol:
    return mx.sym.LeakyReLU(data, act_type="prelu")


def _in_rows(data: Symbol) -> Symbol:
    options = {"num_filter": 16, "kernel": (3,), "pad": (1,), "no_bias": True}
    return mx.sym.Convolution(data, **options)


def _swish(data: Symbol) -> Symbol:
    return data * mx.sym.sigmoid(data)


ROWS = (2, 16, 64)  # as many bytes as SHAPE
FIRST = 0  # the convolution whose output the backward op of the activation reads


def _recomputing_first(job: Job) -> Schedule:
    """The schedule that runs the first convolution again before a backward op reads its output."""
    graph = job.graph
    [tensor] = graph.ops[FIRST].outputs
    order = list(range(len(graph.ops)))
    order.insert(next(op for op in graph.readers[tensor] if op >= graph.nforward), FIRST)
    return Schedule.sequence(graph, order)


# What the convolution wrote dies at its last reader before the backward pass, which is written over
# it then and keeps its output in that layout, too. A relu behind copies that and is written over
# it; a convolution reads it as it is.
@pytest.mark.parametrize(
    ("net", "shape", "more"),
    [
        (lambda data: convolved(_swish(convolved(data))), SHAPE, 1),
        (lambda data: normed(convolved(_swish(convolved(data)))), SHAPE, 1),
        (lambda data: mx.sym.relu(mx.sym.square(convolved(data))), SHAPE, 3),
        (lambda data: _in_rows(_prelu(_in_rows(data))), ROWS, 2),
    ],
)
def test_an_input_that_is_recomputed_dies_where_it_is_written_over(
    net: Callable[[Symbol], Symbol], shape: tuple[int, ...], more: int
) -> None:
    job = Job.prepare(classified(net(pictures())), realisation="explicit", ctx=mx.cpu(), data=shape)
    unplanned, schedule = Schedule.unplanned(job.graph), _recomputing_first(job)
    layouts = job.beside.layouts
    assert kept_nbytes(schedule, layouts) == kept_nbytes(unplanned, layouts) + more * N
    nbytes = [job.realised(each).footprint.workspace_nbytes for each in (unplanned, schedule)]
    assert nbytes[1] == nbytes[0] + more * N
    assert job.holds(schedule) == job.realised(schedule).footprint.total_nbytes
    assert job.memory.at_least(schedule) <= job.memory.nbytes(schedule)
    assert not job.memory.excess(schedule, job.memory.nbytes(schedule))


def test_fewer_copies_than_the_unplanned_steps_lower_no_promise() -> None:
    """Bounds for all schedules count those of the unplanned step."""
    relu = mx.sym.relu(convolved(pictures()), name="relu")
    net = mx.sym.sin(relu) + mx.sym.cos(relu) + mx.sym.tan(relu)
    job = Job.prepare(classified(net), realisation="explicit", ctx=mx.cpu(), data=SHAPE)
    unplanned, layouts = Schedule.unplanned(job.graph), job.beside.layouts
    names, order = [op.name for op in job.graph.ops], list(range(len(job.graph.ops)))
    order.insert(job.graph.nforward, names.index("relu"))  # its input lives on until then
    schedule = Schedule.sequence(job.graph, order)
    assert kept_nbytes(schedule, layouts) < kept_nbytes(unplanned, layouts)
    nbytes = [job.realised(each).footprint.workspace_nbytes for each in (unplanned, schedule)]
    assert nbytes[0] == nbytes[1]


def test_a_network_of_onednns_operators_has_nothing_to_count() -> None:
    net = classified(activated(normed(convolved(activated(convolved(pictures()))))))
    for realisation in ("mirror", "explicit"):
        job = Job.prepare(net, realisation=realisation, ctx=mx.cpu(), data=SHAPE)
        assert not job.beside.layouts


# MXNet's own code computes other dtypes than float32, in the usual layout: no copies are made, not
# of what the gradients of poolings of whole pictures leave, nor for BatchNorms of volumes.
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(2, 4, 8, 8), (2, 4, 2, 4, 4)])
def test_of_other_dtypes_than_float32_there_are_no_copies(
    dtype: str, shape: tuple[int, ...]
) -> None:
    net = normed(_swish(normed(pictures() * 2)))
    kernel = (1,) * (len(shape) - 2)
    net = classified(mx.sym.Pooling(net, kernel=kernel, global_pool=True, pool_type="avg"))
    options: dict[str, Any] = {"type_dict": {"data": dtype}, "realisation": "explicit"}
    traced = trace(net, shapes={"data": shape}, **options)
    found = copies(traced.graph, traced.nodes)
    has_copies = any((*found.kept_nbytes, *found.temporary_nbytes))
    assert has_copies is (dtype == "float32")
    assert bool(rules(traced.graph, traced.nodes)) is (dtype == "float32")


def _residual(data: Symbol) -> Symbol:
    body = convolved(mx.sym.tanh(normed(convolved(data))))
    return mx.sym.relu(body + convolved(data))


def _joined(data: Symbol) -> Symbol:
    parts = [convolved(mx.sym.relu(convolved(data))) for _ in range(2)]
    return mx.sym.sigmoid(convolved(mx.sym.Concat(*parts, dim=1)))


def _softmax(data: Symbol) -> Symbol:
    return mx.sym.softmax(data, axis=1)


def _like_a_softmax_read(data: Symbol) -> Symbol:
    read = convolved(data)
    return mx.sym.sigmoid(convolved(_softmax(read))) + mx.sym.ones_like(read)


def _like_a_tanh_read(data: Symbol) -> Symbol:
    read = convolved(data)
    return convolved(mx.sym.tanh(read)) + mx.sym.ones_like(read)


NETWORKS: dict[str, Callable[[Symbol], Symbol]] = {
    "relu": lambda data: mx.sym.relu(convolved(mx.sym.relu(convolved(data)))),
    "sums": _residual,
    "sums of several": lambda data: mx.sym.relu(mx.sym.add_n(*[convolved(data) for _ in range(3)])),
    "a pooling": lambda data: mx.sym.relu(pooled(mx.sym.relu(convolved(_swish(convolved(data)))))),
    "an LRN": lambda data: mx.sym.relu(convolved(mx.sym.LRN(convolved(data), nsize=5))),
    "a Reshape": lambda data: mx.sym.reshape(mx.sym.relu(convolved(data)), (0, 8, -1)) + 1,
    "a Concat": _joined,
    "ones like what a softmax reads": _like_a_softmax_read,
    "ones like what a tanh reads": _like_a_tanh_read,
}


@pytest.mark.parametrize(("behind", "ncopies"), [(mx.sym.tanh, 1), (_softmax, 0)])
def test_an_input_of_which_only_the_shape_is_read_is_copied(
    behind: Callable[[Symbol], Symbol], ncopies: int
) -> None:
    """By an executor, as what is read is; packed steps give the operator another array.

    Ones are made like what a convolution wrote, over which a tanh has written by then, in the
    layout that lay there, or a softmax, in the usual one.
    """
    first = convolved(pictures())
    body = convolved(behind(first))
    net = classified(body + mx.sym.ones_like(first, name="ones"))
    traced = trace(net, shapes={"data": SHAPE}, realisation="mirror")  # explicit ones read nothing
    kept = []
    for by_executor in (True, False):
        found = copies(traced.graph, traced.nodes, by_executor=by_executor).kept_nbytes
        kept += [each for each, n in zip(found, traced.nodes, strict=True) if n.name == "ones"]
    assert kept == [ncopies * N, 0]


@pytest.mark.parametrize("realisation", ["mirror", "explicit"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_unplanned_step_keeps_the_copies_of_the_base_order(name: str, realisation: str) -> None:
    options: dict[str, Any] = {"shapes": {"data": SHAPE}, "realisation": realisation}
    traced = trace(classified(NETWORKS[name](pictures())), **options)
    estimate = load(realisation).workspace(traced, "cpu")
    assert estimate is not None
    nbytes, _, layouts, _ = estimate
    assert layouts == rules(traced.graph, traced.nodes)
    kept = kept_nbytes(Schedule.unplanned(traced.graph), layouts)
    assert kept == sum(copies(traced.graph, traced.nodes).kept_nbytes)
    assert 0 < kept < nbytes
