"""An LSTM unrolled over many steps reads English text, in a fraction of its memory.

Backpropagation through time keeps the gates of every step. The plan keeps some of them and computes
the others again; it is written on the Symbol as attributes, which MXNet's own Module obeys. The
text is Python's manual, as its standard library has it. ``python examples/lstm.py --help``
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import mxnet as mx
import numpy as np

import memplan

SEED = 1
SYMBOLS = 96  # the printable characters of ASCII and one for all others


def unrolled_lstm(steps: int, layers: int, hidden: int, batch: int) -> mx.sym.Symbol:
    """Predicts the next character after each of ``steps``; every step shares the weights."""
    stack = mx.rnn.SequentialRNNCell()
    for layer in range(layers):
        stack.add(mx.rnn.LSTMCell(hidden, prefix=f"layer{layer}_"))
    letters = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=SYMBOLS, output_dim=hidden, name="letters"
    )
    # MXNet's own begin state leaves the batch unknown: mirroring cannot always infer it.
    begin = stack.begin_state(func=lambda name, shape, **_: mx.sym.zeros((batch, shape[1])))
    outputs, _ = stack.unroll(steps, letters, begin, layout="NTC", merge_outputs=True)
    outputs = mx.sym.reshape(outputs, shape=(-3, 0))
    scores = mx.sym.FullyConnected(outputs, num_hidden=SYMBOLS, name="scores")
    labels = mx.sym.reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
    return mx.sym.SoftmaxOutput(scores, labels, normalization="valid", name="softmax")


def passages(count: int, batch: int, steps: int) -> list[mx.io.DataBatch]:
    """Passages of the manual from places drawn at random, and what follows each character."""
    text = "".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(text.encode("ascii", "replace"), dtype="uint8").astype(int) - 32
    codes = np.where((codes >= 0) & (codes < SYMBOLS - 1), codes, SYMBOLS - 1)
    draw = np.random.default_rng(SEED)
    result = []
    for _ in range(count):
        starts = draw.integers(0, len(codes) - steps - 1, batch)
        places = starts[:, None] + np.arange(steps + 1)
        picked = mx.nd.array(codes[places])
        result.append(mx.io.DataBatch([picked[:, :-1]], [picked[:, 1:]]))
    return result


def train(module: mx.mod.Module, data: list[mx.io.DataBatch], rate: float) -> list[float]:
    """The loss of every step, in nats per character."""
    shape = data[0].data[0].shape
    module.bind([("data", shape)], [("softmax_label", shape)])
    mx.random.seed(SEED)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": rate})
    losses = []
    for batch in data:
        module.forward_backward(batch)
        scores, labels = module.get_outputs()[0], batch.label[0].reshape(-1)
        losses.append(-mx.nd.log(mx.nd.pick(scores, labels)).mean().asscalar())
        module.update()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="that the LSTM is unrolled over")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--budget", default="75%", help="of the unplanned step, or bytes")
    parser.add_argument("--seconds", type=float, default=20, help="for planning, at most")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.01, help="of learning")
    options = parser.parse_args()

    net = unrolled_lstm(options.steps, options.layers, options.hidden, options.batch)
    shape = (options.batch, options.steps)
    plan = memplan.plan(
        net,
        budget=options.budget,
        ctx=mx.cpu(),
        time_limit=options.seconds,
        data=shape,
        softmax_label=shape,
    )
    print(plan)

    data = passages(options.updates, options.batch, options.steps)
    unplanned, planned = (
        train(mx.mod.Module(symbol), data, options.rate) for symbol in (net, plan.symbol)
    )
    print(f"\nloss: {planned[0]:.3f} to {planned[-1]:.3f} in {len(planned)} updates")
    assert planned == unplanned, "a plan must leave every loss as it is, bit for bit"
    assert planned[-1] < 0.9 * planned[0], f"the loss does not fall: {planned}"
    assert plan.total_nbytes <= plan.budget_nbytes < plan.unplanned.total_nbytes, "over budget"
    assert plan.schedule.recomputed, "the budget asks for recomputation"


if __name__ == "__main__":
    main()
