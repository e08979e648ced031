"""Networks of GluonNLP, in loops like those of its scripts: bit for bit as unplanned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx
import pytest

from helpers.scripts import BATCHES, Script, differing

pytest.importorskip("gluonnlp", reason="GluonNLP is installed by make test-all only")

from gluonnlp import model
from gluonnlp.loss import LabelSmoothing, MaskedSoftmaxCELoss
from gluonnlp.model import transformer
from mxnet import gluon
from mxnet.gluon import nn

pytestmark = pytest.mark.long

WORDS, LENGTH, BATCH, MASKED = 50, 16, 4, 3


def bert(**options: Any) -> Any:
    encoder = model.BERTEncoder(
        units=32, hidden_size=64, num_layers=3, num_heads=4, max_length=LENGTH, dropout=0.1
    )
    return model.BERTModel(
        encoder, vocab_size=WORDS, token_type_vocab_size=2, units=32, embed_size=32, **options
    )


def words(*shape: int, high: int = WORDS) -> Any:
    return mx.nd.floor(mx.nd.random.uniform(0, high, shape=shape))


def sentences() -> tuple[Any, Any, Any]:
    """Words, their segments, and how many are there."""
    return words(BATCH, LENGTH), words(BATCH, LENGTH, high=2), words(BATCH, high=8) + 8


def classification() -> Script:
    """Gradients of two batches are added before an update."""
    function = gluon.loss.SoftmaxCrossEntropyLoss()

    def batches(net: Any) -> Iterator[Any]:
        net(*sentences())
        return ((sentences(), words(BATCH, high=3)) for _ in range(2 * BATCHES))

    return Script(
        lambda: model.BERTClassifier(bert(use_decoder=False, use_classifier=False), num_classes=3),
        batches,
        lambda net, batch: function(net(*batch[0]), batch[1]).mean(),
        micro_batches=2,
    )


def pretraining() -> Script:
    """Two heads: the masked words, with weights, and whether a sentence follows."""
    function = gluon.loss.SoftmaxCELoss()

    def batch() -> tuple[Any, ...]:
        weights = words(BATCH, MASKED, 1, high=2) + 0.1
        masked = words(BATCH, MASKED, high=8)
        return (*sentences(), masked), words(BATCH, MASKED), weights, words(BATCH, high=2)

    def batches(net: Any) -> Iterator[Any]:
        net(*batch()[0])
        return (batch() for _ in range(BATCHES))

    def losses(net: Any, batch: Any) -> Any:
        inputs, masked_words, weights, follows = batch
        _, _, next_sentence, decoded = net(*inputs)
        predicted, wanted = decoded.reshape((-1, WORDS)), masked_words.reshape((-1,))
        masked = function(predicted, wanted, weights.reshape((-1, 1))).sum()
        return masked / weights.sum() + function(next_sentence, follows).mean()

    return Script(lambda: bert(use_decoder=True, use_classifier=True), batches, losses)


def language_model() -> Script:
    """The states of a batch are those with which the next one begins."""
    function = gluon.loss.SoftmaxCrossEntropyLoss()
    states: list[Any] = []

    def batches(net: Any) -> Iterator[Any]:
        states[:] = [net.begin_state(batch_size=BATCH)]
        net(words(LENGTH, BATCH), states[0])
        return (words(LENGTH + 1, BATCH) for _ in range(BATCHES))

    def detached(value: Any) -> Any:
        return [detached(v) for v in value] if isinstance(value, list | tuple) else value.detach()

    def losses(net: Any, text: Any) -> Any:
        output, states[0], raw, dropped = net(text[:-1], detached(states[0]))
        loss = function(output.reshape((-1, WORDS)), text[1:].reshape((-1,))).mean()
        # The regularizers of activations, and of their change in time.
        return loss + 2 * (dropped[-1] ** 2).mean() + (raw[-1][1:] - raw[-1][:-1]).square().mean()

    return Script(
        lambda: model.train.AWDRNN(
            "lstm", WORDS, embed_size=16, hidden_size=24, num_layers=3, weight_drop=0.2
        ),
        batches,
        losses,
    )


def encoder() -> Script:
    """Self-attention with valid lengths."""

    def batches(net: Any) -> Iterator[Any]:
        lengths = mx.nd.array([4, 8, 12, 16])
        x = mx.nd.random.normal(shape=(BATCH, LENGTH, 32))
        net(x, None, lengths)
        return (mx.nd.random.normal(shape=(BATCH, LENGTH, 32)) for _ in range(BATCHES))

    return Script(
        lambda: model.TransformerEncoder(
            units=32, hidden_size=64, num_layers=2, num_heads=4, max_length=LENGTH
        ),
        batches,
        lambda net, x: (net(x, None, mx.nd.array([4, 8, 12, 16]))[0] ** 2).mean(),
    )


class Sentiment(gluon.HybridBlock):
    """GluonNLP's convolutions over words, of three widths, and the largest of each."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.embed = nn.Embedding(WORDS, 16)
            self.encoder = model.ConvolutionalEncoder(
                embed_size=16,
                num_filters=(8, 8, 8),
                ngram_filter_sizes=(3, 4, 5),
                num_highway=None,
                output_size=None,
            )
            self.drop, self.decide = nn.Dropout(0.5), nn.Dense(1)

    def hybrid_forward(self, F: Any, text: Any) -> Any:  # noqa: N803
        return self.decide(self.drop(self.encoder(self.embed(text))))


