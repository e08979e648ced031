"""MXNet's word language model by Module: states handed on, gradients clipped by their norm."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

from helpers.training_runs import differences
from memplan.mxnet import Module

pytestmark = pytest.mark.long

WORDS, LENGTH, BATCH, UNITS, STEPS = 40, 6, 4, 16, 4


def network() -> Any:
    """The loss, and the states with which the next batch begins."""
    data, label = mx.sym.Variable("data"), mx.sym.Variable("label")
    weight = mx.sym.Variable("embed_weight")
    embedded = mx.sym.Embedding(data, weight, input_dim=WORDS, output_dim=UNITS, name="embed")
    output, handed_on = mx.sym.Dropout(embedded, p=0.2), []
    for layer in range(2):
        cell = mx.rnn.LSTMCell(UNITS, prefix=f"lstm{layer}_")
        names = (f"state{layer}_h", f"state{layer}_c")
        begin = [mx.sym.Variable(name, shape=(BATCH, UNITS)) for name in names]
        output, states = cell.unroll(
            LENGTH, output, begin_state=begin, layout="TNC", merge_outputs=True
        )
        output = mx.sym.Dropout(output, p=0.2)
        handed_on += [mx.sym.BlockGrad(state) for state in states]
    scores = mx.sym.FullyConnected(
        mx.sym.Reshape(output, shape=(-1, UNITS)), weight, num_hidden=WORDS, name="decode"
    )
    chosen = mx.sym.pick(mx.sym.log_softmax(scores), mx.sym.Reshape(label, shape=(-1,)))
    loss = mx.sym.MakeLoss(-mx.sym.mean(chosen), name="loss")
    return mx.sym.Group([loss, *handed_on])


def trained(make: Any) -> list[dict[str, Any]]:
    """Losses, states and weights of every step."""
    mx.random.seed(1)
    np.random.seed(1)
    states = [f"state{layer}_{kind}" for layer in range(2) for kind in "hc"]
    module = make(network(), data_names=["data"], label_names=["label"], state_names=states)
    module.bind([("data", (LENGTH, BATCH))], [("label", (LENGTH, BATCH))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 1.0})
    module.set_states(value=0)
    words = np.random.default_rng(2).integers(0, WORDS, (STEPS * LENGTH + 1, BATCH))
    mx.random.seed(2)
    result = []
    for i in range(0, STEPS * LENGTH, LENGTH):
        text, following = words[i : i + LENGTH], words[i + 1 : i + 1 + LENGTH]
        module.forward(mx.io.DataBatch([mx.nd.array(text)], [mx.nd.array(following)]), True)
        outputs = module.get_outputs(merge_multi_context=False)
        values = {str(k): array.asnumpy() for k, [array] in enumerate(outputs)}
        module.backward()
        gradients = [array for arrays in module._exec_group.grad_arrays for array in arrays]
        mx.gluon.utils.clip_global_norm(gradients, 0.05)
        module.update()
        module.set_states(states=outputs[1:])
        weights = module.get_params()[0]
        result.append(values | {name: array.asnumpy() for name, array in weights.items()})
    return result


@pytest.mark.parametrize("realisation", ["explicit", "packed"])
def test_equal_to_the_plain_script(realisation: str) -> None:
    def planned(*arguments: Any, **options: Any) -> Any:
        return Module(*arguments, realisation=realisation, strategy="chen_sqrt", **options)

    expected = trained(mx.mod.Module)
    assert not differences(expected, trained(planned))
    assert expected[0]["1"].any()
