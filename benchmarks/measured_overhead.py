"""Is the overhead that a plan promises the overhead that MXNet takes?

    python benchmarks/measured_overhead.py
    python benchmarks/measured_overhead.py --network mobilenet1_0 --batch 16

Profiles the network on this machine's CPU, plans it at several budgets, and times unplanned and
planned steps in turn. What else runs on the machine disturbs it.
"""

from __future__ import annotations

import argparse
import statistics

import mxnet as mx

import memplan
from memplan.mxnet.trace.build import trace
from memplan.mxnet.train.random_run import bind
from networks import network
from profiled_step import step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet50_v1", help="a model of Gluon's vision zoo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="height and width of a picture")
    parser.add_argument("--steps", type=int, default=15, help="steps of each kind, in turn")
    parser.add_argument("--time-limit", type=float, default=10, help="seconds for each plan")
    options = parser.parse_args()

    ctx = mx.cpu()
    shape = (options.batch, 3, options.size, options.size)
    net = network(options.network)
    costs = memplan.profile(net, ctx=ctx, data=shape)
    traced = trace(net, shapes={"data": shape})
    unplanned = bind(traced, traced.symbol, ctx)
    print(f"{options.network}, data {shape}, on {costs.device}")
    print("| strategy | budget | allocated MB | predicted | measured | difference, points |")
    print("|---|---|---|---|---|---|")
    for strategy, budget in (("memonger", None), ("checkmate", 0.7), ("checkmate", 0.5)):
        plan = memplan.plan(
            net,
            strategy=strategy,
            budget=budget,
            costs=costs,
            time_limit=options.time_limit,
            data=shape,
        )
        planned = bind(traced, plan.symbol, ctx)
        measured = measured_overhead(unplanned, planned, options.steps)
        print(
            f"| {strategy} | {'least' if budget is None else f'{budget:.0%}'} "
            f"| {plan.allocated_nbytes >> 20} of {plan.unplanned.allocated_nbytes >> 20} "
            f"| {plan.overhead:.1%} | {measured:.1%} | {100 * (measured - plan.overhead):+.1f} |",
            flush=True,
        )


def measured_overhead(
    unplanned: mx.executor.Executor, planned: mx.executor.Executor, steps: int
) -> float:
    """Median step of ``planned`` over that of ``unplanned``, less 1; steps run in turn."""
    for executor in (unplanned, planned):
        step_seconds(executor)  # MXNet chooses kernels in the first step
    pairs = [(step_seconds(unplanned), step_seconds(planned)) for _ in range(steps)]
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    return float(after / before - 1.0)


if __name__ == "__main__":
    main()
