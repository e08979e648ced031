"""The least memory that memplan says it reaches, where further runs of ops take some, too."""

from __future__ import annotations

import dataclasses
import math

import mxnet as mx

from helpers.planning import NEVER_SECONDS
from memplan.planning.job import Job
from memplan.strategies.search import Search


def _relu(data: mx.sym.Symbol, nfilter: int) -> mx.sym.Symbol:
    out = mx.sym.Convolution(data, num_filter=nfilter, kernel=(3, 3), pad=(1, 1), no_bias=True)
    return mx.sym.relu(mx.sym.BatchNorm(out, fix_gamma=False))


def test_the_least_counts_the_copies_of_further_runs() -> None:
    out = mx.sym.Variable("data")
    for _ in range(4):
        out = _relu(out, 8)
    out = mx.sym.FullyConnected(mx.sym.mean(out, axis=(2, 3)), num_hidden=10)
    job = Job.prepare(
        mx.sym.SoftmaxOutput(out),
        realisation="explicit",
        ctx=mx.cpu(),
        time_limit=NEVER_SECONDS,
        data=(4, 8, 32, 32),
    )
    # Every relu that runs again keeps copies: the fewest blocks are no less than 0.95 with them.
    _, footprint = job.least
    assert footprint.total_nbytes < 0.9 * job.unplanned.total_nbytes


def test_searches_go_on_from_the_least_until_they_find_no_less() -> None:
    """A U-Net, of which the first search is seen to leave 5% for the next."""
    out, before = mx.sym.Variable("data"), []
    for width in (8, 16, 32):
        before.append(out := _relu(out, width))
        out = mx.sym.Pooling(out, kernel=(2, 2), stride=(2, 2), pool_type="max")
    for beside, width in zip(reversed(before), (32, 16, 8), strict=True):
        out = mx.sym.UpSampling(out, scale=2, sample_type="nearest")
        out = _relu(mx.sym.concat(out, beside, dim=1), width)
    job = Job.prepare(
        mx.sym.MakeLoss(mx.sym.mean(out)),
        realisation="explicit",
        time_limit=NEVER_SECONDS,
        data=(2, 3, 32, 32),
    )
    schedule, _ = job.least
    problem = dataclasses.replace(job.problem(None), max_overhead=math.inf)
    again = Search(rounds=1, seed=1, start=schedule).solve(problem).schedule
    assert again is not None
    assert job.memory.nbytes(again) >= job.memory.nbytes(schedule)
