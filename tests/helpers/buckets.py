"""Bucketing as in MXNet's language model: an LSTM unrolled to the length of each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np

VOCABULARY, EMBED, HIDDEN, BATCH = 12, 16, 16, 8


def network(length: int) -> tuple[mx.sym.Symbol, tuple[str], tuple[str]]:
    """Two layers over ``length`` words; the loss of the next word."""
    stack = mx.rnn.SequentialRNNCell()
    for layer in range(2):
        stack.add(mx.rnn.LSTMCell(num_hidden=HIDDEN, prefix=f"lstm_l{layer}_"))
    stack.add(mx.rnn.DropoutCell(0.2, prefix="dropout_"))
    data, label = mx.sym.Variable("data"), mx.sym.Variable("softmax_label")
    embedded = mx.sym.Embedding(data, input_dim=VOCABULARY, output_dim=EMBED, name="embed")
    outputs, _ = stack.unroll(length, inputs=embedded, merge_outputs=True)
    scores = mx.sym.Reshape(outputs, shape=(-1, HIDDEN))
    scores = mx.sym.FullyConnected(scores, num_hidden=VOCABULARY, name="scores")
    label = mx.sym.Reshape(label, shape=(-1,))
    return mx.sym.SoftmaxOutput(scores, label, name="softmax"), ("data",), ("softmax_label",)


class Sentences(mx.io.DataIter):
    """Batches of random words, of these lengths; the longest is the default bucket."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(BATCH)
        self.default_bucket_key = max(lengths)
        random = np.random.default_rng(4)
        words = [random.integers(0, VOCABULARY, (BATCH, length + 1)) for length in lengths]
        self.batches = [_batch(array.astype("float32")) for array in words]
        longest = next(b for b in self.batches if b.bucket_key == self.default_bucket_key)
        self.provide_data, self.provide_label = longest.provide_data, longest.provide_label
        self.reset()

    def reset(self) -> None:
        self.position = 0

    def next(self) -> mx.io.DataBatch:
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]


def _batch(words: np.ndarray) -> mx.io.DataBatch:
    data, label = mx.nd.array(words[:, :-1]), mx.nd.array(words[:, 1:])
    return mx.io.DataBatch(
        [data],
        [label],
        pad=0,
        bucket_key=data.shape[1],
        provide_data=[mx.io.DataDesc("data", data.shape)],
        provide_label=[mx.io.DataDesc("softmax_label", label.shape)],
    )


def steps(module: Any, lengths: Sequence[int], **options: Any) -> Iterator[mx.io.DataBatch]:
    """Bound, initialised and trained batch by batch."""
    data = Sentences(lengths)
    module.bind(data.provide_data, data.provide_label, **options)
    mx.random.seed(3)
    np.random.seed(3)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="adam", optimizer_params={"learning_rate": 0.02})
    for batch in data:
        module.forward_backward(batch)
        module.update()
        yield batch
