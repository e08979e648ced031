"""A deep residual network, trained in half of its memory: planned, checked and timed on the CPU.

The network is that of Chen et al., Training Deep Nets with Sublinear Memory Cost (2016), made
small. Run it with ``make example`` or ``python examples/resnet.py --help``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mxnet as mx
import numpy as np

import memplan

CLASSES = 10
SEED = 1


def resnet(stages: list[int], filters: int) -> mx.sym.Symbol:
    """Stages of bottleneck units; each stage but the first halves the picture."""

    def unit(data: mx.sym.Symbol, filters: int, kernel: int, stride: int = 1) -> mx.sym.Symbol:
        out = mx.sym.Convolution(
            data,
            num_filter=filters,
            kernel=(kernel, kernel),
            stride=(stride, stride),
            pad=(kernel // 2, kernel // 2),
            no_bias=True,
        )
        return mx.sym.LeakyReLU(mx.sym.BatchNorm(out, fix_gamma=True), act_type="leaky")

    body = unit(mx.sym.Variable("data"), filters, kernel=7, stride=2)
    body = mx.sym.Pooling(body, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
    for stage, nunits in enumerate(stages):
        width = filters << stage
        for number in range(nunits):
            stride = 2 if stage and not number else 1
            branch = unit(body, width, kernel=1)
            branch = unit(branch, width, kernel=3, stride=stride)
            branch = unit(branch, 4 * width, kernel=1)
            trunk = body if number else unit(body, 4 * width, kernel=1, stride=stride)
            body = trunk + branch
    body = mx.sym.Pooling(body, kernel=(1, 1), global_pool=True, pool_type="avg")
    scores = mx.sym.FullyConnected(mx.sym.Flatten(body), num_hidden=CLASSES)
    return mx.sym.SoftmaxOutput(scores, name="softmax")


def batches(shape: tuple[int, ...], count: int) -> list[mx.io.DataBatch]:
    """Generated pictures: noise around a colour for each class."""
    draw = np.random.default_rng(SEED)
    colours = draw.normal(size=(CLASSES, shape[1], 1, 1))
    result = []
    for _ in range(count):
        labels = draw.integers(0, CLASSES, shape[0])
        pictures = colours[labels] + draw.normal(size=shape)
        result.append(mx.io.DataBatch([mx.nd.array(pictures)], [mx.nd.array(labels)]))
    return result


def ready_to_train(net: mx.sym.Symbol, shape: tuple[int, ...]) -> mx.mod.Module:
    """A Module like any other: it knows nothing of plans."""
    module = mx.mod.Module(net)
    module.bind([("data", shape)], [("softmax_label", shape[:1])])
    mx.random.seed(SEED)
    module.init_params(mx.init.Xavier(magnitude=2))
    module.init_optimizer(optimizer_params={"learning_rate": 0.002, "momentum": 0.9})
    return module


def train(module: mx.mod.Module, data: list[mx.io.DataBatch]) -> list[float]:
    """The loss of every step."""
    losses = []
    for batch in data:
        module.forward_backward(batch)
        module.update()
        loss = mx.metric.CrossEntropy()
        module.update_metric(loss, batch.label)
        losses.append(loss.get()[1])
    return losses


def step_seconds(
    modules: list[mx.mod.Module], batch: mx.io.DataBatch, repeats: int
) -> list[list[float]]:
    """Seconds of some steps of each module. They take turns, as other load comes and goes."""
    seconds: list[list[float]] = [[] for _ in modules]
    for _ in range(repeats):
        for module, times in zip(modules, seconds, strict=True):
            mx.nd.waitall()
            start = time.perf_counter()
            module.forward_backward(batch)
            mx.nd.waitall()
            times.append(time.perf_counter() - start)
    return seconds


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 6, 9, 3], help="units in each")
    parser.add_argument("--filters", type=int, default=32, help="of the first stage")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=112, help="of a picture")
    parser.add_argument("--budget", default="50%", help="of the unplanned step, or bytes")
    parser.add_argument("--seconds", type=float, default=10, help="for planning, at most")
    parser.add_argument("--steps", type=int, default=5, help="of training")
    parser.add_argument("--repeats", type=int, default=15, help="of each timing")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    shape = (options.batch, 3, options.size, options.size)

    net = resnet(options.stages, options.filters)
    print("Measuring what each op costs on this CPU ...", flush=True)
    costs = memplan.profile(net, ctx=mx.cpu(), data=shape)
    print("Planning ...", flush=True)
    plan = memplan.plan(
        net,
        budget=options.budget,
        ctx=mx.cpu(),
        costs=costs,
        time_limit=options.seconds,
        data=shape,
    )
    print(plan, flush=True)

    print("\nTraining without and with the plan ...", flush=True)
    modules = [ready_to_train(symbol, shape) for symbol in (net, plan.symbol)]
    data = batches(shape, options.steps)
    unplanned_losses, planned_losses = (train(module, data) for module in modules)
    seconds = step_seconds(modules, data[0], options.repeats)
    pairs = zip(*seconds, strict=True)
    overhead = statistics.median(planned / unplanned for unplanned, planned in pairs) - 1

    def mib(*counts: int) -> list[str]:
        return [f"{nbytes / 2**20:.2f} MiB" for nbytes in counts]

    before = plan.unplanned
    table = [
        ("", "unplanned", "planned"),
        ("activations, as MXNet has them", *mib(before.allocated_nbytes, plan.allocated_nbytes)),
        ("whole step", *mib(before.total_nbytes, plan.total_nbytes)),
        ("seconds per step", *(f"{statistics.median(found):.3f}" for found in seconds)),
        ("overhead, predicted", "", f"{plan.overhead:+.1%}"),
        ("overhead, measured", "", f"{overhead:+.1%}"),
        *(
            (f"loss of step {step}", *(f"{loss:.6f}" for loss in losses))
            for step, losses in enumerate(zip(unplanned_losses, planned_losses, strict=True), 1)
        ),
    ]
    print()
    for label, *cells in table:
        print(f"{label:34}" + "".join(f"{cell:>14}" for cell in cells))

    assert planned_losses == unplanned_losses, "the same losses, bit for bit"
    assert plan.total_nbytes <= plan.budget_nbytes < before.total_nbytes
    assert plan.schedule.recomputed


if __name__ == "__main__":
    main()