def sentiment() -> Script:
    function = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    return Script(
        Sentiment,
        lambda net: ((words(LENGTH, BATCH), words(BATCH, high=2)) for _ in range(BATCHES)),
        lambda net, batch: function(net(batch[0]), batch[1]).mean(),
    )


class Translator(gluon.HybridBlock):
    """GluonNLP's NMTModel is no HybridBlock: its parts, in one that is."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.encoder, self.decoder, _ = transformer.get_transformer_encoder_decoder(
                num_layers=2, num_heads=4, units=32, hidden_size=64, dropout=0.1
            )
            self.words, self.others = nn.Embedding(WORDS, 32), nn.Embedding(WORDS, 32)
            self.decode = nn.Dense(WORDS, flatten=False)

    def hybrid_forward(self, F: Any, text: Any, other: Any, length: Any, count: Any) -> Any:  # noqa: N803
        memory, _ = self.encoder(self.words(text), None, length)
        places = F.contrib.arange_like(memory, axis=1).reshape((1, -1))
        mask = F.broadcast_lesser(places, length.reshape((-1, 1)))
        return self.decode(self.decoder(self.others(other), [memory, mask], count)[0])


def translation() -> Script:
    """Smoothed labels, and only the words that are there count."""
    function, smooth = MaskedSoftmaxCELoss(sparse_label=False), LabelSmoothing(0.1, units=WORDS)

    def batches(net: Any) -> Iterator[Any]:
        lengths, counts = mx.nd.array([LENGTH, 9, 7, 5]), mx.nd.array([9, 8, 9, 4])
        return ((words(BATCH, LENGTH), words(BATCH, 10), lengths, counts) for _ in range(BATCHES))

    def losses(net: Any, batch: Any) -> Any:
        text, other, lengths, counts = batch
        scores = net(text, other[:, :-1], lengths, counts)
        return function(scores, smooth(other[:, 1:]), counts).mean()

    return Script(Translator, batches, losses)


SCRIPTS = {
    "BERT classification": classification,
    "BERT pretraining": pretraining,
    "AWD-LSTM": language_model,
    "transformer": encoder,
    "text CNN": sentiment,
    "translation": translation,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_equal_to_the_plain_loop(name: str) -> None:
    found, plan = differing(SCRIPTS[name]())
    assert not found
    assert plan.schedule.recomputed or name == "text CNN"  # of short texts: it is all weights
