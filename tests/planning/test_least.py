"""The least memory that memplan says it reaches, where further runs of ops take some, too."""

from __future__ import annotations

import mxnet as mx

from helpers.planning import NEVER_SECONDS
from memplan.planning.job import Job


def test_the_least_counts_the_copies_of_further_runs() -> None:
    out = mx.sym.Variable("data")
    for _ in range(4):
        out = mx.sym.Convolution(out, num_filter=8, kernel=(3, 3), pad=(1, 1), no_bias=True)
        out = mx.sym.relu(mx.sym.BatchNorm(out, fix_gamma=False))
    out = mx.sym.FullyConnected(mx.sym.mean(out, axis=(2, 3)), num_hidden=10)
    job = Job.prepare(
        mx.sym.SoftmaxOutput(out),
        realisation="explicit",
        ctx=mx.cpu(),
        time_limit=NEVER_SECONDS,
        data=(4, 8, 32, 32),
    )
    # Every relu that runs again keeps copies: the fewest blocks are no less than 0.93 with them.
    _, footprint = job.least
    assert footprint.total_nbytes < 0.88 * job.unplanned.total_nbytes
