"""A U-Net that marks shapes in pictures of high resolution, trained in 40% of its memory.

The shortcuts of a U-Net, as large as the picture, wait for the way up; few of its values are cheap
to hold and many are cheap to compute again. ``memplan.mxnet.Module`` is used like ``mx.mod.Module``
and runs the planned step in one array. The pictures are generated: bright discs in noise.
``python examples/unet.py --help``
"""

from __future__ import annotations

import argparse

import mxnet as mx
import numpy as np

import memplan.mxnet

SEED = 1


def unet(levels: int, filters: int) -> mx.sym.Symbol:
    """For every pixel the probability that it is part of a disc. Ronneberger et al. 2015."""

    def block(data: mx.sym.Symbol, width: int) -> mx.sym.Symbol:
        for _ in range(2):
            data = mx.sym.Convolution(
                data, num_filter=width, kernel=(3, 3), pad=(1, 1), no_bias=True
            )
            data = mx.sym.relu(mx.sym.BatchNorm(data, fix_gamma=False))
        return data

    body = mx.sym.Variable("data")
    shortcuts = []
    for level in range(levels):
        shortcuts.append(block(body, filters << level))
        body = mx.sym.Pooling(shortcuts[-1], kernel=(2, 2), stride=(2, 2), pool_type="max")
    body = block(body, filters << levels)
    for level in reversed(range(levels)):
        width = filters << level
        body = mx.sym.Deconvolution(body, num_filter=width, kernel=(2, 2), stride=(2, 2))
        body = block(mx.sym.concat(shortcuts[level], body, dim=1), width)
    scores = mx.sym.Convolution(body, num_filter=1, kernel=(1, 1))
    return mx.sym.LogisticRegressionOutput(scores, mx.sym.Variable("mask_label"), name="mask")


def pictures(count: int, batch: int, size: int) -> list[mx.io.DataBatch]:
    """Noise in three colours with some discs of any colour, and the masks of the discs."""
    draw = np.random.default_rng(SEED)
    rows, columns = np.mgrid[:size, :size]
    result = []
    for _ in range(count):
        masks = np.zeros((batch, 1, size, size))
        for mask in masks[:, 0]:
            for row, column, radius in draw.uniform(size=(6, 3)) * (size, size, size / 6):
                mask[(rows - row) ** 2 + (columns - column) ** 2 < radius**2] = 1
        noise = draw.normal(size=(batch, 3, size, size))
        colours = draw.normal(1, 0.5, size=(batch, 3, 1, 1))
        result.append(mx.io.DataBatch([mx.nd.array(noise + masks * colours)], [mx.nd.array(masks)]))
    return result


def train(module: mx.mod.Module, data: list[mx.io.DataBatch]) -> list[float]:
    """The cross entropy per pixel of every step."""
    module.bind([("data", data[0].data[0].shape)], [("mask_label", data[0].label[0].shape)])
    mx.random.seed(SEED)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.01})
    losses = []
    for batch in data:
        module.forward_backward(batch)
        output, mask = module.get_outputs()[0], batch.label[0]
        right = mask * output + (1 - mask) * (1 - output)
        losses.append(-mx.nd.log(right + 1e-7).mean().asscalar())
        module.update()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, default=3, help="down and up again")
    parser.add_argument("--filters", type=int, default=8, help="of the highest level")
    parser.add_argument("--size", type=int, default=256, help="of a picture, a power of 2")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--budget", default="40%", help="of the unplanned step, or bytes")
    parser.add_argument("--seconds", type=float, default=20, help="for planning, at most")
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()

    net = unet(options.levels, options.filters)
    data = pictures(options.updates, options.batch, options.size)
    names = {"label_names": ["mask_label"]}
    module = memplan.mxnet.Module(
        net,
        **names,
        budget=options.budget,
        realisation="packed",  # activations in one array: nothing is lost between blocks
        time_limit=options.seconds,
    )
    planned = train(module, data)
    plan = module.plan
    print(plan)

    unplanned = train(mx.mod.Module(net, **names), data)
    print(f"\nloss: {planned[0]:.3f} to {planned[-1]:.3f} in {len(planned)} updates")
    # Bit for bit without oneDNN (MXNET_MKLDNN_ENABLED=0); its memory layouts change the last bits.
    assert np.allclose(planned, unplanned, rtol=1e-5), f"{planned} is not {unplanned}"
    assert planned[-1] < 0.9 * planned[0], f"the loss does not fall: {planned}"
    assert plan.total_nbytes <= plan.budget_nbytes < plan.unplanned.total_nbytes, "over budget"
    assert plan.schedule.recomputed, "the budget asks for recomputation"


if __name__ == "__main__":
    main()
