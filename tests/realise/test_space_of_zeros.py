"""The temporary space of gradients that are zeros, whatever the operator that they are of."""

from __future__ import annotations

import mxnet as mx
import pytest

import memplan
from memplan.mxnet.realise.estimate.operator_space import _FORMULAS, space_nbytes
from memplan.mxnet.trace.nnvm import EntryInfo, Infos, Node

ARRAY = EntryInfo((2, 4, 8, 8), "float32", 4)


@pytest.mark.parametrize("op", ["FullyConnected", "Convolution", "moments", *sorted(_FORMULAS)])
def test_zeros_take_none(op: str) -> None:
    """Those of an explicit step read nothing, others the array of whose shape they are."""
    data = Node("null", "data", {}, infos=Infos((), (ARRAY,)))
    call = Node(op, "call", {"k": "1"}, [(data, 0)] * 5, infos=Infos((ARRAY,) * 5, (ARRAY,)))
    told = Node("_zeros", "zeros", forward=call, infos=Infos((), (ARRAY,)))
    read = [(data, 0)]
    like = Node("zeros_like", "zeros", inputs=read, forward=call, infos=Infos((ARRAY,), (ARRAY,)))
    assert space_nbytes(told) == space_nbytes(like) == 0


@pytest.mark.parametrize("realisation", ["mirror", "packed", "explicit"])
@pytest.mark.parametrize("choice", ["topk", "argsort"])
def test_a_choice_alone_reads_a_trained_array(choice: str, realisation: str) -> None:
    with mx.name.NameManager():
        scores = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
        chosen = getattr(mx.sym, choice)(scores, axis=1)
        taken = mx.sym.take(mx.sym.Variable("table", shape=(4, 3)), chosen)
        net = mx.sym.MakeLoss(mx.sym.sum(mx.sym.tanh(taken)))
    options = {"ctx": mx.cpu(), "realisation": realisation, "strategy": "chen_greedy"}
    plan = memplan.plan(net, data=(2, 6), **options)
    assert plan.workspace_nbytes >= 0
