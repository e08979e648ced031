"""Planning for a GPU as far as that goes without one, by MXNet's wheels for CPU and for CUDA."""

from __future__ import annotations

import mxnet as mx
import pytest

import memplan
from helpers.networks import residual_net
from memplan.errors import CostError

GPU = mx.gpu(0)
SHAPES = {"data": (4, 3, 16, 16)}


@pytest.mark.parametrize("realisation", ["mirror", "explicit", "packed"])
def test_a_gpu_that_is_not_here_is_planned_for(realisation: str) -> None:
    net, _ = residual_net(units=2)
    options = {"strategy": "chen_greedy:linear", "costs": "roofline:v100", "ctx": GPU}
    plan = memplan.plan(net, realisation=realisation, **options, **SHAPES)
    assert plan.schedule.recomputed
    assert plan.allocated_nbytes < plan.unplanned.allocated_nbytes


@pytest.mark.skipif(bool(mx.context.num_gpus()), reason="there is a GPU, on which ops are measured")
def test_costs_of_a_gpu_that_is_not_here_must_be_given() -> None:
    net, _ = residual_net(units=2)
    with pytest.raises(CostError, match="roofline:v100"):
        memplan.plan(net, ctx=GPU, **SHAPES)
