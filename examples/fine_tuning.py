"""Fine-tuning: layers that are frozen need no gradients, so another plan fits the same budget.

A network learns in which direction stripes run. Then the first half of it is frozen, and the rest
learns how wide they are. The backward pass ends where the frozen layers begin: their values need
not be kept, and within the budget of the first task less is computed again, or nothing. memplan
sees that by ``fixed_param_names`` (in Gluon by ``grad_req``). ``python examples/fine_tuning.py -h``
"""

from __future__ import annotations

import argparse

import mxnet as mx
import numpy as np

import memplan.mxnet

SEED = 1
CLASSES = 4
Batches = list[mx.io.DataBatch]


def network(units: int, filters: int) -> mx.sym.Symbol:
    """Residual units, one named after the other."""

    def conv(data: mx.sym.Symbol, name: str, stride: int = 1) -> mx.sym.Symbol:
        geometry = {"kernel": (3, 3), "pad": (1, 1), "stride": (stride, stride)}
        out = mx.sym.Convolution(data, num_filter=filters, no_bias=True, name=name, **geometry)
        return mx.sym.BatchNorm(out, fix_gamma=False, name=f"{name}_norm")

    body = mx.sym.relu(conv(mx.sym.Variable("data"), "unit0", stride=2))
    for number in range(1, units):
        branch = mx.sym.relu(conv(body, f"unit{number}_first"))
        body = mx.sym.relu(body + conv(branch, f"unit{number}_second"))
    body = mx.sym.Pooling(body, kernel=(1, 1), global_pool=True, pool_type="avg")
    scores = mx.sym.FullyConnected(mx.sym.Flatten(body), num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(scores, name="softmax")


def stripes(task: str, count: int, batch: int, size: int) -> Batches:
    """Pictures of stripes in four directions and four widths, labelled by the one or the other."""
    draw = np.random.default_rng(SEED)
    rows, columns = np.mgrid[:size, :size]
    result = []
    for _ in range(count):
        labels = {"direction": draw.integers(0, 4, batch), "width": draw.integers(0, 4, batch)}
        angle = (labels["direction"] * np.pi / 4)[:, None, None]
        waves = (2.0 ** -labels["width"])[:, None, None] * np.pi / 2
        phase = draw.uniform(0, 2 * np.pi, (batch, 1, 1))
        picture = np.sin(waves * (rows * np.cos(angle) + columns * np.sin(angle)) + phase)
        picture = (picture + draw.normal(0, 0.3, picture.shape))[:, None]
        result.append(mx.io.DataBatch([mx.nd.array(picture)], [mx.nd.array(labels[task])]))
    return result


def train(module: mx.mod.Module, data: Batches, params: dict | None = None) -> list[float]:
    """The loss of every step; ``params`` are those to begin with."""
    module.bind([("data", data[0].data[0].shape)], [("softmax_label", data[0].label[0].shape)])
    mx.random.seed(SEED)
    module.init_params(mx.init.Xavier(), arg_params=params, allow_missing=True)
    module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.01})
    losses = []
    for batch in data:
        module.forward_backward(batch)
        module.update()
        loss = mx.metric.CrossEntropy()
        module.update_metric(loss, batch.label)
        losses.append(loss.get()[1])
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"units": 8, "filters": 16, "batch": 16, "size": 64, "updates": 12}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", default="30%", help="of the unplanned first step, or bytes")
    parser.add_argument("--seconds", type=float, default=10, help="for each plan, at most")
    options = parser.parse_args()

    net = network(options.units, options.filters)
    sizes = (options.updates, options.batch, options.size)
    whole = memplan.mxnet.Module(net, budget=options.budget, time_limit=options.seconds)
    first = train(whole, stripes("direction", *sizes))
    learned = {n: a for n, a in whole.get_params()[0].items() if not n.startswith("scores")}

    half = tuple(f"unit{number}_" for number in range(options.units // 2))
    frozen = [name for name in net.list_arguments() if name.startswith(half)]
    budget = whole.plan.budget_nbytes
    tuned = memplan.mxnet.Module(
        net, fixed_param_names=frozen, budget=budget, time_limit=options.seconds
    )
    data = stripes("width", *sizes)
    second = train(tuned, data, learned)
    unplanned = train(mx.mod.Module(net, fixed_param_names=frozen), data, learned)
    print(f"All layers:\n{whole.plan}\n\n{len(frozen)} parameters frozen:\n{tuned.plan}\n")
    print(f"loss: {first[0]:.3f} to {first[-1]:.3f}, then {second[0]:.3f} to {second[-1]:.3f}")

    end = tuned.get_params()[0]
    assert all(np.array_equal(end[n].asnumpy(), learned[n].asnumpy()) for n in frozen), "not frozen"
    assert second == unplanned, "a plan must leave every loss as it is, bit for bit"
    assert first[-1] < first[0], f"the loss does not fall: {first}"
    assert second[-1] < second[0], f"the loss does not fall: {second}"
    assert tuned.plan.unplanned.total_nbytes < whole.plan.unplanned.total_nbytes
    assert tuned.plan.overhead < whole.plan.overhead, "frozen layers need less recomputation"
    assert max(whole.plan.total_nbytes, tuned.plan.total_nbytes) <= budget, "over budget"


if __name__ == "__main__":
    main()
