"""Mixed precision: values in float16 take half of the bytes, and memplan counts them so.

MXNet's own total counts 4 bytes for every element, whatever its type; memplan counts what the
arrays will take. With ``multi_precision`` the optimizer has a copy of the weights in float32 beside
its momentum: both are counted where memplan is given the optimizer. On a GPU the products are in
float16, too (--ctx gpu); a CPU has none in MXNet, so here they are in float32 between casts.
"""

from __future__ import annotations

import argparse
import re

import mxnet as mx
import numpy as np

import memplan.mxnet

SEED = 1
CLASSES = 10
SETTINGS = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}  # of SGD


def network(dtype: str, products: str, layers: int, filters: int) -> mx.sym.Symbol:
    """Convolutions in ``products``, all between them in ``dtype``, the loss in float32."""
    body = mx.sym.Cast(mx.sym.Variable("data"), dtype=dtype)
    for number in range(layers):
        body = body if dtype == products else mx.sym.Cast(body, dtype=products)
        body = mx.sym.Convolution(
            body, num_filter=filters, kernel=(3, 3), pad=(1, 1), no_bias=True, name=f"conv{number}"
        )
        body = body if dtype == products else mx.sym.Cast(body, dtype=dtype)
        body = mx.sym.BatchNorm(body, fix_gamma=False, name=f"norm{number}")
        body = mx.sym.relu(body)
    body = mx.sym.Pooling(body, kernel=(1, 1), global_pool=True, pool_type="avg")
    body = mx.sym.Cast(mx.sym.Flatten(body), dtype="float32")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(body, num_hidden=CLASSES), name="softmax")


def batches(count: int, shape: tuple[int, ...]) -> list[mx.io.DataBatch]:
    """Generated pictures: noise around a colour for each class."""
    draw = np.random.default_rng(SEED)
    colours = draw.normal(size=(CLASSES, shape[1], 1, 1))
    result = []
    for _ in range(count):
        labels = draw.integers(0, CLASSES, shape[0])
        pictures = colours[labels] + draw.normal(size=shape)
        result.append(mx.io.DataBatch([mx.nd.array(pictures)], [mx.nd.array(labels)]))
    return result


def train(module: mx.mod.Module, data: list[mx.io.DataBatch]) -> list[float]:
    """The loss of every step."""
    module.bind([("data", data[0].data[0].shape)], [("softmax_label", data[0].label[0].shape)])
    mx.random.seed(SEED)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params=SETTINGS)
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
    parser.add_argument("--ctx", default="cpu", choices=["cpu", "gpu"])
    defaults = {"layers": 6, "filters": 16, "batch": 8, "size": 32, "updates": 15}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", default="70%", help="of the unplanned step, or bytes")
    parser.add_argument("--seconds", type=float, default=10, help="for each plan, at most")
    options = parser.parse_args()
    shape = (options.batch, 3, options.size, options.size)
    sizes = (options.layers, options.filters)

    print(f"{'all in':10}{'unplanned':>12}{'MXNet says':>12}{'planned':>12}{'overhead':>10}")
    plans = {}
    for dtype in ("float32", "float16"):  # planned for a V100, wherever this runs
        net = network(dtype, dtype, *sizes)
        # Without the dtype of the data, MXNet and memplan take all arguments for float32.
        inputs = {"type_dict": {"data": "float32"}, "data": shape}
        plan = plans[dtype] = memplan.plan(
            net, budget=options.budget, time_limit=options.seconds, **inputs
        )
        text = net.simple_bind(mx.cpu(), **inputs).debug_str()
        cells = [f"{plan.unplanned.allocated_nbytes / 2**20:.1f} MB"]
        cells += re.findall(r"Total (\d+ MB) allocated", text)
        cells += [f"{plan.allocated_nbytes / 2**20:.1f} MB"]
        print(f"{dtype:10}" + "".join(f"{cell:>12}" for cell in cells) + f"{plan.overhead:+10.1%}")

    net = network("float16", "float16" if options.ctx == "gpu" else "float32", *sizes)
    context = mx.Context(options.ctx)
    module = memplan.mxnet.Module(
        net,
        context=context,
        budget=options.budget,
        time_limit=options.seconds,
        optimizer=mx.optimizer.create("sgd", **SETTINGS),
    )
    data = batches(options.updates, shape)
    planned = train(module, data)
    unplanned = train(mx.mod.Module(net, context=context), data)
    print(f"\nTrained on the {options.ctx}:\n{module.plan}")
    print(f"\nloss: {planned[0]:.3f} to {planned[-1]:.3f} in {len(planned)} updates")

    ratio = plans["float16"].unplanned.peak_nbytes / plans["float32"].unplanned.peak_nbytes
    assert 0.45 < ratio < 0.6, f"float16 must take about half, not {ratio:.0%}"
    assert planned == unplanned, "a plan must leave every loss as it is, bit for bit"
    assert planned[-1] < planned[0], f"the loss does not fall: {planned}"
    assert module.plan.total_nbytes <= module.plan.budget_nbytes, "over budget"
    assert module.plan.optimizer_nbytes > 0


if __name__ == "__main__":
    main()
