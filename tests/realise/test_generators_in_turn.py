"""Planning draws no random numbers, and moves no turn of MXNet's generators of them."""

from __future__ import annotations

from helpers.script import printed_by

SCRIPT = """
import mxnet as mx
import memplan

def drawn():
    ones = mx.nd.ones((1000,))
    return [float(mx.nd.Dropout(ones, mode="always").sum().asscalar()) for _ in range(5)]

net = mx.sym.Dropout(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=8))
net = mx.sym.broadcast_mul(mx.sym.Dropout(net), mx.sym.random.uniform(shape=(1, 8)))
net = mx.sym.MakeLoss(mx.sym.sum(net))
mx.random.seed(7)
expected = drawn()
for realisation in ("packed", "explicit", "mirror"):
    mx.random.seed(7)
    memplan.plan(net, strategy="store_all", realisation=realisation, data=(4, 8))
    print(realisation, drawn() == expected)
"""


def test_planning_leaves_the_random_numbers_of_a_script_as_they_are() -> None:
    answers = printed_by("-c", SCRIPT, MXNET_CPU_PARALLEL_RAND_COPY="5").splitlines()
    assert answers == ["packed True", "explicit True", "mirror True"]
