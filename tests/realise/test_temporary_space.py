"""Which ops oneDNN computes beside their place depends on what a schedule recomputes."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import pytest

from helpers.small_convolutions import convolved, normed
from memplan.mxnet.realise.estimate import onednn_kernels, workspace_estimate
from memplan.planning import job_json
from memplan.planning.job import Job
from memplan.step.mirroring import mirror
from memplan.step.schedule import Schedule

Symbol = mx.sym.Symbol

ROWS, WIDTH, FEW = 16, 256, 8
SHAPE = (ROWS, 32)
N = ROWS * WIDTH * 4  # the bytes that a dense layer writes


def _dense(data: Symbol, name: str, width: int = WIDTH) -> Symbol:
    return mx.sym.FullyConnected(data, num_hidden=width, name=name)


def _two_layers() -> Symbol:
    """Of which each reads what a tanh wrote, but for the first."""
    body = mx.sym.tanh(_dense(mx.sym.Variable("data"), "first"), name="act")
    return mx.sym.LinearRegressionOutput(_dense(mx.sym.tanh(_dense(body, "second")), "third", FEW))


def _many_classes() -> Symbol:
    scores = _dense(_dense(mx.sym.Variable("data"), "first", FEW), "second")
    picked = mx.sym.pick(mx.sym.log_softmax(scores), mx.sym.Variable("label", shape=(ROWS,)))
    return mx.sym.MakeLoss(mx.sym.mean(picked))


def _job(net: Symbol, realisation: str, shape: tuple[int, ...] = SHAPE) -> Job:
    return Job.prepare(net, realisation=realisation, ctx=mx.cpu(), data=shape)


def _places(job: Job, *names: str) -> list[int]:
    ops = [op.name for op in job.graph.ops[: job.graph.nforward]]
    return [ops.index(name) for name in names]


def _further(job: Job, schedule: Schedule) -> int:
    """What ``schedule`` takes beside its blocks more than the unplanned step does."""
    unplanned = job.realised(Schedule.unplanned(job.graph)).footprint
    planned = job.realised(schedule).footprint
    assert job.holds(schedule) == planned.total_nbytes
    assert job.memory.at_least(schedule) <= job.memory.nbytes(schedule)
    assert not job.memory.excess(schedule, job.memory.nbytes(schedule))
    return planned.workspace_nbytes - unplanned.workspace_nbytes


# The second layer's backward op reads what the tanh wrote, and the tanh's own reads the copy: so
# that array dies where the layer's gradient is written over it. A mirrored step has as large a
# hole.
def test_a_gradient_is_computed_beside_what_dies_under_it() -> None:
    job = _job(_two_layers(), "mirror")
    schedule = mirror(job.graph, {*_places(job, "first", "act")})
    assert _further(job, schedule) == 2 * N
    assert job_json.from_json(job_json.to_json(job)).beside == job.beside


@pytest.mark.parametrize(("nflags", "further"), [(1, 0), (2, N)])
def test_explicit_steps_pay_where_a_copy_is_behind_the_gradient(nflags: int, further: int) -> None:
    """In front of it both backward ops read the copy, of which the tanh's is the last."""
    job = _job(_two_layers(), "explicit")
    first, act = _places(job, "first", "act")
    [written] = job.graph.ops[act].outputs
    backward = [op for op in job.graph.readers[written] if op >= job.graph.nforward]
    assert [job.trace.nodes[op].op for op in backward] == [
        "_backward_FullyConnected",
        "_backward_tanh",
    ]
    order = list(range(len(job.graph.ops)))
    order[backward[nflags - 1] : backward[nflags - 1]] = [first, act]
    assert _further(job, Schedule.sequence(job.graph, order)) == further


def test_a_layer_that_runs_again_for_the_order_alone_writes_in_temporary_space() -> None:
    """There its gradient has what is written over the first layer's array, as large as that.

    What the softmax's gradient takes is memory of its own, of which the hole is counted.
    """
    job = _job(_many_classes(), "mirror")
    assert _further(job, mirror(job.graph, {*_places(job, "first")})) == 0
    schedule = mirror(job.graph, {*_places(job, "first", "second")})
    assert _further(job, schedule) == N - ROWS * FEW * 4
    assert not any(_job(_many_classes(), "explicit").beside.temporary.unread)


def test_what_mxnet_computes_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(_job(_two_layers(), "mirror").beside.temporary.overwriting)
    options: dict[str, Any] = {"ctx": mx.cpu(), "type_dict": {"data": "float64"}, "data": SHAPE}
    job = Job.prepare(_two_layers(), realisation="mirror", **options)
    assert not any(map(any, job.beside.temporary))
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    assert not any(map(any, _job(_two_layers(), "mirror").beside.temporary))


def test_a_convolution_needs_space_for_copies_and_for_what_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The BatchNorm's backward op reads what the wide convolution wrote first, none its copy.

    The unplanned step has space for a picture of the narrow ones. Of 50 MB such a process was seen
    to take 38 more, with pictures of 12.6.
    """
    monkeypatch.setattr(onednn_kernels, "has_avx512", lambda: True)
    monkeypatch.setattr(workspace_estimate, "MOST_KEPT", 0)  # nor do holes count
    body = convolved(normed(convolved(convolved(mx.sym.Variable("data")), 4 * 16)))
    job = _job(mx.sym.MakeLoss(mx.sym.mean(normed(body))), "mirror", (2, 3, 32, 32))
    narrow, wide, _ = (op for op, node in enumerate(job.trace.nodes) if node.op == "Convolution")
    picture, weight = 2 * 16 * 32 * 32 * 4, 4 * 16 * 16 * 9 * 4
    assert _further(job, mirror(job.graph, {narrow})) == 0
    assert _further(job, mirror(job.graph, {wide})) == 4 * picture + weight - picture
