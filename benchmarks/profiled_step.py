"""Does the sum of the profiled seconds predict the step that MXNet really runs?

    python benchmarks/profiled_step.py
    python benchmarks/profiled_step.py --network mobilenet1_0 --batch 16 --size 128

Every round times unplanned training steps before and after it profiles the network. What else
runs on the machine slows one or the other: mind the range of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from operator import itemgetter

import mxnet as mx

from memplan.memory.blocks import allocate
from memplan.mxnet.profile import frugal_schedule, profile
from memplan.mxnet.trace.build import Trace, trace
from memplan.mxnet.train.random_run import bind
from memplan.step.costs import CostTable, with_costs
from memplan.step.schedule import Schedule
from memplan.strategies.spaces.flags import Flags
from memplan.util.nbytes import format_nbytes
from networks import network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="resnet50_v1", help="a model of Gluon's vision zoo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224, help="height and width of a picture")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="training steps timed per round")
    parser.add_argument("--repeats", type=int, default=3, help="of the profile, per round")
    parser.add_argument("--gpu", type=int, help="the GPU to run on, instead of the CPU")
    options = parser.parse_args()

    ctx = mx.cpu() if options.gpu is None else mx.gpu(options.gpu)
    shape = (options.batch, 3, options.size, options.size)
    net = network(options.network)
    traced = trace(net, shapes={"data": shape})
    executor = bind(traced, traced.symbol, ctx)
    step_seconds(executor)  # MXNet chooses kernels in the first step

    print(f"{options.network}, data {shape}, {len(traced.graph.ops)} ops")
    print("round  step (ms)       from-to  sum of ops (ms)  sum / step  profiling took (s)")
    ratios = []
    for number in range(options.rounds):
        # Half of the steps before and half after the profile.
        times = [step_seconds(executor) for _ in range(-(-options.steps // 2))]
        start = time.perf_counter()
        table = profile(net, ctx=ctx, repeats=options.repeats, warmup=1, data=shape)
        took = time.perf_counter() - start
        times += [step_seconds(executor) for _ in range(options.steps // 2)]
        step = statistics.median(times)
        total = with_costs(traced.graph, table).seconds
        ratios.append(total / step)
        print(
            f"{number + 1:5d}  {1e3 * step:9.1f}  {1e3 * min(times):5.0f}-{1e3 * max(times):6.0f}"
            f"  {1e3 * total:15.1f}  {ratios[-1]:10.3f}  {took:18.1f}"
        )
    print(f"median of sum / step: {statistics.median(ratios):.3f} on {table.device}")
    report_memory(traced)
    report_kinds(traced, table)


def step_seconds(executor: mx.executor.Executor) -> float:
    """Seconds of one training step, alone on the machine."""
    mx.nd.waitall()
    start = time.perf_counter()
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
    return time.perf_counter() - start


def report_memory(traced: Trace) -> None:
    unplanned = allocate(Schedule.unplanned(traced.graph)).nbytes
    frugal = allocate(frugal_schedule(traced.graph, Flags())).nbytes
    print(
        f"activations: {format_nbytes(unplanned)} unplanned, {format_nbytes(frugal)} for profiling"
    )


def report_kinds(traced: Trace, table: CostTable, count: int = 8) -> None:
    graph = with_costs(traced.graph, table)
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in graph.ops:
        seconds[op.kind] += op.seconds
    print("of the last round:")
    for kind, total in sorted(seconds.items(), key=itemgetter(1), reverse=True)[:count]:
        print(f"  {1e3 * total:8.1f} ms  {total / graph.seconds:6.1%}  {kind}")


if __name__ == "__main__":
    main()
